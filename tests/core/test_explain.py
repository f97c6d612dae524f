"""The table of ``explain``: for a terminal, a notebook, and JSON."""

import json
from typing import Any

import pytest

import mla_interop
from mla_interop.backends.base import Kernel
from mla_interop.backends.registry import names
from mla_interop.selection_table import Row, SelectionTable, copies_of
from mla_interop.selector import explain

R1 = mla_interop.MLADimensions(qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)


def problem(**changed: Any) -> mla_interop.MLAPrefillSelectorConfig:
    return mla_interop.MLAPrefillSelectorConfig(**{"dimensions": R1, "num_heads": 16, "device_type": "cpu", **changed})


def table(reasons: tuple[str, ...] = ("<b>no</b> & never",)) -> SelectionTable:
    kernel = Kernel(name="REFERENCE.xp.cpu.any", kind="array", make=lambda: lambda: None, versions=("numpy 2",))
    rows = (Row.of("FLASH_ATTN", reasons, None), Row.of("REFERENCE", (), kernel))
    return SelectionTable(problem(), rows, "REFERENCE", (), ("REFERENCE",))


@pytest.mark.usefixtures("all_installed")
def test_the_text_has_a_line_for_each_backend_and_marks_the_chosen_one() -> None:
    head, *lines = str(explain(problem())).splitlines()
    assert head == "MLA prefill, cpu, bfloat16, 16 heads of 192/128, causal, lse"
    assert [line.split()[:2] for line in lines[:2]] == [["->", "CPU_SDPA"], ["ok", "REFERENCE"]]
    assert [line.split()[:2] for line in lines[2:]] == [["no", name] for name in names() if name not in ("CPU_SDPA", "REFERENCE")]
    assert "first valid in the order" in lines[0] and "v padded from 128 to 192" in lines[0]
    assert "device cpu (runs on: cuda)" in lines[2]


@pytest.mark.usefixtures("all_installed")
def test_an_explicit_choice_is_marked_as_such() -> None:
    text = str(explain(problem(), "REFERENCE"))
    assert "-> REFERENCE" in text and "asked for" in text and "ok CPU_SDPA" in text


@pytest.mark.usefixtures("all_installed")
@pytest.mark.parametrize("capability", [None, "9.0", "10.0"])
def test_lines_fit_a_terminal(capability: str | None) -> None:
    shown = str(explain(problem(device_type="cuda" if capability else "cpu", capability=capability)))
    assert all(len(line) <= 110 for line in shown.splitlines())
    assert sum(line[:2] in ("->", "ok", "no") for line in shown.splitlines()) == len(names())


def test_html_is_escaped() -> None:
    shown = table()._repr_html_()
    assert "&lt;b&gt;no&lt;/b&gt; &amp; never" in shown and "<b>" not in shown
    assert shown.startswith("<table>") and shown.count("<tr>") == 3 and shown.count("<th ") == 4


@pytest.mark.usefixtures("all_installed")
@pytest.mark.parametrize("capability", [None, "9.0"])
def test_the_dict_is_json(capability: str | None) -> None:
    made = json.loads(json.dumps(explain(problem(device_type="cuda" if capability else "cpu", capability=capability)).to_dict()))
    assert made["problem"]["capability"] == capability and made["problem"]["dimensions"]["v_head_dim"] == 128
    assert {row["backend"] for row in made["backends"]} == set(names())
    assert made["chosen"] in made["order"]


def test_a_refusal_adds_what_was_tried() -> None:
    text = table().refusal({"CPU_SDPA (torch)": "g++ failed"})
    assert text.splitlines()[0].startswith("no backend can serve") and text.endswith("  CPU_SDPA (torch): g++ failed")


def test_copies_are_named() -> None:
    def kernel(**declared: Any) -> Kernel:
        return Kernel(**{"name": "A.b.c.d.e.f.g", "kind": "python", "make": lambda: lambda: None, **declared})

    assert copies_of(kernel()) == ("k, q, v made contiguous if strided",)
    assert copies_of(kernel(strided=frozenset("qk"), copies=("v padded",))) == ("v padded", "v made contiguous if strided")
    assert copies_of(kernel(strided=frozenset("qkv"))) == copies_of(kernel(kind="array")) == ()


def test_explaining_loads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def loaded(kernel: Kernel) -> Any:
        raise AssertionError(f"{kernel.name} was loaded")

    monkeypatch.setattr(Kernel, "launch", property(loaded))
    explain(problem())
    explain(problem(device_type="cuda", capability="9.0"))
