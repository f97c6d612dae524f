"""The program that compiles one variant of ``fa4``: ``python -m mla_interop.kernels.fa4_compiler SPEC OBJECT``.

A first call waits for it, and more than a third of the time went into imports that change nothing of a kernel.  Any module of flash-attn-4 or quack
brings its package's whole interface along: backward kernels, an autotuner, torch's compiler.  And torch is needed for no more than names, of
dtypes and in annotations.  What is imported already is left as it is, so that the test can compile both ways: the objects are the same, byte by byte.
"""

import importlib
import importlib.util
import json
import sys
from types import ModuleType

PACKAGES = ("flash_attn", "flash_attn.cute", "quack")
TORCH = ("torch", "torch._subclasses", "torch._subclasses.fake_tensor")


class Names(ModuleType):
    """A module whose attributes are empty classes, each made when it is first asked for."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {})
        setattr(self, name, made)
        return made


def import_less() -> None:
    """Put packages that do not run their ``__init__``, and names in place of torch, where imports will find them."""
    if "torch" not in sys.modules:
        # TVM FFI imports torch wherever it can, for torch's own tensors; with None there, it cannot.
        sys.modules["torch"] = None  # type: ignore[assignment]
        importlib.import_module("tvm_ffi")
        sys.modules.update({name: Names(name) for name in TORCH})
        sys.modules.setdefault("triton", None)  # type: ignore[arg-type]  # only a disassembler, which both packages do without
    for name in PACKAGES:
        spec = None if name in sys.modules else importlib.util.find_spec(name)
        if spec is not None:
            sys.modules[name] = importlib.util.module_from_spec(spec)


if __name__ == "__main__":
    import_less()
    importlib.import_module("mla_interop.kernels.fa4_kernels").compile_to(sys.argv[2], **json.loads(sys.argv[1]))
