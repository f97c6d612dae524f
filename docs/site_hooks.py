"""What the site does to pages on their way from Markdown, called by MkDocs (``hooks`` in mkdocs.yml)."""

import json
from pathlib import Path
from typing import Any

LIST = "<!-- notebooks -->"


def on_page_markdown(markdown: str, config: Any, **_: Any) -> str:
    """Markdown inside ``<details>`` is rendered too, as it is elsewhere; and the page of notebooks lists them."""
    markdown = markdown.replace("<details>", '<details markdown="1">')
    return markdown.replace(LIST, notebooks(Path(config["config_file_path"]).parent)) if LIST in markdown else markdown


def notebooks(root: Path) -> str:
    """A list of the notebooks by their titles; a link to the rendered page for each that has one in ``docs/notebooks``."""
    lines = []
    for path in sorted((root / "notebooks").glob("*.ipynb")):
        title = "".join(json.loads(path.read_text())["cells"][0]["source"]).splitlines()[0].lstrip("# ")
        page = f"notebooks/{path.stem}.html"
        lines.append(f"- [{title}]({page})" if (root / "docs" / page).exists() else f"- {title}: `make notebook NOTEBOOK=notebooks/{path.name}`")
    return "\n".join(lines)
