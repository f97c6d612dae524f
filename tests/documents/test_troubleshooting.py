"""Each text with which the package refuses or warns has its entry in docs/troubleshooting.md, and the page has no other."""

import re

import error_texts
import pytest

import mla_interop

PAGE = (error_texts.ROOT / "docs" / "troubleshooting.md").read_text()
LISTED = [line for block in re.findall(r"^```text\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE) for line in block.splitlines()]
# The one text that a function puts together from parts: see SelectionTable.refusal.
REFUSALS = {"no backend can serve …:", "backend … cannot serve …:"}


def test_every_text_has_an_entry() -> None:
    sources = error_texts.texts()
    missing = {text: path for text, path in sources.items() if text not in LISTED}
    assert not missing, f"add to an entry of docs/troubleshooting.md: {missing}"


def test_no_entry_is_of_a_text_that_is_gone() -> None:
    assert set(LISTED) - set(error_texts.texts()) == REFUSALS
    assert len(LISTED) == len(set(LISTED)), "one text, one entry"


def test_every_entry_says_more_than_its_texts() -> None:
    entries = re.split(r"^### ", PAGE.partition("\n## Symptoms")[0], flags=re.MULTILINE)[1:]
    assert len(entries) > 20
    for entry in entries:
        assert len(entry.partition("<details>")[0].split()) > 15 and entry.count("```text") == 1, entry


def test_a_refusal_of_the_selector_is_what_the_page_says() -> None:
    dimensions = mla_interop.MLADimensions.from_head_dims(192, 128)
    config = mla_interop.MLAPrefillSelectorConfig(dtype="float8_e5m2", dimensions=dimensions, num_heads=3, device_type="cpu")
    assert mla_interop.explain(config).refusal().startswith("no backend can serve ")
    assert mla_interop.explain(config, "CUDNN").refusal().startswith("backend CUDNN cannot serve ")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('def f(x):\n    raise input_error("x", f"{x} rows", f"at least {x + 1}", "Add some.")', ["x: got …; allowed: at least …. Add some."]),
        ('def f(x):\n    for name in x:\n        raise input_error(name, "a b", f"{x}")', ["…: got a b; allowed: …."]),
        ('def f(x):\n    advice = "A." if x else "B."\n    raise input_error("x", x, "y", advice)', ["x: got …; allowed: y. A.", "x: got …; allowed: y. B."]),
        ('def f(x):\n    def g():\n        raise MLAUnsupportedError(f"no {x}")\n    g()', ["no …"]),
        ('def f(x):\n    warnings.warn(f"{x} is old", stacklevel=2)\n    raise MLABuildError(x)', ["… is old"]),
    ],
)
def test_how_texts_are_read_from_sources(source: str, expected: list[str]) -> None:
    assert list(error_texts.texts_of(source)) == expected
