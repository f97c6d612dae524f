"""What is corrected in FlashInfer's headers before its kernels are compiled.

The kernels are compiled anew for a dtype and head size anyway, so the compiler is given a corrected copy of a header, and the installed
one stays as it is. In generation 2 two things give wrong numbers for problems that the contract includes; in generation 3 one costs time.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Correction:
    """An expression of the header, what stands there instead, how often it must be there, and why."""

    old: str
    new: str
    count: int
    why: str


@dataclass(frozen=True)
class CorrectedHeader:
    """A header of FlashInfer's and what is corrected in it.

    Args:
        header: Its path below FlashInfer's include folder.
        corrections: All of them.
        preamble: Code of ours that they call; stands before the header's first include.
    """

    header: str
    corrections: tuple[Correction, ...]
    preamble: str = ""

    @property
    def revision(self) -> str:
        """A digest of all that is changed: goes into the key of what was built, so that another correction builds again."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:12]

    def corrected(self, text: str) -> str:
        """The header's text with every correction in it.

        Raises:
            ValueError: The text is not what the corrections were written for.
        """
        for correction in self.corrections:
            found = text.count(correction.old)
            if found != correction.count:
                raise ValueError(f"{self.header}: {correction.old!r} is there {found} times, not {correction.count}; without its correction: {correction.why}")
            text = text.replace(correction.old, correction.new)
        return text.replace("#include", self.preamble + "#include", 1)

    def write_corrected(self, include: Path, folder: Path) -> list[str]:
        """Write the corrected header below ``folder``; returns the compiler's flags that put it before the one in ``include``."""
        target, text = folder / self.header, self.corrected((include / self.header).read_text())
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists() or target.read_text() != text:  # a new date would compile everything anew
            target.write_text(text)
        # The second: the copy includes its neighbours by paths relative to where it was.
        return [f"-I{folder}", f"-I{(include / self.header).parent}"]


PREFILL_2 = CorrectedHeader(
    header="flashinfer/attention/prefill.cuh",
    corrections=(
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
    ),
    # A thread holds eight probabilities of two rows (0 1 4 5 of one, 2 3 6 7 of the other); the four threads of a quad hold the same two rows.
    preamble="""
__device__ __forceinline__ void mla_interop_row_sum(float* d, const float* p) {
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    float sum = (p[2 * j] + p[2 * j + 1]) + (p[2 * j + 4] + p[2 * j + 5]);
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    d[j] += sum + __shfl_xor_sync(0xffffffffu, sum, 2);
  }
}
""",
)

_RELEASE_Q = "cutlass::arch::NamedBarrier::arrive(NUM_MMA_THREADS + Ktraits::NUM_PRODUCER_THREADS,"
_WHY_EARLY = "the next tile's q was asked for after the last scores had been turned into probabilities, 1 to 2 % of the time later than it can be"
MAIN_LOOP_3 = CorrectedHeader(
    header="flashinfer/attention/hopper/mainloop_mma.cuh",
    corrections=(
        Correction(
            old="int kv_tile_idx = kv_tile_idx_count - 1;", new="int kv_tile_idx = kv_tile_idx_count - 1;\n  bool q_released = false;", count=1, why=_WHY_EARLY
        ),
        Correction(
            # Here in the loop over tiles without a mask the scores are complete, and nobody reads q again after those of the last tile.
            old="// #pragma unroll\n",
            new=f"""
    if (kv_tile_idx == swa_end_kv_tile_idx + 2) {{
      {_RELEASE_Q} static_cast<int>(NamedBarriers::kQueryEmpty));
      q_released = true;
    }}
""",
            count=1,
            why=_WHY_EARLY,
        ),
        Correction(
            old=f"// Tell warp 0 that smem_q is ready\n  {_RELEASE_Q}",
            new=f"if (!q_released)\n  {_RELEASE_Q}",
            count=1,
            why=_WHY_EARLY,
        ),
    ),
)
