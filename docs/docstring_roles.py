"""Names in docstrings as links: what ``:func:`` and its like mark, said in Markdown (``extensions`` of mkdocstrings in mkdocs.yml)."""

import re
from pathlib import Path
from typing import Any

import griffe

ROLE = re.compile(r":(?:func|class|meth|mod):`~?([\w.]+)`")
PUBLIC = {name for page in (Path(__file__).parent / "reference").glob("*.md") for name in re.findall(r"^::: (\S+)", page.read_text(), flags=re.MULTILINE)}
PACKAGES = ("mla_interop", "torch_side", "jax_side", "mla_interop.explore")


class Roles(griffe.Extension):
    """Replaces roles in every docstring, before it is parsed."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for each module, class, function and attribute."""
        if obj.docstring:
            obj.docstring.value = ROLE.sub(lambda role: link(role[1], obj.path.partition(".")[0]), obj.docstring.value)


def link(name: str, package: str) -> str:
    """A link where the name has an entry in the reference, of its own package first; else the name alone."""
    last = name.rpartition(".")[2]
    homes = [name, *(f"{home}.{last}" for home in (name.partition(".")[0], package, *PACKAGES))]
    found = next((each for each in homes if each in PUBLIC), None)
    return f"[`{last}`][{found}]" if found else f"`{name}`"
