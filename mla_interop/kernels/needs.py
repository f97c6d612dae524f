"""What python kernels may declare that they need, and the one place where it is served for every backend.

``no_empty_sequences``: a sequence without queries or without keys makes the kernel fail, or leaves rows undefined (flashinfer#3047).
    The work list, made where the lengths are known, names the others; the kernel sees only those.
``out_buffer``: it writes out into a buffer that it is given.
``zeroed_out``: that buffer must hold 0 before (flashinfer#2409).
``zeroed_workspace``: it counts in a buffer that must be 0 at first and that it leaves at 0 again.
"""

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mla_interop.errors import MLAUnsupportedError
from mla_interop.sequences import HostLengths

if TYPE_CHECKING:
    import torch

NO_EMPTY_SEQUENCES, OUT_BUFFER, ZEROED_OUT, ZEROED_WORKSPACE = "no_empty_sequences", "out_buffer", "zeroed_out", "zeroed_workspace"
NEEDS = frozenset({NO_EMPTY_SEQUENCES, OUT_BUFFER, ZEROED_OUT, ZEROED_WORKSPACE})

_Q_GAPS, _K_GAPS = 1, 2
_WORDS_ALIGNED = 4  # sections start at multiples of 16 bytes, since kernels load offsets by vectors
_WORKSPACE_STEP = 32 << 20


def reasons(needs: frozenset[str], traced: bool) -> list[str]:
    """Why the needs cannot be met for a problem. Equal lengths of q and k are no help: a sequence may have neither queries nor keys."""
    if traced and NO_EMPTY_SEQUENCES in needs:
        return ["lengths known to the device only (allowed: host lengths, or metadata prepared with config=, since empty sequences are left out on the host)"]
    return []


def active_sequences(host: HostLengths, rows: int, heads: int) -> np.ndarray:
    """The work list of a kernel that must not see empty sequences.

    int32 words, viewed as bytes: four sections of B + 1 words, each padded to 16 bytes, with the B' sequences that have queries and keys:
    cumulative query lengths ``[B' + 1]``, cumulative key lengths ``[B' + 1]``, first query rows ``[B']``, first key rows ``[B']``.
    The numbers that a launch needs on the host are in the list's size: ``4 * (B - B')`` words follow, and one for ``_Q_GAPS``, two for ``_K_GAPS``.
    So under ``jax.jit`` another number of empty sequences, or gaps of another kind, is another program.

    Args:
        host: The lengths.
        rows, heads: T and N, which it does not depend on.
    """
    del rows, heads
    kept = (host.lengths_q > 0) & (host.lengths_k > 0)
    batch, count = len(kept), int(kept.sum())
    section = _section(batch)
    lengths_q, lengths_k = host.lengths_q[kept], host.lengths_k[kept]
    first_q, first_k = host.cu_seqlens_q[:-1][kept], host.cu_seqlens_k[:-1][kept]
    words = np.zeros((4, section), np.int32)
    words[0, 1 : count + 1], words[1, 1 : count + 1] = np.cumsum(lengths_q), np.cumsum(lengths_k)
    words[2, :count], words[3, :count] = first_q, first_k
    gaps = _Q_GAPS * bool((first_q != words[0, :count]).any()) + _K_GAPS * bool((first_k != words[1, :count]).any())
    return np.concatenate([words.reshape(-1), np.zeros(4 * (batch - count) + gaps, np.int32)]).view(np.uint8)


def _section(batch: int) -> int:
    return -(-(batch + 1) // _WORDS_ALIGNED) * _WORDS_ALIGNED


@dataclass(frozen=True)
class ActiveSequences:
    """The sequences that have queries and keys, as the work list names them; its arrays are on the device.

    Attributes:
        cu_q, cu_k: int32 ``[B' + 1]``, cumulative lengths without the empty sequences.
        first_q, first_k: int32 ``[B']``, where a sequence starts in the caller's rows.
        gaps: Whether rows of left-out sequences lie between those of others, in q and in k.
    """

    cu_q: "torch.Tensor"
    cu_k: "torch.Tensor"
    first_q: "torch.Tensor"
    first_k: "torch.Tensor"
    gaps: tuple[bool, bool]

    @classmethod
    def read(cls, plan: "torch.Tensor | None", cu_seqlens_q: "torch.Tensor") -> "ActiveSequences":
        """From the work list; nothing is copied from the device.

        Raises:
            MLAUnsupportedError: There is none, or it was made for another number of sequences.
        """
        import torch

        batch = cu_seqlens_q.shape[0] - 1
        section = _section(batch)
        extra = -1 if plan is None else plan.shape[0] // 4 - 4 * section
        if plan is None or not 0 <= extra <= 4 * batch + _Q_GAPS + _K_GAPS:
            raise MLAUnsupportedError("this kernel must not see empty sequences, and the metadata's work list does not say which they are.")
        count, gaps = batch - extra // 4, extra % 4
        words = plan.view(torch.int32)
        parts = [words[index * section : index * section + count + (index < 2)] for index in range(4)]
        return cls(*parts, gaps=(bool(gaps & _Q_GAPS), bool(gaps & _K_GAPS)))

    def __len__(self) -> int:
        return self.first_q.shape[0]

    def pack(self, q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
        """q, k and v with the rows of active sequences end to end, where they are not so already; as many rows, the last of any value."""
        if self.gaps[0]:
            q = q.index_select(0, _sources(self.cu_q, self.first_q, q.shape[0]))
        if self.gaps[1]:
            rows = _sources(self.cu_k, self.first_k, k.shape[0])
            k, v = k.index_select(0, rows), v.index_select(0, rows)
        return q, k, v

    def unpack(self, rows: "torch.Tensor", dim: int) -> "torch.Tensor":
        """Results of packed queries in the caller's rows; those of left-out sequences get any value, which the finish replaces."""
        if not self.gaps[0]:
            return rows
        return rows.index_select(dim, _sources(self.first_q, self.cu_q[:-1], rows.shape[dim]))


def _sources(starts: "torch.Tensor", sources: "torch.Tensor", rows: int) -> "torch.Tensor":
    """For each of ``rows`` rows, the row to take: ``sources[i]`` onwards for the rows from ``starts[i]`` on."""
    import torch

    row = torch.arange(rows, dtype=torch.int32, device=starts.device)
    piece = torch.searchsorted(starts[: sources.shape[0]].contiguous(), row, right=True).sub_(1).clamp_(0)
    return (sources[piece] + row - starts[piece]).clamp_(0, rows - 1)


_workspaces: dict[tuple[Any, int], "torch.Tensor"] = {}


def zeroed_workspace(device: "torch.device", size: int) -> "torch.Tensor":
    """A uint8 buffer of at least ``size`` bytes that was 0 when it was made, and that its kernels leave so where it matters.

    There is one for each device and stream, since two kernels that run at once must not count in the same place.  It is filled when
    it is made or has to grow, not in every call (sglang#31607).
    """
    import torch

    key = device, torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    workspace = _workspaces.get(key)
    if workspace is None or workspace.numel() < size:
        # The old one goes back to torch's allocator, which hands it out again only in this stream's order.
        workspace = _workspaces[key] = torch.zeros(-(-size // _WORKSPACE_STEP) * _WORKSPACE_STEP, dtype=torch.uint8, device=device)
    return workspace


def reserve_workspace(size: int) -> None:
    """Make the workspace of torch's current device and stream now, where torch is in use on a GPU: a first call may come when there is
    no memory left for it (vllm#42112)."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        zeroed_workspace(torch.device("cuda", torch.cuda.current_device()), size)
