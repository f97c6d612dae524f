"""Kernels that compute the right thing and then misbehave, each in the way that a real one did.

A stub has the form that ``mla_interop.kernels.torch_call.adapt`` takes: it allocates, and returns (out, lse).
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import oracle
import torch

from mla_interop.backends.base import Kernel, MLAPrefillBackend
from mla_interop.errors import MLABuildError
from mla_interop.selector_config import MLAPrefillSelectorConfig

Attention = Callable[..., Any]


def attention(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int, scale: float, is_causal: bool) -> tuple[Any, Any]:
    """What a well-behaved kernel returns: the oracle's answer."""
    arrays = [x.float().numpy() for x in (q, k, v)]
    out, lse = oracle.attention(*arrays, cu_q.numpy(), cu_k.numpy(), scale, is_causal)
    return torch.from_numpy(out).to(q.dtype), torch.from_numpy(lse.astype(np.float32))


def altered(change: Callable[[Any, Any, Any], Any]) -> Attention:
    """The right answer, changed: ``change(out, lse, rows without a key [T, N])`` gives what the stub returns."""

    def stub(*arguments: Any) -> Any:
        out, lse = attention(*arguments)
        return change(out, lse, torch.isneginf(lse).T)

    return stub


def empty_rows(out_value: float, lse_value: float) -> Attention:
    """Rows without a key keep what was there: NaN, stale values, and an LSE that says they count (vllm#15492, #49294, flashinfer#4975)."""
    return altered(lambda out, lse, empty: (out.masked_fill(empty[..., None], out_value), lse.masked_fill(empty.T, lse_value)))


def ignores_strides(*arguments: Any) -> Any:
    """Reads V as if it were contiguous, from its first element on (tokenspeed-mla 0.1.8, cutlass#3453)."""
    q, k, v, *others = arguments
    return attention(q, k, torch.as_strided(v, v.shape, (v.shape[1] * v.shape[2], v.shape[2], 1)), *others)


BASE_2 = altered(lambda out, lse, empty: (out, lse / math.log(2)))  # flashinfer#2113
TOKEN_MAJOR = altered(lambda out, lse, empty: (out, lse.T.contiguous()))  # sglang#9363
BASE_2_TOKEN_MAJOR = altered(lambda out, lse, empty: (out, lse.T.contiguous() / math.log(2)))

WRONG_RETURNS: dict[str, Attention] = {  # diffusers#13999, #13173: what FlashAttention returns changed between versions
    "tensor": altered(lambda out, lse, empty: out),
    "tensor-of-two-rows": altered(lambda out, lse, empty: out[:2]),
    "tensor-of-three-rows": altered(lambda out, lse, empty: out[:3]),
    "tuple-of-four": altered(lambda out, lse, empty: (out, lse, None, None)),
    "tuple-of-one": altered(lambda out, lse, empty: (out,)),
    "lse-none": altered(lambda out, lse, empty: (out, None)),
    "lse-padded": altered(lambda out, lse, empty: (out, lse[None])),  # [B, N, max_q]: flashinfer#5258, pytorch#187899
    "lse-token-major-undeclared": altered(lambda out, lse, empty: (out, lse.T)),
    "out-of-d-columns": altered(lambda out, lse, empty: (torch.nn.functional.pad(out, (0, 64)), lse)),  # pytorch#133674
    "out-without-a-row": altered(lambda out, lse, empty: (out[:-1], lse)),
    "none": altered(lambda out, lse, empty: None),
    "swapped": altered(lambda out, lse, empty: (lse, out)),
}


def make_backend(kernels: Callable[[MLAPrefillSelectorConfig], Sequence[Kernel]]) -> type[MLAPrefillBackend]:
    """A backend class that hands out kernels; it takes FLASHINFER's name, under which the tests put it into the registry."""

    class StubBackend(MLAPrefillBackend):
        name = "FLASHINFER"
        device_types = ("cpu",)
        supported_dtypes = ("bfloat16", "float16", "float32")

        @classmethod
        def unavailable_reasons(cls) -> list[str]:
            return []

        @classmethod
        def kernels(cls, config: MLAPrefillSelectorConfig) -> tuple[Sequence[Kernel], list[str]]:
            return kernels(config), []

    return StubBackend


def stub_kernel(variant: str, make: Callable[[], Callable[..., Any]], **declared: Any) -> Kernel:
    """A python kernel; a variant's name is unique in the process, as XLA finds kernels by it."""
    settings = {"native_empty_rows": False, "strided": frozenset("qkv"), **declared}
    return Kernel(name=f"FLASHINFER.{variant}.cpu.any.0x0.any.any", kind="python", make=make, **settings)


def failing(error: BaseException) -> Callable[[], Callable[..., Any]]:
    """A ``make`` that raises."""

    def make() -> Callable[..., Any]:
        raise error

    return make


def failed_build(text: str) -> Callable[[], Callable[..., Any]]:
    """A ``make`` whose compiler failed (flashinfer#4410)."""
    return failing(MLABuildError(text))
