"""FlashAttention through the Python APIs of the packages that ship it: python kernels, for when none can be compiled ahead of time.

Each adapter is ``(q, k, v, cu_seqlens_q, cu_seqlens_k, max_q, max_k, scale, is_causal) -> (out, lse)`` over torch tensors, passes the
fewest arguments that say what is meant (TransformerEngine#3528), and lets ``torch_call.adapt`` normalise what comes back.
"""

import importlib
import importlib.util
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mla_interop.errors import MLAUnavailableError
from mla_interop.kernels.build import package_version
from mla_interop.kernels.signatures import require, signature_of
from mla_interop.kernels.torch_package import TorchPackage

# What the varlen functions of FlashAttention 3 and 4 are given by name.
_BY_NAME = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "softmax_scale", "causal")


def _open_fa4() -> Callable[..., tuple[Any, Any]]:
    function = importlib.import_module("flash_attn.cute").flash_attn_varlen_func
    require(function, f"flash_attn.cute.flash_attn_varlen_func of flash-attn-4 {package_version('flash-attn-4')}", ("q", "k", "v"), (*_BY_NAME, "return_lse"))
    one_at_a_time = threading.Lock()

    def attention(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int, scale: float, is_causal: bool) -> tuple[Any, Any]:
        # By keyword: its fourth positional argument is another one than FA2's and FA3's. It compiles in the first call, which crashed where another
        # thread's first call came at the same time, as in a JAX program over two devices.
        lengths = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": max_q, "max_seqlen_k": max_k}
        with one_at_a_time:
            return function(q, k, v, **lengths, softmax_scale=scale, causal=is_causal, return_lse=True)

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


def _package(variant: str, module: str, distribution: str, majors: str, pads_v: bool, open: Callable[[], Callable[..., tuple[Any, Any]]]) -> TorchPackage:
    """One way to FlashAttention; its variant starts with ``fa`` and the generation."""
    return TorchPackage(
        variant=variant,
        module=module,
        distribution=distribution,
        open=open,
        capabilities=tuple(f"{major}.x" for major in majors.split()),
        head_dims=() if pads_v else ((192, 128),),
        max_head_dim=256,
        pads_v=pads_v,
        lse_layout="NT",
    )


PACKAGES = (
    _package("fa4api", "flash_attn.cute", "flash-attn-4", "9 10", False, _open_fa4),
    _package("fa3", "flash_attn_interface", "flash-attn-3", "9", False, _open_fa3),
    _package("fa3vllm", "_vllm_fa3_C", "vllm", "9", False, _open_vllm_fa3),
    _package("fa2", "flash_attn_2_cuda", "flash-attn", "8 9 10 12", True, _open_fa2),
    _package("fa2torch", "torch", "torch", "8 9 10 12", True, _open_torch_fa2),
)
