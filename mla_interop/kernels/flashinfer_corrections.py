"""What is corrected in the header of FlashInfer's generation-2 kernels before they are compiled.

Two things there give wrong numbers for problems that the contract includes. The kernels are compiled anew for a dtype and head size
anyway, so the compiler is given a corrected copy of that one header, and the installed one stays as it is.
"""

from dataclasses import dataclass
from pathlib import Path

HEADER = "flashinfer/attention/prefill.cuh"
# Goes into the key of what was built, so that another correction builds again.
REVISION = 1


@dataclass(frozen=True)
class Correction:
    """An expression of the header, what stands there instead, how often it must be there, and why."""

    old: str
    new: str
    count: int
    why: str


CORRECTIONS = (
    Correction(
        old="mma::m16k16_rowsum_f16f16f32(d[mma_q], s_frag_f16[mma_q][mma_kv]);",
        new="mla_interop_row_sum(d[mma_q], s_frag[mma_q][mma_kv]);",
        count=1,
        why="the sum of a row was taken over probabilities rounded to 16 bits: with bfloat16 the LSE is off by up to 2e-3",
    ),
    Correction(
        old="kv_len + ceil_div((qo_tile_idx * CTA_TILE_Q), group_size) - qo_len,",
        new="sub_if_greater_or_zero(kv_len + ceil_div((qo_tile_idx * CTA_TILE_Q), group_size), qo_len),",
        count=2,  # ragged and paged
        why="unsigned: where a causal sequence has more rows than keys it wrapped, and the first tiles of keys went unmasked",
    ),
)

# A thread holds eight probabilities of two rows (0 1 4 5 of one, 2 3 6 7 of the other); the four threads of a quad hold the same two rows.
ROW_SUM = """
__device__ __forceinline__ void mla_interop_row_sum(float* d, const float* p) {
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    float sum = (p[2 * j] + p[2 * j + 1]) + (p[2 * j + 4] + p[2 * j + 5]);
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    d[j] += sum + __shfl_xor_sync(0xffffffffu, sum, 2);
  }
}
"""


def corrected(text: str) -> str:
    """The header's text with every correction in it.

    Raises:
        ValueError: The text is not what the corrections were written for.
    """
    for correction in CORRECTIONS:
        found = text.count(correction.old)
        if found != correction.count:
            raise ValueError(f"{HEADER}: {correction.old!r} is there {found} times, not {correction.count}; without its correction: {correction.why}")
        text = text.replace(correction.old, correction.new)
    return text.replace("#include", ROW_SUM + "#include", 1)


def write_corrected(include: Path, folder: Path) -> list[str]:
    """Write the corrected header below ``folder``; returns the compiler's flags that put it before the one in ``include``."""
    target, text = folder / HEADER, corrected((include / HEADER).read_text())
    target.parent.mkdir(parents=True, exist_ok=True)
    if not target.exists() or target.read_text() != text:  # a new date would compile everything anew
        target.write_text(text)
    # The second: the copy includes its neighbours by paths relative to where it was.
    return [f"-I{folder}", f"-I{(include / HEADER).parent}"]
