"""Inputs of a prefill from a ``.npz`` file, or drawn at random; and the way they get onto a device.

NumPy has no bfloat16, so a file holds it in one of these ways: float32 with the same values (``x.float().numpy()``), rounded on the way in by
``dtype="bfloat16"``; or its bits as uint16 or int16 (``x.view(torch.uint16).numpy()``), or as the two bytes that ``numpy.savez`` makes of
an ml_dtypes array, which count as bfloat16 only where ``bf16_bits=True`` says so.
"""

import importlib
import importlib.util
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mla_interop.dimensions import Model
from mla_interop.errors import MLAInputError, MLAUnavailableError, input_error

REQUIRED = ("q", "k", "v")
ALLOWED = (*REQUIRED, "cu_seqlens", "cu_seqlens_q", "cu_seqlens_k", "out", "lse", "scale", "is_causal")
_BITS = ("uint16", "int16", "void16")


@dataclass(frozen=True, eq=False)
class Inputs:
    """A problem on the host.

    Attributes:
        q, k, v: ``[T, N, D]``, ``[S, N, D]``, ``[S, N, V]``, or dense with a batch in front; float32, float64 or float16, or the bits of
            bfloat16 as uint16.
        dtype: What q, k and v are to be, NumPy-style.
        cu_seqlens_q, cu_seqlens_k: Cumulative lengths ``[B + 1]``, or None: one sequence.
        out, lse: float32 results that came with the inputs, ``[T, N, V]`` and ``[N, T]``; or None.
        scale: As in ``mla_prefill``.
        is_causal: The mask, where the file states it.
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    dtype: str
    cu_seqlens_q: np.ndarray | None = None
    cu_seqlens_k: np.ndarray | None = None
    out: np.ndarray | None = None
    lse: np.ndarray | None = None
    scale: float | None = None
    is_causal: bool | None = None

    def arrays(self, device: str) -> list[Any]:
        """q, k and v in ``dtype``: torch tensors; where torch is not installed, JAX arrays on its default device; else NumPy arrays.

        Raises:
            MLAUnavailableError: Nothing here has the dtype or the device.
        """
        return [_placed(x, self.dtype, device) for x in (self.q, self.k, self.v)]


def read_npz(path: Path, dtype: str | None = None, bf16_bits: bool = False) -> Inputs:
    """What a file holds: ``q``, ``k``, ``v``; optionally ``cu_seqlens`` (or ``cu_seqlens_q`` and ``cu_seqlens_k``), ``out``, ``lse``, ``scale``, ``is_causal``.

    Args:
        path: The file; nothing in it is unpickled.
        dtype: What q, k and v are rounded to; None: what they are.
        bf16_bits: 16-bit integers are the bits of bfloat16.

    Raises:
        MLAInputError: It cannot be read, or holds something else.
    """
    try:
        with open(path, "rb") as raw, np.load(raw, allow_pickle=False) as file:  # NumPy leaves a file that it opens open when it fails
            found = {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, AttributeError, TypeError, zipfile.BadZipFile) as error:
        raise MLAInputError(f"{path}: cannot be read as .npz ({type(error).__name__}: {error}); numpy.savez(path, q=q, k=k, v=v) writes one.") from error
    unknown, absent = sorted(set(found) - set(ALLOWED)), [name for name in REQUIRED if name not in found]
    if unknown or absent:
        raise input_error(str(path), f"arrays {', '.join(found) or 'none'}", f"{', '.join(REQUIRED)}, and {', '.join(ALLOWED[3:])}")
    if "cu_seqlens" in found and "cu_seqlens_q" in found:
        raise input_error(str(path), "cu_seqlens and cu_seqlens_q", "one of the two")
    kinds = {_kind(name, found[name], bf16_bits) for name in REQUIRED}
    if len(kinds) > 1:
        raise input_error(str(path), f"q, k and v of {', '.join(sorted(kinds))}", "one dtype")
    q, k, v = (found[name].view(np.uint16) if "bfloat16" in kinds else found[name] for name in REQUIRED)
    results = {name: _numbers(found[name], _kind(name, found[name], bf16_bits)) for name in ("out", "lse") if name in found}
    return Inputs(
        q=q,
        k=k,
        v=v,
        dtype=dtype or kinds.pop(),
        cu_seqlens_q=found.get("cu_seqlens_q", found.get("cu_seqlens")),
        cu_seqlens_k=found.get("cu_seqlens_k"),
        out=results.get("out"),
        lse=results.get("lse"),
        scale=float(found["scale"]) if "scale" in found else None,
        is_causal=bool(found["is_causal"]) if "is_causal" in found else None,
    )


def random_inputs(model: Model, heads: int, tokens: Sequence[int], context: Sequence[int], dtype: str, seed: int) -> Inputs:
    """Standard normal q, k and v of a model's head dimensions.

    Args:
        model: Whose dimensions.
        heads: N.
        tokens: Queries of each sequence.
        context: Earlier keys of each sequence, one number for each.
        dtype: Of q, k and v.
        seed: Of the numbers.

    Raises:
        MLAInputError: The two are of different lengths.
    """
    if len(tokens) != len(context):
        raise input_error("context", f"{len(context)} numbers", f"one for each sequence, {len(tokens)}")
    ends = [np.concatenate([[0], np.cumsum(lengths)]) for lengths in (tokens, np.add(tokens, context))]
    dims, rng = model.dimensions, np.random.default_rng(seed)
    shapes = ((ends[0][-1], dims.qk_head_dim), (ends[1][-1], dims.qk_head_dim), (ends[1][-1], dims.v_head_dim))
    q, k, v = (rng.standard_normal((rows, heads, width), dtype=np.float32) for rows, width in shapes)
    return Inputs(q, k, v, dtype, cu_seqlens_q=ends[0], cu_seqlens_k=ends[1])


def _kind(name: str, array: np.ndarray, bf16_bits: bool) -> str:
    kind = array.dtype.name
    if kind in _BITS and bf16_bits:
        return "bfloat16"
    if kind not in ("float16", "float32", "float64"):
        advice = "Say --bf16 (bf16_bits=True) if they are the bits of bfloat16." if kind in _BITS else ""
        raise input_error(name, f"dtype {array.dtype}", "float32, float16, float64, or 16-bit integers that are the bits of bfloat16", advice)
    return kind


def _numbers(array: np.ndarray, kind: str) -> np.ndarray:
    if kind == "bfloat16":  # bfloat16 is the upper half of float32
        return (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return array


def _placed(array: np.ndarray, dtype: str, device: str) -> Any:
    numbers = _numbers(array, "bfloat16") if array.dtype == np.uint16 else array
    from mla_interop.explore.table import needed

    if importlib.util.find_spec("torch") is not None:
        torch = needed("torch", "torch")
        return torch.from_numpy(np.ascontiguousarray(numbers)).to(device=device, dtype=getattr(torch, dtype))
    if importlib.util.find_spec("jax") is not None:
        return needed("jax.numpy", "jax").asarray(numbers, dtype)
    if device != "cpu":
        raise MLAUnavailableError(f"device {device}: needs torch or JAX, and neither is installed")
    if not dtype.startswith(("bfloat", "float8")):
        return numbers.astype(dtype)
    try:
        return numbers.astype(getattr(importlib.import_module("ml_dtypes"), dtype))
    except ImportError as error:
        raise MLAUnavailableError(f"dtype {dtype}: NumPy alone has none; install torch, JAX or ml_dtypes, or use float32") from error
