"""The kernels of this package as XLA custom calls: names, registration, and the call itself.

One native handler (``mla_interop.kernels.xla``) serves every kernel.  What differs from call to call (which kernel, the
scale, the bounds) are attributes of the call; the target's name says only which backend it is and whether Python runs in it,
so that it can be read in an HLO dump and allowed in ``jax.export``.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import jax
import jax.export
import numpy as np

from mla_interop.backends import registry
from mla_interop.kernels import xla

TARGET_PREFIX = "mla_interop.prefill.v1"
"""Start of every target's name.  Names end up in exported programs: a change of the handler's protocol needs a new number."""

KINDS = ("compiled", "python")
PLATFORMS = ("cpu", "CUDA")


@dataclass(frozen=True)
class CallSpec:
    """All that is static in one call of a kernel; T, S query and key/value tokens, N heads, V the value dimension.

    Attributes:
        backend: Name of the backend, for the target's name.
        kind: ``"compiled"`` or ``"python"``.
        kernel: Name of the TVM FFI global function to call.
        out_shape: ``(T, N, V)``.
        out_dtype: Dtype of out.
        lse_shape: ``(N, T)``, or None for a call without LSE.
        scratch_floats: Size of the scratch buffer in float32 elements; 0 for none.
        scale: Factor of the scores, used as given.
        max_seqlen_q: Upper bound of one sequence's query tokens.
        max_seqlen_k: Upper bound of one sequence's key tokens.
        finish: Bit mask of the kernel ABI (``docs/architecture.md``).
        num_q: Valid query tokens if the host knows them, else -1; checked against T, and nothing is cut by it.
        num_k: Valid key/value tokens if the host knows them, else -1; the kernel sees only so many rows of k and v.
    """

    backend: str
    kind: str
    kernel: str
    out_shape: tuple[int, int, int]
    out_dtype: np.dtype
    lse_shape: tuple[int, int] | None
    scratch_floats: int
    scale: float
    max_seqlen_q: int
    max_seqlen_k: int
    finish: int
    num_q: int = -1
    num_k: int = -1

    def results(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes and dtypes of what the call writes: out, then lse and scratch where it has them."""
        shapes: list[tuple[tuple[int, ...], np.dtype]] = [(self.out_shape, np.dtype(self.out_dtype))]
        if self.lse_shape is not None:
            shapes.append((self.lse_shape, np.dtype(np.float32)))
        if self.scratch_floats:
            shapes.append(((self.scratch_floats,), np.dtype(np.float32)))
        return tuple(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes)


def target_name(backend: str, kind: str) -> str:
    """Name of the XLA custom call target of a backend's compiled or python kernels.

    Raises:
        ValueError: Kernels of that kind have none.
    """
    if kind not in KINDS:
        raise ValueError(f"kind: got {kind!r}; allowed: {', '.join(KINDS)}.")
    name = f"{TARGET_PREFIX}.{backend}"
    return name if kind == "compiled" else f"{name}.{kind}"


def _targets() -> Iterator[tuple[str, str]]:
    for backend in registry.names():
        for kind in KINDS:
            yield backend, kind


EXPORT_CHECKS = tuple(jax.export.DisabledSafetyCheck.custom_call(target_name(*target)) for target in _targets())
"""For ``jax.export.export(fn, disabled_checks=EXPORT_CHECKS)``: all of this package's targets."""


def register(backend: str, kind: str) -> str:
    """Register the target of a backend with XLA for CPU and CUDA, if this process has not yet; return its name.

    The first call in a process builds or loads the handler.  It may be called any number of times, from any module, and
    again after ``importlib.reload``: XLA refuses a second, different handler for one name.

    Raises:
        MLABuildError: The handler cannot be built or loaded.
    """
    name = target_name(backend, kind)
    for platform in PLATFORMS:
        if (name, platform) not in xla.REGISTERED:
            jax.ffi.register_ffi_target(name, xla.capsules()[platform, kind], platform=platform, api_version=1)
            xla.REGISTERED.add((name, platform))
    return name


def register_all() -> None:
    """Register every target; needed before a program that another process exported is run here."""
    for backend, kind in _targets():
        register(backend, kind)


def call(
    spec: CallSpec,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cu_seqlens_q: jax.Array,
    cu_seqlens_k: jax.Array,
    plan: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Run the kernel of ``spec``; traceable, and has no side effects for XLA.

    There is no ``vmap_method``: sequences of different lengths are already what the packed layout batches.

    Args:
        spec: The static part of the call.
        q: ``[T, N, D]``.
        k: ``[S, N, D]``.
        v: ``[S, N, V]``.
        cu_seqlens_q: int32 ``[B + 1]``.
        cu_seqlens_k: int32 ``[B + 1]``.
        plan: uint8 ``[bytes]``, the work list of a kernel that has one.

    Returns:
        out ``[T, N, V]``, and lse ``[N, T]`` float32 in natural log, or None if the spec has none.

    Raises:
        jax.errors.JaxRuntimeError: At run time, INVALID_ARGUMENT or INTERNAL with the kernel's name and its message, or
            NOT_FOUND if the process cannot get the kernel.
    """
    operands = (q, k, v, cu_seqlens_q, cu_seqlens_k) + (() if plan is None else (plan,))
    # The attributes' C++ types are those of the NumPy scalars: a Python float would arrive as float32.
    results = jax.ffi.ffi_call(register(spec.backend, spec.kind), spec.results())(
        *operands,
        kernel=spec.kernel,
        scale=np.float64(spec.scale),
        max_seqlen_q=np.int64(spec.max_seqlen_q),
        max_seqlen_k=np.int64(spec.max_seqlen_k),
        finish=np.int64(spec.finish),
        num_q=np.int64(spec.num_q),
        num_k=np.int64(spec.num_k),
        has_plan=np.bool_(plan is not None),
        has_lse=np.bool_(spec.lse_shape is not None),
        has_scratch=np.bool_(spec.scratch_floats > 0),
    )
    return results[0], results[1] if spec.lse_shape is not None else None
