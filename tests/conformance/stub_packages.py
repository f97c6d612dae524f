"""Packages that are not installed, as far as an adapter can tell: their modules, their recorded signatures, and the right answer in
each one's own conventions (base and layout of LSE, in-place outputs, what is returned, what is left in rows without a key).

A stub binds its arguments as the real function would, so a name or an order that the package does not have is an error here too.
"""

import ast
import math
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import oracle
import recorded
import torch

Given = dict[str, Any]


def answer(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int, scale: float, causal: bool, empty: tuple[float, float]) -> tuple[Any, Any]:
    """out float32 ``[T, N, V]`` and natural-log lse ``[N, T]``, with NaN in rows of no sequence, ``empty`` in rows without a key, and, as a kernel
    computes no more tiles than its bounds allow, NaN where a bound is too small."""
    assert all(x.is_contiguous() and x.dtype == torch.int32 for x in (cu_q, cu_k)) and isinstance(scale, float) and isinstance(causal, bool)
    out, lse = oracle.attention(*(x.float().numpy() for x in (q, k, v)), cu_q.numpy(), cu_k.numpy(), scale, causal)
    none = np.isneginf(lse)
    out[none.T], lse[none] = empty
    out[int(cu_q[-1]) :], lse[:, int(cu_q[-1]) :] = math.nan, math.nan
    for start, end, keys in zip(cu_q[:-1].tolist(), cu_q[1:].tolist(), cu_k.diff().tolist(), strict=True):
        late = start if keys > max_k else min(start + max_q, end)
        out[late:end], lse[:, late:end] = math.nan, math.nan
    return torch.from_numpy(out).float(), torch.from_numpy(lse).float()


def packed(x: Any) -> Any:
    """What a kernel reads that takes the layout from the sizes: the memory from the first element on."""
    return torch.as_strided(x, x.shape, (x.shape[1] * x.shape[2], x.shape[2], 1))


def _fa2(g: Given) -> tuple[Any, ...]:
    assert g["q"].shape[2] == g["v"].shape[2] and g["dropout_p"] == 0.0 and g["return_attn_probs"] is True
    bounds = (g["cu_seqlens_q"], g["cu_seqlens_k"], g["max_seqlen_q"], g["max_seqlen_k"])
    out, lse = answer(g["q"], g["k"], g["v"], *bounds, _scale(g["softmax_scale"], g["q"]), g["causal"], (0.0, math.inf))  # vllm#15492
    return out.to(g["q"].dtype), lse, None


def _aten(g: Given) -> tuple[Any, ...]:
    assert g["query"].shape[2] == g["value"].shape[2] and g["dropout_p"] == 0.0 and g["return_debug_mask"] is False
    bounds = (g["cum_seq_q"], g["cum_seq_k"], g["max_q"], g["max_k"])
    out, lse = answer(g["query"], g["key"], g["value"], *bounds, _scale(g["scale"], g["query"]), g["is_causal"], (0.0, math.inf))
    return out.to(g["query"].dtype), lse, torch.zeros(2), torch.zeros(()), torch.zeros(0)


def _fa3(g: Given) -> Any:
    bounds = (g["cu_seqlens_q"], g["cu_seqlens_k"], g["max_seqlen_q"], g["max_seqlen_k"])
    out, lse = answer(g["q"], g["k"], g["v"], *bounds, _scale(g["softmax_scale"], g["q"]), g["causal"], (0.0, -math.inf))
    return (out.to(g["q"].dtype), lse) if g["return_attn_probs"] else out.to(g["q"].dtype)


def _vllm_fa3(g: Given) -> list[Any]:
    ours = {"q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "softmax_scale", "is_causal"}
    plain = {"window_size_left": -1, "window_size_right": -1, "softcap": 0.0, "is_rotary_interleaved": False, "num_splits": 1, "sm_margin": 0}
    plain |= {"cp_world_size": 1, "cp_rank": 0}
    assert {name: value for name, value in g.items() if name not in ours and value is not None} == plain
    bounds = (g["cu_seqlens_q"], g["cu_seqlens_k"], g["max_seqlen_q"], g["max_seqlen_k"])
    out, lse = answer(g["q"], g["k"], g["v"], *bounds, g["softmax_scale"], g["is_causal"], (0.0, -math.inf))
    return [out.to(g["q"].dtype), lse, torch.zeros(0), torch.zeros(0)]


def _fa4(g: Given) -> tuple[Any, Any]:
    bounds = (g["cu_seqlens_q"], g["cu_seqlens_k"], g["max_seqlen_q"], g["max_seqlen_k"])
    out, lse = answer(g["q"], g["k"], g["v"], *bounds, _scale(g["softmax_scale"], g["q"]), g["causal"], (math.nan, -math.inf))
    return out.to(g["q"].dtype), lse if g["return_lse"] else None


def _trtllm(g: Given) -> Any:
    q, out, workspace, cu_q = packed(g["query"]), g["out"], g["workspace_buffer"], g["cum_seq_lens_q"]
    cu_k = g["cum_seq_lens_kv"]
    assert g["backend"] == "trtllm-gen" and g["window_left"] == -1 and g["o_sf_scale"] == 1.0 and g["batch_size"] == cu_q.shape[0] - 1
    assert torch.equal(g["seq_lens"], cu_k.diff()) and bool((cu_k.diff() > 0).all()) and bool((cu_q.diff() > 0).all())
    slots = q.shape[1] * g["batch_size"] * -(-g["max_q_len"] // 256) * 256
    assert workspace.dtype == torch.uint8 and workspace.numel() >= (8 << 20) + 8 * slots + (1 << 20) and not workspace[: 8 << 20].any()
    bounds = (cu_q, cu_k, g["max_q_len"], g["max_kv_len"])
    made, lse = answer(q, g["key"], g["value"], *bounds, g["bmm1_scale"], g["is_causal"], (math.nan, math.nan))
    rows = slice(0, int(cu_q[-1]))
    made = made * g["bmm2_scale"]
    # What must have been zeroed is added to: flashinfer#2409.
    out[rows] = made[rows].to(out.dtype) if g["is_causal"] else (out[rows].float() + made[rows]).to(out.dtype)
    return (out, (lse / math.log(2)).T.contiguous()) if g["return_lse"] else out


def _tokenspeed(g: Given) -> Any:
    q, k, v = (packed(g[name]) for name in ("query", "key", "value"))
    cu_k = g["cum_seq_lens"]
    cu_q = cu_k if g["cum_seq_lens_q"] is None else g["cum_seq_lens_q"]
    max_q = g["max_seq_len"] if g["max_seq_len_q"] is None else g["max_seq_len_q"]
    assert q.dtype == k.dtype == v.dtype == torch.float8_e4m3fn and g["batch_size"] == cu_q.shape[0] - 1
    made, lse = answer(q, k, v, cu_q, cu_k, max_q, g["max_seq_len"], g["softmax_scale"], g["is_causal"], (math.nan, -math.inf))
    out = torch.empty(made.shape, dtype=torch.bfloat16) if g["out"] is None else g["out"]
    assert out.dtype == torch.bfloat16 and out.shape == made.shape and out.is_contiguous()
    out[: int(cu_q[-1])] = made[: int(cu_q[-1])].to(out.dtype)
    return (out, lse.T.contiguous()) if g["return_lse"] else out


def _cutlass(g: Given) -> tuple[Any, Any]:
    q, max_q = g["q"], g["max_qo_len"]
    assert isinstance(max_q, int)  # None would be read back from the device
    bounds = (g["qo_segment_offsets"], g["kv_segment_offsets"], max_q, sys.maxsize)
    out, lse = answer(q, g["k"], g["v"], *bounds, _scale(g["sm_scale"], q), g["causal"], (math.nan, -math.inf))
    return out.to(q.dtype), (lse / math.log(2)).T.contiguous() if g["return_lse"] else None


def _cudnn(g: Given) -> tuple[Any, Any]:
    q, k, v, cu_q, cu_k = g["q"], g["k_cache"], g["v_cache"], g["batch_offsets_q"], g["batch_offsets_k"]
    if g["batch_offsets_units"] == "elements":
        cu_q, cu_k = (torch.div(cu, x.stride(0), rounding_mode="floor").int() for cu, x in ((cu_q, q), (cu_k, k)))
    assert g["actual_seq_lens_q"] is None and g["actual_seq_lens_kv"] is None and g["workspace_buffer"].dtype == torch.uint8
    assert torch.equal(g["batch_offsets_stats"], g["batch_offsets_q"])
    bounds = (cu_q, cu_k, g["max_token_per_sequence"], g["max_sequence_kv"])
    made, lse = answer(q, k, v, *bounds, g["scale"], g["causal"], (math.nan, math.nan))
    out = g["out"]
    out[: int(cu_q[-1])] = made[: int(cu_q[-1])].to(out.dtype)
    lse = lse if g["lse_base"] == "ln" else lse / math.log(2)
    return out, lse.T.contiguous() if g["return_lse"] else None


def _scale(given: float | None, q: Any) -> float:
    return q.shape[2] ** -0.5 if given is None else given


# Function, as recorded -> what it computes.
COMPUTE: dict[str, Callable[[Given], Any]] = {
    "flash_attn.flash_attn_varlen_func": _fa2,
    "torch.ops.aten._flash_attention_forward.default": _aten,
    "flash_attn_interface.flash_attn_varlen_func": _fa3,
    "torch.ops._vllm_fa3_C.fwd.default": _vllm_fa3,
    "flash_attn.cute.flash_attn_varlen_func": _fa4,
    "flashinfer.prefill.trtllm_ragged_attention_deepseek": _trtllm,
    "flashinfer.prefill.fmha_varlen": _cutlass,
    "flashinfer.cudnn.prefill.cudnn_batch_prefill_with_kv_cache": _cudnn,
    "tokenspeed_mla.tokenspeed_mla_prefill": _tokenspeed,
}


def stub(function: str, parameters: recorded.Parameters) -> Any:
    """A function with a recorded signature that computes what the real one does. It keeps nothing: XLA's memory must not outlive a call."""
    signature = recorded.to_signature(parameters)
    defaults = {each["name"]: _literal(each["default"]) for each in parameters if "default" in each}

    def call(*arguments: Any, **options: Any) -> Any:
        return COMPUTE[function](defaults | signature.bind(*arguments, **options).arguments)

    call.__signature__ = signature  # type: ignore[attr-defined]
    return call


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except ValueError:
        return text


def install(monkeypatch: Any, distribution: str, version: str, change: Callable[[recorded.Parameters], recorded.Parameters] = lambda given: given) -> None:
    """Make a version of a package importable, or callable as torch's operator; ``change`` makes it one that does not exist."""
    for name, parameters in recorded.load(distribution, version).items():
        function = stub(name, change(parameters))
        if name.startswith("torch.ops."):
            _, _, namespace, operator, _ = name.split(".")
            monkeypatch.setattr(torch.ops, namespace, types.SimpleNamespace(**{operator: types.SimpleNamespace(default=function)}), raising=False)
            continue
        path, _, attribute = name.rpartition(".")
        _module(monkeypatch, path, attribute, function)
    if distribution == "flashinfer-python":
        _module(monkeypatch, "flashinfer.cudnn.prefill", "CUDNN_AVAILABLE", True)


def _module(monkeypatch: Any, path: str, attribute: str, value: Any) -> None:
    parts = path.split(".")
    for depth in range(1, len(parts) + 1):
        name = ".".join(parts[:depth])
        if not isinstance(sys.modules.get(name), _Stub):
            monkeypatch.setitem(sys.modules, name, _Stub(name))
    setattr(sys.modules[path], attribute, value)


class _Stub(types.ModuleType):
    """A module of a stub; a package too."""

    __path__: list[str] = []
