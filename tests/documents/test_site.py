"""The site builds with warnings as errors, and every link inside it leads to something that is there."""

import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlsplit

import pages
import pytest

pytest.importorskip("mkdocs")
pytest.importorskip("material")
pytest.importorskip("mkdocstrings")


class Links(HTMLParser):
    """What a page refers to, and what can be referred to in it."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.ids: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.ids |= {value for name, value in attrs if name in ("id", "name") and value}
        if tag != "base":
            self.targets += [value for name in ("href", "src") if (value := given.get(name))]


def build(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", *arguments]
    return subprocess.run(command, cwd=pages.ROOT, capture_output=True, text=True, timeout=200, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Links]:
    folder = tmp_path_factory.mktemp("site")
    done = build("--site-dir", str(folder))
    assert done.returncode == 0, done.stdout + done.stderr
    found = {}
    for path in folder.rglob("*.html"):
        if path.parent.name != "notebooks" and path.name != "404.html":  # written by nbconvert; its links are absolute
            found[str(path.relative_to(folder))] = links = Links()
            links.feed(path.read_text())
    found["."] = links = Links()
    links.ids |= {str(path.relative_to(folder)) for path in folder.rglob("*")}
    return found


def test_every_page_is_built(site: dict[str, Links]) -> None:
    docs = pages.ROOT / "docs"
    assert set(site) - {"."} == {str(page.relative_to(docs).with_suffix(".html")) for page in docs.rglob("*.md")}


def test_every_link_leads_somewhere(site: dict[str, Links]) -> None:
    files = site["."].ids
    for name, links in site.items():
        for target in links.targets:
            parts = urlsplit(target)
            if parts.scheme or target in (".", ".."):
                continue
            path, fragment = urldefrag(target)
            place = os.path.normpath(os.path.join(os.path.dirname(name), unquote(path))) if path else name
            assert place in files | {"."}, f"{name}: {target}"
            if fragment and place in site and fragment != "__skip":
                assert unquote(fragment) in site[place].ids, f"{name}: {target}"


def test_nothing_comes_from_elsewhere_when_a_page_is_looked_at(site: dict[str, Links]) -> None:
    outside = {target for links in site.values() for target in links.targets if urlsplit(target).scheme in ("http", "https")}
    assert not {target for target in outside if target.rsplit(".")[-1] in ("js", "css", "woff2", "png", "svg")}, outside


def test_what_has_no_page_is_an_error(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "index.md").write_text("# Title\n\n[there](nowhere.md)\n")
    (tmp_path / "mkdocs.yml").write_text("site_name: broken\n")
    done = build("--config-file", str(tmp_path / "mkdocs.yml"), "--site-dir", str(tmp_path / "site"))
    assert done.returncode != 0 and "nowhere.md" in done.stderr


@pytest.mark.parametrize("rendered", [False, True])
def test_the_page_of_notebooks_with_and_without_rendered_ones(tmp_path: Path, rendered: bool) -> None:
    docs = tmp_path / "docs"
    for folder in (docs / "notebooks", tmp_path / "notebooks"):
        folder.mkdir(parents=True)
    (docs / "reference").mkdir()
    (docs / "reference" / "explore.md").write_text("# Reference\n")
    for name in ("site_hooks.py", "notebooks.md"):
        (docs / name).write_text((pages.ROOT / "docs" / name).read_text())
    (docs / "notebooks.md").rename(docs / "index.md")
    for path in (pages.ROOT / "notebooks").glob("*.ipynb"):
        (tmp_path / "notebooks" / path.name).write_text(path.read_text())
    if rendered:
        (docs / "notebooks" / "05_speed.html").write_text("<html><title>Speed</title></html>")
    text = "site_name: small\nhooks: [docs/site_hooks.py]\nuse_directory_urls: false\nexclude_docs: '*.py'\nnot_in_nav: '*'\n"
    (tmp_path / "mkdocs.yml").write_text(text)
    done = build("--config-file", str(tmp_path / "mkdocs.yml"), "--site-dir", str(tmp_path / "site"))
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "site" / "index.html").read_text()
    assert ('href="notebooks/05_speed.html"' in page) is rendered
    assert "A first prefill, from both frameworks" in page and "make notebook NOTEBOOK=notebooks/01_first_prefill.ipynb" in page
