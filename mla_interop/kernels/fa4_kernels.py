"""The half of ``fa4`` that imports CuTe DSL and flash-attn-4: it compiles one variant to an object file.

Only ever imported in a process of its own (``fa4_compiler``): the imports below set process-wide state of the DSL.  No
GPU is needed; the target is ``CUTE_DSL_ARCH``.
What is taken from flash-attn-4 is internal to that package, so ``fa4`` pins the versions this file was proven with.
"""

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
import quack.dsl  # noqa: F401  # flash-attn-4's kernels index tensors in a way that this teaches the DSL
from cuda.bindings.driver import CUstream
from cutlass import Float32, Float64, Int32, Int64, const_expr
from flash_attn.cute.flash_fwd import FlashAttentionForwardSm80
from flash_attn.cute.flash_fwd_sm90 import FlashAttentionForwardSm90
from flash_attn.cute.flash_fwd_sm100 import FlashAttentionForwardSm100
from flash_attn.cute.flash_fwd_sm120 import FlashAttentionForwardSm120

DTYPES = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}
WARP = 32
FILL_WARPS = 8  # warps of one block of the fill kernel
FILL_BLOCKS_X = 128  # blocks that share the rows of one range: about one per SM
FILL_BLOCKS_Y = 8  # ranges in flight; more sequences than this are walked in steps
VECTOR = 8  # 16-bit elements in one 16-byte store
TAIL, NO_KEY = 1, 2  # bits of `finish`


@cute.jit
def scaled_score(score, batch_idx, head_idx, q_idx, kv_idx, seqlen_info, aux_tensors):  # type: ignore[no-untyped-def]
    """A score_mod that changes nothing: with any score_mod the kernel multiplies by the scale *before* it masks."""
    return score


def sm90_tile(head_dim_qk: int, is_causal: bool) -> dict[str, Any]:
    """How a 9.0 kernel is cut, as the package's own interface has it: a test compares.  To import that takes longer than to compile."""
    tile_m, tile_n = {64: (192, 128), 96: (192, 128 if is_causal else 144), 256: (128, 80)}.get(head_dim_qk, (128, 128))
    return {"tile_m": tile_m, "tile_n": tile_n, "mma_pv_is_rs": head_dim_qk != 96, "intra_wg_overlap": True}


def attention(arch: str, dtype: type, head_dim_qk: int, head_dim_v: int, is_causal: bool, score_mod: Callable[..., Any] | None) -> Any:
    """The package's forward kernel for ``arch``, configured as the package's own interface does for ragged MHA.

    So: heads not packed, no split over keys, no persistent or work-stealing scheduler, hence no workspace.
    """
    common = {"is_causal": is_causal, "is_local": False, "pack_gqa": False, "score_mod": score_mod}
    if arch == "sm_90a":
        sizes = {**sm90_tile(head_dim_qk, is_causal), "num_stages": 2, "num_threads": 384}
        return FlashAttentionForwardSm90(dtype, head_dim_qk, head_dim_v, 1, **sizes, **common)
    if arch in ("sm_100a", "sm_103a"):
        wide = head_dim_v == 256  # two query tiles of this width do not fit in tensor memory; two CTAs share one instead
        ping_pong = wide and head_dim_qk == 256 and score_mod is None
        stages = {"q_stage": 1 if wide else 2, "use_2cta_instrs": wide, "use_s_ping_pong": ping_pong}
        return FlashAttentionForwardSm100(head_dim_qk, head_dim_v, 1, is_static_persistent=False, is_varlen_q=True, **stages, **common)
    family = {"sm_80": FlashAttentionForwardSm80, "sm_120a": FlashAttentionForwardSm120}[arch]
    tile_n = 128 if arch == "sm_120a" and head_dim_qk <= 64 else 64
    return family(dtype, head_dim_qk, head_dim_v, 1, tile_m=128, tile_n=tile_n, num_stages=1, num_threads=128, **common)


@cute.jit
def rows_without_key(cu_seqlens_q: cute.Tensor, cu_seqlens_k: cute.Tensor, sequence: Int32, is_causal: cutlass.Constexpr[bool]) -> Int32:
    """How many leading rows of a sequence see no key; with bottom-right alignment it is always the leading ones."""
    length_q = cu_seqlens_q[sequence + 1] - cu_seqlens_q[sequence]
    length_k = cu_seqlens_k[sequence + 1] - cu_seqlens_k[sequence]
    rows = Int32(0)
    if const_expr(is_causal):
        rows = cutlass.max(length_q - length_k, Int32(0))
    elif length_k == 0:
        rows = length_q
    return rows


@cute.kernel
def fill_kernel(
    out: cute.Tensor,
    lse: cute.Tensor | None,
    cu_seqlens_q: cute.Tensor,
    cu_seqlens_k: cute.Tensor,
    first: Int32,
    is_causal: cutlass.Constexpr[bool],
):
    """Write out 0 and lse -inf into ranges ``first`` to B of rows, one warp a row.

    Range i < B is the rows of sequence i that see no key, range B the tail at and past ``cu_seqlens_q[B]``.
    """
    thread, block, grid = cute.arch.thread_idx()[0], cute.arch.block_idx(), cute.arch.grid_dim()
    lane, warp = thread % WARP, block[0] * FILL_WARPS + thread // WARP
    sequences, heads = cu_seqlens_q.shape[0] - 1, out.shape[1]
    per_head = out.shape[2] // VECTOR
    vectors = cute.logical_divide(out, (None, None, VECTOR))  # strides are 64 bits wide: no offset overflows
    zero = cute.make_rmem_tensor(VECTOR, out.element_type)
    zero.fill(0.0)
    for i in cutlass.range(first + block[1], sequences + 1, grid[1]):
        start, stop = cu_seqlens_q[i], Int32(out.shape[0])
        if i < sequences:
            stop = start + rows_without_key(cu_seqlens_q, cu_seqlens_k, i, is_causal)
        for row in cutlass.range(start + warp, stop, grid[0] * FILL_WARPS):
            for j in cutlass.range(lane, heads * per_head, WARP):
                cute.autovec_copy(zero, vectors[row, j // per_head, (None, j % per_head)])
            if const_expr(lse is not None):
                for head in cutlass.range(lane, heads, WARP):
                    lse[head, row] = -Float32.inf


def with_plain_strides(tensor: cute.Tensor) -> cute.Tensor:
    """The same [rows, heads, width] tensor with a packed tensor's stride wherever an extent is 1.

    In DLPack the stride along such an extent may be anything, and TVM FFI lets it pass; a TMA descriptor must not get it.
    """
    rows, heads, width = tensor.shape

    def plain(stride: Any, extent: Any, packed: Any) -> Any:
        if isinstance(stride, int):
            return stride
        return cute.assume(stride * Int64(extent != 1) + packed * Int64(extent == 1), divby=VECTOR)

    strides = (plain(tensor.stride[0], rows, Int64(heads) * width), plain(tensor.stride[1], heads, width), 1)
    return cute.make_tensor(tensor.iterator, cute.make_layout(tensor.shape, stride=strides))


def make_launch(arch: str, dtype: type, head_dim_qk: int, head_dim_v: int, is_causal: bool, any_scale: bool) -> Callable[..., None]:
    """The host function with the package's kernel ABI (docs/architecture.md), to be compiled.

    The fast kernel masks with -inf, takes the maximum, and only then scales: a scale of zero makes NaN of that, and a negative one +inf.
    The one for any scale scales first, at the price of a multiplication per score.
    """
    attend = attention(arch, dtype, head_dim_qk, head_dim_v, is_causal, scaled_score if any_scale else None)

    @cute.jit
    def launch(
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        cu_seqlens_q: cute.Tensor,
        cu_seqlens_k: cute.Tensor,
        plan: cute.Tensor | None,
        scratch: cute.Tensor | None,
        out: cute.Tensor,
        lse: cute.Tensor | None,
        scale: Float64,
        max_seqlen_q: Int64,
        max_seqlen_k: Int64,
        finish: Int64,
        stream: CUstream,
    ):
        q, k, v, out = [with_plain_strides(each) for each in (q, k, v, out)]
        attend(q, k, v, out, lse, Float32(scale), cu_seqlens_q, cu_seqlens_k, stream=stream)
        if finish != 0:
            sequences = cu_seqlens_q.shape[0] - 1
            first = Int32(0) if (finish & NO_KEY) != 0 else Int32(sequences)
            ranges = cutlass.min(sequences + 1 - first, Int32(FILL_BLOCKS_Y))
            filled = fill_kernel(out, lse, cu_seqlens_q, cu_seqlens_k, first, is_causal)
            filled.launch(grid=(FILL_BLOCKS_X, ranges, 1), block=(FILL_WARPS * WARP, 1, 1), stream=stream)

    return launch


def arguments(dtype: type, head_dim_qk: int, head_dim_v: int, with_lse: bool) -> list[Any]:
    """Stand-ins for the ABI's arguments: which extents are symbols, which are shared, what must divide by what."""
    rows_q, rows_k, heads, bounds = cute.sym_int(), cute.sym_int(), cute.sym_int(), cute.sym_int()

    def rows(extent: Any, width: int, head_stride: Any = None) -> Any:
        strides = (cute.sym_int64(divisibility=VECTOR), head_stride or cute.sym_int64(divisibility=VECTOR), 1)
        return cute.runtime.make_fake_tensor(dtype, (extent, heads, width), strides, assumed_align=16)

    q, k, v = rows(rows_q, head_dim_qk), rows(rows_k, head_dim_qk), rows(rows_k, head_dim_v)
    out = rows(rows_q, head_dim_v, head_stride=head_dim_v)
    lse = cute.runtime.make_fake_tensor(Float32, (heads, rows_q), (cute.sym_int64(), 1), assumed_align=4) if with_lse else None
    cu_q, cu_k = (cute.runtime.make_fake_tensor(Int32, (bounds,), (1,), assumed_align=4) for _ in range(2))
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    return [q, k, v, cu_q, cu_k, None, None, out, lse, Float64(1.0), Int64(1), Int64(1), Int64(0), stream]


def compile_to(path: str, *, arch: str, dtype: str, head_dim_qk: int, head_dim_v: int, is_causal: bool, with_lse: bool, any_scale: bool) -> None:
    """Compile one variant and write its object file.

    Its TVM FFI function is called ``launch``, or ``launch_unchecked`` where ``csrc/fa4_launch.cc`` has to look at the scale first.
    """
    element = DTYPES[dtype]
    launch = make_launch(arch, element, head_dim_qk, head_dim_v, is_causal, any_scale)
    given = arguments(element, head_dim_qk, head_dim_v, with_lse)
    compiled = cute.compile(launch, *given, options="--enable-tvm-ffi", no_jit_engine=True)  # it is exported, and not run here
    compiled.export_to_c(object_file_path=path, function_name="launch" if any_scale else "launch_unchecked")
