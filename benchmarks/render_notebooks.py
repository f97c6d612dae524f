"""Runs every notebook on this machine and writes each as a page of the documentation: ``python benchmarks/render_notebooks.py docs/notebooks``."""

import re
import sys
from pathlib import Path

import nbformat
from nbconvert import HTMLExporter
from nbconvert.preprocessors import ExecutePreprocessor

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
# A page must stand without the network: none of the scripts that the template would fetch is used.
OFFLINE = {"mathjax_url": "", "require_js_url": "", "jquery_url": "", "widget_renderer_url": ""}


def main(folder: Path) -> None:
    """Run and write all of them."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        ExecutePreprocessor(timeout=300, kernel_name="python3").preprocess(notebook, {"metadata": {"path": str(NOTEBOOKS)}})
        page, _ = HTMLExporter(**OFFLINE).from_notebook_node(notebook, {"metadata": {"name": path.stem}})
        (folder / f"{path.stem}.html").write_text(re.sub(r'<script src=""> ?</script>', "", page))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
