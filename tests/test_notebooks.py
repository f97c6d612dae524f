"""Every notebook runs from top to bottom, and is committed without output."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("matplotlib")
pytest.importorskip("pandas")
pytest.importorskip("torch")
pytest.importorskip("jax")

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS


@pytest.mark.parametrize("path", [pytest.param(path, marks=[pytest.mark.slow] if i else []) for i, path in enumerate(NOTEBOOKS)], ids=lambda path: path.stem)
def test_runs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}}).execute()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_has_no_output(path: Path) -> None:
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in cells), "clear the outputs before committing"


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_notebook(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """The recipe, run on small notebooks elsewhere: it renders what runs, and fails, leaving no page, where a cell does."""
    pytest.importorskip("nbconvert")
    root, stamp = request.config.rootpath, tmp_path / "stamp"
    stamp.touch()
    for name, code, works in (("notebook_that_runs", "print(6 * 7)", True), ("notebook_that_fails", "assert 0", False)):
        nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)]), tmp_path / f"{name}.ipynb")
        page = root / "notebooks-output" / f"{name}.html"
        page.unlink(missing_ok=True)
        command = ["make", "notebook", f"STAMP={stamp}", f"BIN={Path(sys.executable).parent}", f"NOTEBOOK={tmp_path / name}.ipynb"]
        ran = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120)
        assert (ran.returncode == 0) is works, ran.stderr
        assert page.exists() is works and (str(page) in ran.stdout) is works
        if works:
            assert "42" in page.read_text() and "WARNING" not in ran.stderr
            page.unlink()
