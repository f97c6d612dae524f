"""Signatures of other packages' functions, recorded from their sources; and how to record them again.

    python tests/conformance/recorded.py                                     # what is installed
    python tests/conformance/recorded.py flashinfer-python 0.7.4 unpacked/   # an unpacked wheel or sdist, which need not be importable
    python tests/conformance/recorded.py vllm NAME "fwd(Tensor q, ...) -> Tensor[]"   # an operator by its schema

Sources are read, not imported, so that packages for machines with a GPU can be recorded on one without.
"""

import ast
import inspect
import json
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "signatures"
# Distribution -> function, as it is imported -> the file of the distribution that defines it.
FUNCTIONS = {
    "flashinfer-python": {
        "flashinfer.prefill.trtllm_ragged_attention_deepseek": "flashinfer/prefill.py",
        "flashinfer.prefill.fmha_varlen": "flashinfer/prefill.py",
        "flashinfer.cudnn.prefill.cudnn_batch_prefill_with_kv_cache": "flashinfer/cudnn/prefill.py",
    },
    "tokenspeed-mla": {"tokenspeed_mla.tokenspeed_mla_prefill": "tokenspeed_mla/mla_prefill.py"},
    "flash-attn-4": {"flash_attn.cute.flash_attn_varlen_func": "flash_attn/cute/interface.py"},
    "tokenspeed-fa3": {"flash_attn_interface.flash_attn_varlen_func": "flash_attn_interface.py"},
    "flash-attn": {"flash_attn.flash_attn_varlen_func": "flash_attn/flash_attn_interface.py"},
}
OPERATORS = {"torch": "torch.ops.aten._flash_attention_forward.default", "vllm": "torch.ops._vllm_fa3_C.fwd.default"}

Parameters = list[dict[str, str]]


def from_source(text: str, name: str) -> Parameters:
    """The parameters of a module's function; of several definitions the last, as overloads come first."""
    found = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef) and node.name == name]
    if not found:
        raise LookupError(f"no function {name}")
    arguments = found[-1].args
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(plain) - len(arguments.defaults)) + [ast.unparse(default) for default in arguments.defaults]
    made = [_parameter(each.arg, "POSITIONAL_OR_KEYWORD", default) for each, default in zip(plain, defaults, strict=True)]
    made += [_parameter(arguments.vararg.arg, "VAR_POSITIONAL", None)] if arguments.vararg else []
    keyword_defaults = [None if default is None else ast.unparse(default) for default in arguments.kw_defaults]
    made += [_parameter(each.arg, "KEYWORD_ONLY", default) for each, default in zip(arguments.kwonlyargs, keyword_defaults, strict=True)]
    return made + ([_parameter(arguments.kwarg.arg, "VAR_KEYWORD", None)] if arguments.kwarg else [])


def from_signature(signature: inspect.Signature) -> Parameters:
    """The same from a live signature."""
    return [_parameter(each.name, each.kind.name, None if each.default is each.empty else repr(each.default)) for each in signature.parameters.values()]


def to_signature(parameters: Parameters) -> inspect.Signature:
    """A signature that binds as the recorded function does; its defaults are the texts of the real ones."""
    kinds = {kind.name: kind for kind in type(inspect.Parameter.KEYWORD_ONLY)}
    empty = inspect.Parameter.empty
    return inspect.Signature([inspect.Parameter(each["name"], kinds[each["kind"]], default=each.get("default", empty)) for each in parameters])


def _parameter(name: str, kind: str, default: str | None) -> dict[str, str]:
    return {"name": name, "kind": kind} | ({} if default is None else {"default": default})


def load(distribution: str, version: str) -> dict[str, Parameters]:
    """What was recorded of one version: function -> parameters."""
    return json.loads((FOLDER / f"{distribution}-{version}.json").read_text())["functions"]


def versions(distribution: str) -> list[str]:
    """The recorded versions of a distribution."""
    records = (json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json")))
    return [record["version"] for record in records if record["distribution"] == distribution]


def read(distribution: str, root: Path) -> dict[str, Parameters]:
    """Function -> parameters, from the sources under ``root``; without those that this version does not have."""
    found = {}
    for function, file in FUNCTIONS[distribution].items():
        try:
            found[function] = from_source((root / file).read_text(), function.rpartition(".")[2])
        except (OSError, LookupError) as error:
            print(f"{distribution}: {function}: {error}", file=sys.stderr)
    return found


def installed_root(distribution: str) -> Path | None:
    """Where an installed distribution's files are."""
    try:
        return Path(str(metadata.distribution(distribution).locate_file("")))
    except metadata.PackageNotFoundError:
        return None


def _write(distribution: str, version: str, functions: dict[str, Parameters]) -> None:
    FOLDER.mkdir(exist_ok=True)
    content: dict[str, Any] = {"distribution": distribution, "version": version, "functions": functions}
    (FOLDER / f"{distribution}-{version}.json").write_text(json.dumps(content, indent=1) + "\n")


def _operator(schema: str) -> Parameters:
    import torch

    from mla_interop.kernels.signatures import schema_signature

    return from_signature(schema_signature(torch._C.parse_schema(schema)))


def _main(arguments: list[str]) -> None:
    if len(arguments) == 3 and arguments[0] in OPERATORS:
        return _write(arguments[0], arguments[1], {OPERATORS[arguments[0]]: _operator(arguments[2])})
    if len(arguments) == 3:
        return _write(arguments[0], arguments[1], read(arguments[0], Path(arguments[2])))
    for distribution in FUNCTIONS:
        root = installed_root(distribution)
        if root is not None:
            _write(distribution, metadata.version(distribution), read(distribution, root))
    import torch

    version = torch.__version__.partition("+")[0]
    _write("torch", version, {OPERATORS["torch"]: _operator(str(torch.ops.aten._flash_attention_forward.default._schema))})


if __name__ == "__main__":
    _main(sys.argv[1:])
