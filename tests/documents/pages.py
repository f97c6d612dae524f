"""The documents whose code is run: README.md and the pages of the site, and what is in their blocks."""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
NEEDS_GPU = 'title="Needs a CUDA GPU"'


class Block(NamedTuple):
    """A block of Python.

    Attributes:
        code: The text, with as many empty lines before it as make its line numbers those of the page.
        line: Its first line in the page.
        needs_gpu: Whether it says so.
    """

    code: str
    line: int
    needs_gpu: bool


def blocks(page: Path) -> list[Block]:
    """The blocks of a page, in order."""
    text = page.read_text()
    found = []
    for match in re.finditer(r"^```python([^\n]*)\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE):
        line = text.count("\n", 0, match.start(2))
        found.append(Block("\n" * line + match[2], line + 1, NEEDS_GPU in match[1]))
    return found


def with_code() -> list[Path]:
    """The pages that have any."""
    return [page for page in PAGES if blocks(page)]


def name(page: Path) -> str:
    """A page's path in the repository."""
    return str(page.relative_to(ROOT))
