"""FlashAttention through the Python APIs of the packages that ship it: python kernels, for when none can be compiled ahead of time.

Each adapter is ``(q, k, v, cu_seqlens_q, cu_seqlens_k, max_q, max_k, scale, is_causal) -> (out, lse)`` over torch tensors, passes the
fewest arguments that say what is meant (TransformerEngine#3528), and lets ``torch_call.adapt`` normalise what comes back.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from mla_interop.capability import DeviceCapability
from mla_interop.dimensions import MLADimensions
from mla_interop.errors import MLAUnavailableError
from mla_interop.installed import IMPORT_SECONDS, missing, within
from mla_interop.kernels import torch_call
from mla_interop.kernels.build import package_version
from mla_interop.kernels.signatures import require, signature_of


@dataclass(frozen=True)
class Package:
    """One way to FlashAttention.

    Attributes:
        variant: Its word in kernel names; starts with ``fa`` and the generation.
        generation: 2, 3 or 4.
        module: The module that must be importable; found, not imported, before it is used.
        distribution: Whose version ``explain`` shows.
        majors: Major compute capabilities.
        native_dims: (D, V) pairs with D != V that it serves without padding V.
        max_head_dim: Largest D.
        open: Imports the package and returns the adapter.
    """

    variant: str
    generation: int
    module: str
    distribution: str
    majors: tuple[int, ...]
    native_dims: tuple[tuple[int, int], ...]
    max_head_dim: int
    open: Callable[[], Callable[..., tuple[Any, Any]]]

    @property
    def pads_v(self) -> bool:
        """Whether V has to be padded to D where they differ."""
        return not self.native_dims

    def reasons(self, capability: DeviceCapability | None, dtype: str, dimensions: MLADimensions) -> list[str]:
        """Why it cannot serve a problem here; imports nothing."""
        found = missing(lambda: [] if _findable(self.module) else [f"{self.distribution} not installed (no module {self.module})"])
        if capability is None or capability.major not in self.majors:
            found.append(f"compute capability {capability} (allowed: {', '.join(f'{major}.x' for major in self.majors)})")
        if dtype not in ("bfloat16", "float16"):
            found.append(f"dtype {dtype} (allowed: bfloat16, float16)")
        pair = dimensions.qk_head_dim, dimensions.v_head_dim
        if max(pair) > self.max_head_dim or pair[0] % 8 or pair[1] % 8 or pair[1] > pair[0]:
            found.append(f"head dims {pair[0]}/{pair[1]} (allowed: multiples of 8 up to {self.max_head_dim}, V at most D)")
        elif self.native_dims and pair[0] != pair[1] and pair not in self.native_dims:
            found.append(f"head dims {pair[0]}/{pair[1]} (allowed: equal ones, and {', '.join(f'{d}/{v}' for d, v in self.native_dims)})")
        return found

    def version(self) -> str:
        """The package with its version, for people."""
        return f"{self.distribution} {package_version(self.distribution)}"

    def load(self, is_causal: bool) -> Callable[..., None]:
        """The launch function. Any exception on import, of whatever type, becomes a reason (oumi#2586)."""
        try:
            attention = within(IMPORT_SECONDS, f"importing {self.module}", self.open)
        except MLAUnavailableError:
            raise
        except Exception as error:
            raise MLAUnavailableError(f"{self.distribution} is installed but cannot be used: {type(error).__name__}: {error}") from error
        return torch_call.adapt(attention, is_causal=is_causal, pad_v=self.pads_v)


def _findable(module: str) -> bool:
    """Whether a module could be imported. Unlike ``importlib.util.find_spec`` it does not import the packages around it, which may raise anything."""
    if module in sys.modules:
        return sys.modules[module] is not None
    package, _, rest = module.partition(".")
    try:
        spec = importlib.util.find_spec(package)
        for part in rest.split(".") if rest else ():
            package = f"{package}.{part}"
            spec = PathFinder.find_spec(package, spec.submodule_search_locations) if spec and spec.submodule_search_locations else None
    except (ImportError, ValueError, AttributeError):
        return False
    return spec is not None


# What the varlen functions of FlashAttention 3 and 4 are given by name.
_BY_NAME = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "softmax_scale", "causal")


def _open_fa4() -> Callable[..., tuple[Any, Any]]:
    function = importlib.import_module("flash_attn.cute").flash_attn_varlen_func
    require(function, f"flash_attn.cute.flash_attn_varlen_func of flash-attn-4 {package_version('flash-attn-4')}", ("q", "k", "v"), (*_BY_NAME, "return_lse"))

    def attention(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int, scale: float, is_causal: bool) -> tuple[Any, Any]:
        # By keyword: its fourth positional argument is another one than FA2's and FA3's.
        return function(
            q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=max_q, max_seqlen_k=max_k, softmax_scale=scale, causal=is_causal, return_lse=True
        )

    return attention


def _open_fa3() -> Callable[..., tuple[Any, Any]]:
    function = importlib.import_module("flash_attn_interface").flash_attn_varlen_func
    require(function, "flash_attn_interface.flash_attn_varlen_func (FlashAttention-3)", ("q", "k", "v"), (*_BY_NAME, "return_attn_probs"))

    def attention(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int, scale: float, is_causal: bool) -> tuple[Any, Any]:
        return function(
            q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=max_q, max_seqlen_k=max_k, softmax_scale=scale, causal=is_causal, return_attn_probs=True
        )

    return attention


def _open_vllm_fa3() -> Callable[..., tuple[Any, Any]]:
    """vLLM's build of FlashAttention-3: a library that registers a torch operator; vLLM itself is not imported."""
    import torch

    path = _vllm_library()
    if path is None:
        raise MLAUnavailableError("no _vllm_fa3_C library on the import path")
    torch.ops.load_library(path)
    operator = torch.ops._vllm_fa3_C.fwd.default
    order = list(signature_of(operator).parameters)
    require(operator, "torch.ops._vllm_fa3_C.fwd (FlashAttention-3 of vLLM)", (), (*_VLLM_GIVEN, *(name for name in order if name in _VLLM_NEUTRAL)))

    def attention(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int, scale: float, is_causal: bool) -> tuple[Any, Any]:
        given: dict[str, Any] = dict(zip(_VLLM_GIVEN, (q, k, v, cu_q, cu_k, max_q, max_k, scale, is_causal), strict=True))
        out, lse, *_ = operator(*[given.get(name, _VLLM_NEUTRAL.get(name)) for name in order])
        return out, lse

    return attention


# The operator's parameters have no defaults, and differ from version to version: this is what each one that is not ours gets.
_VLLM_GIVEN: tuple[str, ...] = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "softmax_scale", "is_causal")
_VLLM_ABSENT = (
    "k_new v_new q_v out cu_seqlens_k_new seqused_q seqused_k page_table kv_batch_idx leftpad_k rotary_cos rotary_sin seqlens_rotary q_descale k_descale "
    "v_descale o_scale scheduler_metadata pack_gqa s_aux cp_tot_seqused_k"
).split()
_VLLM_NEUTRAL: dict[str, Any] = dict.fromkeys(_VLLM_ABSENT) | {
    "window_size_left": -1,
    "window_size_right": -1,
    "attention_chunk": 0,
    "softcap": 0.0,
    "rotary_interleaved": False,
    "is_rotary_interleaved": False,
    "num_splits": 1,
    "sm_margin": 0,
    "cp_world_size": 1,
    "cp_rank": 0,
}


def _vllm_library() -> str | None:
    spec = importlib.util.find_spec("_vllm_fa3_C")
    if spec is not None and spec.origin:
        return spec.origin
    vllm = importlib.util.find_spec("vllm")
    folders = [Path(folder) / "vllm_flash_attn" for folder in (vllm.submodule_search_locations or ())] if vllm else []
    return next((str(path) for folder in folders for path in folder.glob("_vllm_fa3_C*.so")), None)


def _open_fa2() -> Callable[..., tuple[Any, Any]]:
    function = importlib.import_module("flash_attn").flash_attn_varlen_func
    positional = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    what = f"flash_attn.flash_attn_varlen_func of flash-attn {package_version('flash-attn')}"
    require(function, what, positional, ("softmax_scale", "causal", "return_attn_probs"))

    def attention(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int, scale: float, is_causal: bool) -> tuple[Any, Any]:
        out, lse, _ = function(q, k, v, cu_q, cu_k, max_q, max_k, softmax_scale=scale, causal=is_causal, return_attn_probs=True)
        return out, lse

    return attention


def _open_torch_fa2() -> Callable[..., tuple[Any, Any]]:
    import torch

    function = torch.ops.aten._flash_attention_forward.default
    positional = ("query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal", "return_debug_mask")
    require(function, f"aten::_flash_attention_forward of torch {torch.__version__}", positional, ("scale",))

    def attention(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int, scale: float, is_causal: bool) -> tuple[Any, Any]:
        out, lse, *_ = function(q, k, v, cu_q, cu_k, max_q, max_k, 0.0, is_causal, False, scale=scale)
        return out, lse

    return attention


PACKAGES = (
    Package("fa4api", 4, "flash_attn.cute", "flash-attn-4", (9, 10), ((192, 128),), 256, _open_fa4),
    Package("fa3", 3, "flash_attn_interface", "flash-attn-3", (9,), ((192, 128),), 256, _open_fa3),
    Package("fa3vllm", 3, "_vllm_fa3_C", "vllm", (9,), ((192, 128),), 256, _open_vllm_fa3),
    Package("fa2", 2, "flash_attn_2_cuda", "flash-attn", (8, 9, 10, 12), (), 256, _open_fa2),
    Package("fa2torch", 2, "torch", "torch", (8, 9, 10, 12), (), 256, _open_torch_fa2),
)
