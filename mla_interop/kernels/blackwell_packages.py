"""Packages with kernels for compute capability 10.x, by their torch APIs. None has run in this project: there was no such GPU.

What they are called with, and what they give back, is tested against stubs that follow the packages' sources
(tests/conformance); what their kernels do with it is not.
"""

import importlib
from collections.abc import Callable
from typing import Any

from mla_interop.errors import MLAUnavailableError, MLAUnsupportedError
from mla_interop.kernels.build import package_version
from mla_interop.kernels.needs import NO_EMPTY_SEQUENCES, OUT_BUFFER, ZEROED_OUT, ZEROED_WORKSPACE
from mla_interop.kernels.signatures import require
from mla_interop.kernels.torch_package import TorchPackage

BLACKWELL = ("10.0", "10.3")
_FLASHINFER = "flashinfer-python"
_MLA_DIMS = ((192, 128), (128, 128))
# TRT-LLM's launcher puts 2**21 counters at the head of the workspace, then with LSE the softmax statistics, two floats for each head
# and query row with every sequence rounded up to whole tiles, with a guard of 1 MiB; the rest is scratch. FlashInfer advises 128 MiB
# without statistics; a fixed size overflows for many sequences or heads (vllm#48428).
_TRTLLM_BASE, _TRTLLM_TILE, _TRTLLM_GUARD = 128 << 20, 256, 1 << 20
_CUDNN_WORKSPACE = 128 << 20
_INT32_ELEMENTS = 2**31
# CUTLASS's planner writes its work items into three arrays of this length, and does not look whether they fit.
_CUTLASS_ITEMS, _CUTLASS_TILE = 131072, 256


def trtllm_workspace_bytes(num_seqs: int, heads: int, max_q: int) -> int:
    """Bytes that a launch of TRT-LLM's ragged kernel may use.

    Args:
        num_seqs: B.
        heads: N.
        max_q: Tokens of the longest query sequence, or a bound of it: state ``max_seqlen_q`` where the host does not know better.
    """
    rows = num_seqs * -(-max_q // _TRTLLM_TILE) * _TRTLLM_TILE
    return _TRTLLM_BASE + _TRTLLM_GUARD + 8 * heads * rows


def _open_trtllm() -> Callable[..., tuple[Any, Any]]:
    version = package_version(_FLASHINFER)
    keywords = "query key value workspace_buffer seq_lens max_q_len max_kv_len bmm1_scale bmm2_scale o_sf_scale batch_size window_left cum_seq_lens_q "
    keywords += "cum_seq_lens_kv enable_pdl is_causal return_lse out backend"
    function = importlib.import_module("flashinfer.prefill").trtllm_ragged_attention_deepseek
    require(function, f"flashinfer.prefill.trtllm_ragged_attention_deepseek of {_FLASHINFER} {version}", keywords=keywords.split())
    wraps = version.startswith("0.6.")

    def attention(
        q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int, scale: float, is_causal: bool, *, out: Any, workspace: Any
    ) -> tuple[Any, Any]:
        if wraps and max(k.numel(), v.numel()) >= _INT32_ELEMENTS:
            raise MLAUnsupportedError(
                f"k: {k.numel()} elements (allowed: fewer than {_INT32_ELEMENTS}; {_FLASHINFER} {version} computes a stride from them in 32 bits, "
                "flashinfer#3779). Install 0.7 or later, or choose another backend."
            )
        return function(
            query=q,
            key=k,
            value=v,
            workspace_buffer=workspace,
            seq_lens=cu_k.diff(),
            max_q_len=max_q,
            max_kv_len=max_k,
            bmm1_scale=scale,
            bmm2_scale=1.0,
            o_sf_scale=1.0,
            batch_size=cu_q.shape[0] - 1,
            window_left=-1,
            cum_seq_lens_q=cu_q,
            cum_seq_lens_kv=cu_k,
            enable_pdl=False,
            is_causal=is_causal,
            return_lse=True,
            out=out,
            backend="trtllm-gen",
        )

    return attention


def _open_tokenspeed() -> Callable[..., tuple[Any, Any]]:
    keywords = "query key value seq_lens cum_seq_lens max_seq_len batch_size softmax_scale is_causal return_lse cum_seq_lens_q max_seq_len_q enable_pdl out"
    function = importlib.import_module("tokenspeed_mla").tokenspeed_mla_prefill
    require(function, f"tokenspeed_mla.tokenspeed_mla_prefill of tokenspeed-mla {package_version('tokenspeed-mla')}", keywords=keywords.split())

    def attention(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int, scale: float, is_causal: bool, *, out: Any) -> tuple[Any, Any]:
        return function(
            query=q,
            key=k,
            value=v,
            seq_lens=cu_k.diff(),
            cum_seq_lens=cu_k,
            max_seq_len=max_k,
            batch_size=cu_q.shape[0] - 1,
            softmax_scale=scale,
            is_causal=is_causal,
            return_lse=True,
            cum_seq_lens_q=cu_q,
            max_seq_len_q=max_q,
            enable_pdl=False,
            out=out,
        )

    return attention


def _open_flashinfer_cutlass() -> Callable[..., tuple[Any, Any]]:
    """FlashInfer's CUTLASS kernel by the function under its wrapper: the wrapper's ``plan`` reads the lengths back from the device."""
    keywords = "q k v qo_segment_offsets kv_segment_offsets max_qo_len causal sm_scale return_lse"
    function = importlib.import_module("flashinfer.prefill").fmha_varlen
    require(function, f"flashinfer.prefill.fmha_varlen of {_FLASHINFER} {package_version(_FLASHINFER)}", keywords=keywords.split())

    def attention(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int, scale: float, is_causal: bool) -> tuple[Any, Any]:
        items = (q.shape[0] // _CUTLASS_TILE + cu_q.shape[0] - 1) * q.shape[1]
        if items > _CUTLASS_ITEMS:
            raise MLAUnsupportedError(
                f"q: up to {items} tiles of {_CUTLASS_TILE} tokens over all heads (allowed: {_CUTLASS_ITEMS}, what FlashInfer's planner has room for). "
                "Split the batch, or name another backend."
            )
        # Without out: it writes a little in front of its output, and makes room for that only where it allocates.
        return function(q=q, k=k, v=v, qo_segment_offsets=cu_q, kv_segment_offsets=cu_k, max_qo_len=max_q, causal=is_causal, sm_scale=scale, return_lse=True)

    return attention


def _open_flashinfer_cudnn() -> Callable[..., tuple[Any, Any]]:
    keywords = "q k_cache v_cache scale workspace_buffer max_token_per_sequence max_sequence_kv causal return_lse batch_offsets_q batch_offsets_k "
    keywords += "batch_offsets_stats batch_offsets_units out lse_base"
    module = importlib.import_module("flashinfer.cudnn.prefill")
    what = f"flashinfer.cudnn.prefill.cudnn_batch_prefill_with_kv_cache of {_FLASHINFER} {package_version(_FLASHINFER)}"
    function = require(module.cudnn_batch_prefill_with_kv_cache, what, keywords=keywords.split())
    if not module.CUDNN_AVAILABLE:
        raise MLAUnavailableError("FlashInfer cannot import cudnn (nvidia-cudnn-frontend and cuDNN), and would use another kernel")

    def attention(
        q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int, scale: float, is_causal: bool, *, out: Any, workspace: Any
    ) -> tuple[Any, Any]:
        return function(
            q=q,
            k_cache=k,
            v_cache=v,
            scale=scale,
            workspace_buffer=workspace,
            max_token_per_sequence=max_q,
            max_sequence_kv=max_k,
            causal=is_causal,
            return_lse=True,
            batch_offsets_q=cu_q,
            batch_offsets_k=cu_k,
            batch_offsets_stats=cu_q,
            batch_offsets_units="tokens",
            out=out,
            lse_base="ln",
        )

    return attention


TRTLLM_RAGGED = TorchPackage(
    variant="trtllmgen",
    module="flashinfer.prefill",
    distribution=_FLASHINFER,
    open=_open_trtllm,
    capabilities=BLACKWELL,
    head_dims=(*_MLA_DIMS, (256, 256)),
    dtypes={"bfloat16": "bfloat16", "float16": "float16", "float8_e4m3fn": "bfloat16"},
    strided=frozenset("kv"),
    lse_base="2",
    needs=frozenset({NO_EMPTY_SEQUENCES, OUT_BUFFER, ZEROED_WORKSPACE}),
    needs_without_mask=frozenset({ZEROED_OUT}),
    workspace_bytes=trtllm_workspace_bytes,
)
TOKENSPEED_MLA = TorchPackage(
    variant="cutedsl",
    module="tokenspeed_mla",
    distribution="tokenspeed-mla",
    open=_open_tokenspeed,
    capabilities=BLACKWELL,
    head_dims=((192, 128),),
    dtypes={"float8_e4m3fn": "bfloat16"},
    strided=frozenset(),  # it rebuilds packed layouts from sizes, and reads a strided V wrongly without a word
    needs=frozenset({OUT_BUFFER}),
)
# Each by its own function: with FlashInfer's "auto" the choice, and with it the base of LSE, would follow the installed versions.
FLASHINFER = (
    TorchPackage(
        variant="cutlass",
        module="flashinfer.prefill",
        distribution=_FLASHINFER,
        open=_open_flashinfer_cutlass,
        capabilities=BLACKWELL,
        head_dims=(*_MLA_DIMS, (64, 64)),
        lse_base="2",
    ),
    TorchPackage(
        variant="cudnn",
        module="flashinfer.cudnn.prefill",
        distribution=_FLASHINFER,
        open=_open_flashinfer_cudnn,
        capabilities=BLACKWELL,
        head_dims=_MLA_DIMS,
        minimum_version=(0, 7),  # offsets in tokens, packed LSE
        also={"cudnn": "nvidia-cudnn-frontend"},
        needs=frozenset({OUT_BUFFER, ZEROED_WORKSPACE}),
        workspace_bytes=lambda num_seqs, heads, max_q: _CUDNN_WORKSPACE,
    ),
)
