"""The code of the README and of every page runs as it stands: the blocks of a page in order, as a reader would type them."""

import os
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pages
import pytest

from mla_interop import clear_cache, set_config
from mla_interop.backends import registry

# Inductor's own imports, the first time that torch.compile is used in a process.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """What a page registers, sets or writes is gone after it."""
    monkeypatch.setattr(registry, "_registered", {})
    monkeypatch.chdir(tmp_path)
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
    set_config(None)
    clear_cache()


def run(page: Path, gpu: bool) -> None:
    made = pages.blocks(page)
    for framework in ("torch", "jax", "transformers", "matplotlib", "pandas"):
        if re.search(rf"^(?:import|from) {framework}", "\n".join(block.code for block in made), flags=re.MULTILINE):
            pytest.importorskip(framework)
    names: dict[str, Any] = {"__name__": "__main__"}
    if gpu:  # what comes after the last block for a GPU is tested without
        made = made[: max(number for number, block in enumerate(made) if block.needs_gpu) + 1]
    for block in made:
        code = compile(block.code, pages.name(page), "exec")  # a block for a GPU is compiled here too
        if gpu or not block.needs_gpu:
            with warnings.catch_warnings():  # a page may change the filters
                exec(code, names)
    if page.name == "README.md":
        assert tuple(names["out"].shape) == (305, 16, 128) and tuple(names["lse"].shape) == (16, 305)
        assert bool((names["out"] == names["out"]).all())


@pytest.mark.parametrize("page", pages.with_code(), ids=pages.name)
def test_runs(page: Path) -> None:
    run(page, gpu=False)


@pytest.mark.gpu
@pytest.mark.parametrize("page", [page for page in pages.with_code() if any(block.needs_gpu for block in pages.blocks(page))], ids=pages.name)
def test_runs_with_a_gpu(page: Path) -> None:
    jax = pytest.importorskip("jax")
    with jax.default_device(jax.devices("cpu")[0]):  # only a block that says so runs on the GPU
        run(page, gpu=True)


def test_the_readme_has_code_for_both_frameworks_and_the_choice() -> None:
    made = [block.code for block in pages.blocks(pages.ROOT / "README.md")]
    for needed in ("from torch_side import", "from jax_side import", "explain("):
        assert any(needed in code for code in made), needed
    assert all(len(code.strip().splitlines()) <= 12 for code in made)


def test_no_block_is_missed() -> None:
    for page in pages.PAGES:
        text = page.read_text()
        assert len(pages.blocks(page)) == len(re.findall(r"^ *```+ *(?:python|py)\b", text, flags=re.MULTILINE)), page
        assert all(title == pages.NEEDS_GPU for title in re.findall(r"^```python (.+)$", text, flags=re.MULTILINE)), page
