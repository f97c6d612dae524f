"""Every text with which the package refuses or warns, read from its sources. ``python tests/documents/error_texts.py`` prints them.

A text is what a user sees, with an ellipsis for each part that depends on the call: ``k: got …; allowed: q's last dim, ….``.
"""

import ast
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("mla_interop", "torch_side", "jax_side")
GAP = "…"
# What a name stands for in a function: the expressions that are assigned to it there.
Names = dict[str, list[ast.expr]]


def texts() -> dict[str, str]:
    """Each text, and the file of the package that it is in."""
    found: dict[str, str] = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for text in texts_of(path.read_text()):
                found.setdefault(text, str(path.relative_to(ROOT)))
    return found


def texts_of(source: str) -> Iterator[str]:
    """The texts of one file."""
    tree = ast.parse(source)
    constants = _assigned(tree.body)
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
        if function.name == "input_error":
            continue
        names = constants | _assigned(function.body)
        for call in _calls(function):
            yield from filter(re.compile(r"\w").search, map(_squeezed, _of_call(call, names)))


def _of_call(call: ast.Call, names: Names) -> Iterator[str]:
    called = getattr(call.func, "id", getattr(call.func, "attr", ""))
    if called == "input_error":
        argument, got, allowed, advice = [*(_said(part, names) for part in call.args), [""]][:4]
        for made in itertools.product(argument, got if allowed == [GAP] else [GAP], allowed, advice):
            yield f"{made[0]}: got {made[1]}; allowed: {made[2]}. {made[3]}"
    elif re.fullmatch(r"MLA\w+Error", called) or ast.unparse(call.func) == "warnings.warn":
        yield from _said(call.args[0], {})


def _said(part: ast.expr, names: Names) -> list[str]:
    """All that an expression can say; ``names`` are resolved, one level deep."""
    if isinstance(part, ast.FormattedValue):
        part = part.value
    if isinstance(part, ast.Constant):
        return [str(part.value)]
    if isinstance(part, ast.JoinedStr):
        return ["".join(made) for made in itertools.product(*(_said(value, names) for value in part.values))]
    if isinstance(part, ast.IfExp):
        return [*_said(part.body, names), *_said(part.orelse, names)]
    if isinstance(part, ast.BinOp):
        words = any(isinstance(node, ast.Constant) and isinstance(node.value, str) for node in ast.walk(part))
        return ["".join(made) for made in itertools.product(_said(part.left, names), _said(part.right, names))] if words else [GAP]
    if isinstance(part, ast.Name) and part.id in names:
        return [text for value in names[part.id] for text in _said(value, {})]
    return [GAP]


def _assigned(body: list[ast.stmt]) -> Names:
    """Names that are assigned words, and nothing else, in these statements."""
    found: Names = {}
    for node in itertools.chain.from_iterable(map(ast.walk, body)):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            found.setdefault(node.targets[0].id, []).append(node.value)
    return {name: values for name, values in found.items() if all(_is_words(value) for value in values)}


def _is_words(value: ast.expr) -> bool:
    if isinstance(value, ast.IfExp):
        return _is_words(value.body) and _is_words(value.orelse)
    return isinstance(value, ast.JoinedStr) or (isinstance(value, ast.Constant) and isinstance(value.value, str))


def _calls(function: ast.AST) -> Iterator[ast.Call]:
    """Calls of a function, but for those of functions inside it, which come by themselves."""
    for child in ast.iter_child_nodes(function):
        if isinstance(child, ast.Call):
            yield child
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _calls(child)


def _squeezed(text: str) -> str:
    return re.sub(rf"{GAP}(?:[ ,.'/]*{GAP})+", GAP, " ".join(text.split()))


if __name__ == "__main__":
    for text, path in sorted(texts().items(), key=lambda each: (each[1], each[0])):
        print(f"{path}\t{text}")
