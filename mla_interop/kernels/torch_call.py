"""Python kernels: a package's torch API behind the kernel ABI, and the way there from XLA."""

from collections.abc import Callable
from typing import Any

from mla_interop import lse as lse_convention
from mla_interop.errors import MLAUnsupportedError
from mla_interop.kernels.needs import NEEDS, NO_EMPTY_SEQUENCES, OUT_BUFFER, ZEROED_OUT, ZEROED_WORKSPACE, ActiveSequences, zeroed_workspace
from mla_interop.lse import LSEBase, LSELayout


def adapt(
    attention: Callable[..., tuple[Any, Any]],
    *,
    is_causal: bool,
    pad_v: bool,
    lse_base: LSEBase = "e",
    lse_layout: LSELayout = "NT",
    needs: frozenset[str] = frozenset(),
    workspace_bytes: Callable[[int, int, int], int] | None = None,
) -> Callable[..., None]:
    """A launch function (docs/architecture.md) from a function that allocates and returns its results, or writes into what it is given.

    Args:
        attention: ``(q, k, v, cu_seqlens_q, cu_seqlens_k, max_q, max_k, scale, is_causal) -> (out, lse)`` over torch tensors; with
            ``out_buffer`` also ``out=``, which it then returns, and with ``zeroed_workspace`` also ``workspace=``.
        is_causal: The kernel's mask.
        pad_v: Whether V is padded with zeros to D, and out cut back: here and nowhere else (vllm#42642).
        lse_base, lse_layout: The package's convention, declared.
        needs: What the kernel has to be given, of ``kernels.needs.NEEDS``.
        workspace_bytes: Bytes of workspace for (B, N, max_q).

    Raises:
        ValueError: A need that nobody serves.
    """
    if needs - NEEDS:
        raise ValueError(f"needs: got {', '.join(sorted(needs - NEEDS))}; allowed: {', '.join(sorted(NEEDS))}.")

    def launch(
        q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, plan: Any, scratch: Any, out: Any, lse: Any, scale: float, max_q: int, max_k: int, finish: int
    ) -> None:
        import torch

        head_dim = v.shape[2]
        if pad_v and head_dim != q.shape[2]:
            v = torch.nn.functional.pad(v, (0, q.shape[2] - head_dim))
        with torch.no_grad():
            if NO_EMPTY_SEQUENCES not in needs:
                run(q, k, v, cu_q, cu_k, out, lse, max_q, max_k, scale, head_dim, None)
            elif len(active := ActiveSequences.read(plan, cu_q)):
                run(*active.pack(q, k, v), active.cu_q, active.cu_k, out, lse, max_q, max_k, scale, head_dim, active)
            if finish:
                _finish(out, lse, cu_q, cu_k, is_causal)

    def run(
        q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, out: Any, lse: Any, max_q: int, max_k: int, scale: float, head_dim: int, active: ActiveSequences | None
    ) -> None:
        given = {}
        if OUT_BUFFER in needs:
            in_place = head_dim == v.shape[2] and not (active and active.gaps[0])
            given["out"] = out if in_place else out.new_empty((*out.shape[:2], v.shape[2]))
            if ZEROED_OUT in needs:
                given["out"].zero_()
        if ZEROED_WORKSPACE in needs:
            given["workspace"] = zeroed_workspace(q.device, workspace_bytes(cu_q.shape[0] - 1, q.shape[1], max_q) if workspace_bytes else 1)
        made = attention(q, k, v, cu_q, cu_k, max_q, max_k, scale, is_causal, **given)
        made_out, made_lse = _checked(made, (*out.shape[:2], v.shape[2]), lse_layout)
        if made_out is not out:
            made_out = made_out[..., :head_dim]
            out.copy_(active.unpack(made_out, 0) if active else made_out)
        if lse is not None:
            made_lse = lse_convention.normalize(made_lse, lse_base, lse_layout)
            lse.copy_(active.unpack(made_lse, 1) if active else made_lse)

    return launch


def _checked(made: Any, out_shape: tuple[int, ...], lse_layout: LSELayout) -> tuple[Any, Any]:
    """What came back, if it is what the adapter was written for: a tensor would unpack along its rows without an error (diffusers#13999)."""
    lse_shape = (out_shape[1], out_shape[0]) if lse_layout == "NT" else out_shape[:2]
    good = isinstance(made, (tuple, list)) and len(made) == 2 and all(hasattr(part, "shape") for part in made)
    if good and tuple(made[0].shape) == out_shape and tuple(made[1].shape) == lse_shape:
        return made[0], made[1]
    got = [tuple(part.shape) if hasattr(part, "shape") else type(part).__name__ for part in made] if isinstance(made, (tuple, list)) else type(made).__name__
    raise MLAUnsupportedError(
        f"the kernel's package returned {got}; this adapter knows out {out_shape} and lse {lse_shape}. Its version is not one it was written for."
    )


def _finish(out: Any, lse: Any, cu_q: Any, cu_k: Any, is_causal: bool) -> None:
    """Rows without a visible key, and rows past the last sequence: out 0, lse -inf, decided from the lengths, on the device."""
    if out.is_cuda:
        from mla_interop.kernels.triton_fill import fill_rows

        return fill_rows(out, lse, cu_q, cu_k, is_causal)
    import array_api_compat

    from mla_interop.backends.reference import visible_keys

    reach, first = visible_keys(array_api_compat.array_namespace(out), out.shape[0], cu_q, cu_k, is_causal)
    empty = reach <= first
    out.masked_fill_(empty[:, None, None], 0)
    if lse is not None:
        lse.masked_fill_(empty[None, :], float("-inf"))


def over_dlpack(launch: Callable[..., None]) -> Callable[..., None]:
    """``launch`` for callers outside torch: views DLPack tensors as torch tensors and runs on TVM FFI's environment stream, which XLA's
    handler sets to its own. The views are dropped before it returns: XLA's buffers must not be held."""

    def call(*arguments: Any) -> None:
        import torch
        import tvm_ffi

        tensors = [torch.from_dlpack(x) if isinstance(x, tvm_ffi.Tensor) else x for x in arguments]
        if not tensors[0].is_cuda:
            return launch(*tensors)
        device = tensors[0].device
        stream = torch.cuda.ExternalStream(tvm_ffi.get_raw_stream(tvm_ffi.device("cuda", device.index)), device=device)
        with torch.cuda.device(device), torch.cuda.stream(stream):
            launch(*tensors)

    return call
