"""The inputs of an exploration: arrays of any framework, with lengths that the host knows; and the same arrays in another framework."""

import importlib
import importlib.util
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mla_interop.capability import device_capability
from mla_interop.dimensions import MLADimensions
from mla_interop.errors import input_error
from mla_interop.exchange import DLPACK_DEVICES, framework_of, is_tracer
from mla_interop.explore.table import needed
from mla_interop.host_tensor import as_tensor
from mla_interop.selector import explain
from mla_interop.selector_config import MLAPrefillSelectorConfig
from mla_interop.sequences import HostLengths, prepare_metadata

FRAMEWORKS = ("torch", "jax", "numpy")


@dataclass(frozen=True, eq=False)
class Batch:
    """A ragged problem, packed.

    Attributes:
        q, k, v: ``[T, N, D]``, ``[S, N, D]``, ``[S, N, V]``, of one framework each.
        lengths: Known on the host.
        scale: As given; None is ``D ** -0.5``.
        is_causal: The mask.
    """

    q: Any
    k: Any
    v: Any
    lengths: HostLengths
    scale: float | None
    is_causal: bool

    @property
    def factor(self) -> float:
        """The scale in use."""
        return self.q.shape[2] ** -0.5 if self.scale is None else self.scale

    @property
    def framework(self) -> str:
        """Of q, or ``numpy`` for what is none of the three."""
        kind = framework_of(self.q)
        return kind if kind in FRAMEWORKS else "torch"

    @property
    def dtype(self) -> str:
        """NumPy-style name of q's dtype."""
        return str(self.q.dtype).rpartition(".")[2]

    @property
    def device(self) -> tuple[str, int]:
        """Type and index of q's device."""
        kind, index = map(int, self.q.__dlpack_device__())
        return DLPACK_DEVICES[kind], index

    @property
    def words(self) -> str:
        """The problem in words."""
        tokens, heads, qk_dim = self.q.shape
        count = len(self.lengths.lengths_q)
        sequences = f"{count} sequence{'s' if count > 1 else ''}"
        mask = "causal" if self.is_causal else "full"
        return f"{tokens} tokens in {sequences}, {heads} heads of {qk_dim}/{self.v.shape[2]}, {self.dtype}, {mask}, {self.device[0]}"

    @property
    def options(self) -> dict[str, Any]:
        """What a frontend's ``mla_prefill`` is called with."""
        lengths = {"cu_seqlens_q": self.lengths.cu_seqlens_q, "cu_seqlens_k": self.lengths.cu_seqlens_k}
        return {**lengths, "scale": self.scale, "is_causal": self.is_causal}

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that it sees, over all sequences; for one head."""
        return int(keys_seen(self.lengths, self.is_causal).sum())

    @property
    def flops(self) -> float:
        """Floating-point operations of the attention: 2 (D + V) for each pair and head."""
        return 2.0 * self.pairs * self.q.shape[1] * (self.q.shape[2] + self.v.shape[2])

    def to(self, framework: str) -> "Batch":
        """The same problem with arrays of another framework, which share memory where both can."""
        return replace(self, **{name: exchanged(getattr(self, name), framework) for name in "qkv"})

    def first(self, tokens: int) -> "Batch":
        """The first ``tokens`` rows, as one sequence."""
        most = min(self.q.shape[0], self.k.shape[0])
        if not 0 < tokens <= most:
            raise input_error("lengths", str(tokens), f"1 to {most}, the rows of q and k")
        cut = prepare_metadata([0, tokens]).host
        return replace(self, q=self.q[:tokens], k=self.k[:tokens], v=self.v[:tokens], lengths=cut)

    @property
    def config(self) -> MLAPrefillSelectorConfig:
        """The selector's view."""
        kind, index = self.device
        tokens, heads, qk_dim = self.q.shape
        return MLAPrefillSelectorConfig(
            dtype=self.dtype,
            dimensions=MLADimensions.from_head_dims(qk_dim, self.v.shape[2]),
            num_heads=heads,
            device_type=kind,
            capability=device_capability("cuda", index) if kind == "cuda" else None,
            is_causal=self.is_causal,
            scale=self.factor,
            num_tokens=tokens,
            num_seqs=len(self.lengths.lengths_q),
        )

    def backends(self) -> list[str]:
        """The backends that can serve this on this machine, the chosen one first."""
        table = explain(self.config)
        return sorted((row.backend for row in table.rows if row.valid), key=lambda name: name != table.chosen)

    def kernel(self, backend: str) -> str:
        """The kernel that a backend's name stands for here: ``BACKEND.variant``."""
        row = next(row for row in explain(self.config, backend).rows if row.backend == backend)
        return f"{backend.partition('.')[0]}.{row.variant}" if row.variant else backend


def make_batch(q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, scale: float | None, is_causal: bool) -> Batch:
    """Check and pack.

    Raises:
        MLAInputError: No array, a tracer, shapes that do not belong together, or wrong lengths.
    """
    for name, array in (("q", q), ("k", k), ("v", v)):
        check_array(name, array)
        if len(array.shape) not in (3, 4) or len(array.shape) != len(q.shape):
            raise input_error(name, f"shape {tuple(array.shape)}", "packed [tokens, heads, dim] or dense [batch, tokens, heads, dim]; the same form for all")
    if len(q.shape) == 4:
        if cu_seqlens_q is not None or cu_seqlens_k is not None:
            raise input_error("cu_seqlens_q", "lengths with a dense batch", "packed input, or no lengths")
        batch = q.shape[0]
        cu_seqlens_q, cu_seqlens_k = (np.arange(batch + 1) * x.shape[1] for x in (q, k))
        q, k, v = (x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]) for x in (q, k, v))
    if k.shape[0] != v.shape[0] or not q.shape[1] == k.shape[1] == v.shape[1] or q.shape[2] != k.shape[2]:
        raise input_error("k, v", f"shapes {tuple(k.shape)}, {tuple(v.shape)}", f"[S, N, D] and [S, N, V] with N and D of q, {tuple(q.shape)}")
    lengths = known_lengths(cu_seqlens_q, cu_seqlens_k, q.shape[0], k.shape[0])
    q, k, v = (x.detach() if framework_of(x) == "torch" else x for x in (q, k, v))
    return Batch(q, k, v, lengths, scale, is_causal)


def known_lengths(cu_seqlens_q: Any, cu_seqlens_k: Any, tokens_q: int, tokens_k: int) -> HostLengths:
    """Checked lengths, read from their device if need be; None and None are one sequence.

    Raises:
        MLAInputError: Wrong lengths.
    """
    if cu_seqlens_q is None and cu_seqlens_k is not None:
        raise input_error("cu_seqlens_q", "None with cu_seqlens_k given", "both, or cu_seqlens_q alone")
    if cu_seqlens_q is None:
        cu_seqlens_q, cu_seqlens_k = [0, tokens_q], [0, tokens_k]
    host = prepare_metadata(cu_seqlens_q, cu_seqlens_k, num_tokens_q=tokens_q, num_tokens_k=tokens_k, check=True).host
    if host is None:
        raise input_error("cu_seqlens_q", type(cu_seqlens_q).__name__, "values, not a tracer")
    return host


def check_array(name: str, array: Any) -> None:
    """Refuse what holds no values of an array.

    Raises:
        MLAInputError: See above.
    """
    if is_tracer(array):
        raise input_error(name, "a JAX tracer", "an array with values", "Explore outside jax.jit.")
    if not framework_of(array):
        raise input_error(name, type(array).__name__, "an array of torch, JAX, NumPy, or with __dlpack__")


def values(array: Any, dtype: Any = np.float64) -> np.ndarray:
    """An array's values on the host, in ``dtype``: a copy, whatever the framework, the device and the element type."""
    kind = framework_of(array)
    if kind == "torch":
        array = array.detach()
        array = (array if array.element_size() >= 4 else array.float()).cpu()
    elif kind == "cupy":
        array = array.get()
    elif kind == "dlpack":
        array = importlib.import_module("torch").from_dlpack(array).float().cpu()
    return np.array(np.asarray(array), dtype=dtype)


def exchanged(array: Any, framework: str) -> Any:
    """``array`` in another framework: by DLPack, and so without a copy where the other takes its strides and device.

    Raises:
        MLAInputError: An unknown framework, or one that is not installed.
    """
    kind = framework_of(array)
    if kind == framework:
        return array
    if framework not in FRAMEWORKS or (framework != "numpy" and importlib.util.find_spec(framework) is None):
        raise input_error("frameworks", repr(framework), f"installed ones of {', '.join(FRAMEWORKS)}")
    if framework == "torch":
        return importlib.import_module("torch").from_dlpack(as_tensor(array) if kind == "numpy" else array)
    if framework == "jax":
        if kind == "numpy":
            return importlib.import_module("jax.numpy").asarray(array)
        compact = array.detach().contiguous() if kind == "torch" else array
        return importlib.import_module("jax").dlpack.from_dlpack(compact)
    name = str(array.dtype).rpartition(".")[2]
    known = getattr(needed("ml_dtypes", "jax"), name) if name.startswith(("bfloat", "float8")) else np.dtype(name)
    return values(array, np.float64 if name == "float64" else np.float32).astype(known)


def keys_seen(lengths: HostLengths, is_causal: bool) -> np.ndarray:
    """Keys that each query row sees, int64 ``[cu_seqlens_q[-1]]``; under the causal mask, query i sees ``i + 1 + len_k - len_q``."""
    seen = [np.zeros(0, np.int64)]
    for queries, keys in zip(lengths.lengths_q.tolist(), lengths.lengths_k.tolist()):
        seen.append(np.clip(np.arange(1, queries + 1) + keys - queries, 0, keys) if is_causal else np.full(queries, keys))
    return np.concatenate(seen)
