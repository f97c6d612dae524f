"""Compiles one common form of each Triton kernel down to machine code, for every architecture, without a GPU; prints those that went well."""

import warnings
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from mla_interop.kernels import triton_latents, triton_merge

HALF, SINGLE, WHOLE = "*bf16", "*fp32", "*i32"
FORMS: list[tuple[Any, dict[str, str], dict[str, Any]]] = [
    (
        triton_merge._merge,
        {"out_a": SINGLE, "out_b": HALF, "out": SINGLE, "lse_a": SINGLE, "lse_b": SINGLE, "lse": SINGLE},
        {"rows": 16, "columns": 128},
    ),
    (
        triton_latents._gather,
        {"cache": "*u8", "rows": WHOLE, "block_table": WHOLE, "requests": WHOLE, "scale": SINGLE, "out": HALF},
        {"has_table": True, "is_float8": True, "scale_kind": 2, "row_tile": 4, "columns": 1024},
    ),
    (triton_latents._expand_k, {"kv_up": HALF, "k_pe": HALF, "out": HALF}, {"head_tile": 16, "nope_tile": 128, "rope_tile": 64}),
]


def main() -> None:
    warnings.simplefilter("ignore")
    for capability in (80, 90, 100, 120):
        for kernel, pointers, constants in FORMS:
            signature = {name: "constexpr" if name in constants else pointers.get(name, "i32") for name in kernel.arg_names}
            made = compile(ASTSource(kernel, signature=signature, constexprs=constants), target=GPUTarget("cuda", capability, 32))
            assert made.asm["cubin"]
            # Without the barrier one thread may write an operand that another has not read yet.
            assert kernel is not triton_merge._merge or "bar.sync" in made.asm["ptx"]
        print(capability)


if __name__ == "__main__":
    main()
