"""A numeric check of a backend on this machine, in about two seconds: what deviates from the contract, and by what factor.

Small problems with unequal lengths run through a frontend, and are compared with float64 arithmetic here.
"""

import contextlib
import functools
import importlib
import importlib.util
import math
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from mla_interop.backends.base import Kernel
from mla_interop.backends.registry import backend_class, parse_names
from mla_interop.capability import device_capability
from mla_interop.config import use_config
from mla_interop.dimensions import DEEPSEEK_R1, MLADimensions
from mla_interop.errors import MLAUnavailableError, MLAUnsupportedError, input_error
from mla_interop.selector import explain
from mla_interop.selector_config import DTYPES, MLAPrefillSelectorConfig

HEADS, SCALE = 3, 0.21  # a scale that no head dimension has by default
# (queries, keys) of each sequence. Every row of the first has a key under the causal mask; the second has all kinds of rows that have none.
WITH_KEYS = ((5, 9), (7, 7), (4, 6))
WITH_EMPTY_ROWS = ((5, 9), (0, 4), (7, 7), (3, 0), (6, 2))
# Relative Frobenius error of out, and largest absolute error of lse: what rounding explains in every kernel family. Faults are far larger.
_TOLERANCES = {
    "float16": (2e-2, 2e-2),
    "bfloat16": (2e-2, 2e-2),
    "float32": (1e-4, 1e-3),
    "float64": (1e-4, 1e-3),
    "float8_e4m3fn": (1e-1, 5e-2),
    "float8_e5m2": (1e-1, 5e-2),
}
NAMED_FACTORS = {1 / math.log(2): "1/ln 2: base 2, where natural log is right", math.log(2): "ln 2: converted to natural log twice"}


class Finding(NamedTuple):
    """One property: whether it holds, and what deviates if not."""

    what: str
    ok: bool
    detail: str = ""


@dataclass(frozen=True)
class SelfCheck:
    """What :func:`self_check` found for one kernel."""

    kernel: str
    device: str
    dtype: str
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether everything holds."""
        return all(finding.ok for finding in self.findings)

    @property
    def failures(self) -> str:
        """What does not hold, in words."""
        return "; ".join(f"{finding.what}: {finding.detail}" for finding in self.findings if not finding.ok)

    def __str__(self) -> str:
        head = f"{self.kernel} on {self.device}, {self.dtype}: {'ok' if self.ok else 'DEVIATES'}"
        return "\n".join([head, *(f"  {finding.what}: {finding.detail}" for finding in self.findings if not finding.ok)])

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {**asdict(self), "findings": [finding._asdict() for finding in self.findings], "ok": self.ok}


def self_check(backend: Any, device: str | None = None, *, dtype: str | None = None, dimensions: MLADimensions = DEEPSEEK_R1) -> SelfCheck:
    """Check a backend's preferred kernel here, or the one that ``"BACKEND.variant"`` names.

    Args:
        backend: A name or an enum member.
        device: ``"cpu"`` or ``"cuda"``; None: a GPU if there is one that the backend serves, else the CPU.
        dtype: Of q, k and v; None: the first that it serves of bfloat16, float16, float32, float64, float8_e4m3fn, float8_e5m2.
        dimensions: Head dimensions.

    Raises:
        MLAInputError: Unknown names.
        MLAUnsupportedError: The backend cannot serve that here; with the reasons.
    """
    (name, *others), refused = parse_names("backend", backend), ""
    if others:
        raise input_error("backend", repr(backend), "one name, or one enum member")
    if device not in (None, "cpu", "cuda"):
        raise input_error("device", repr(device), "'cpu', 'cuda' or None")
    devices = [each for each in ("cuda", "cpu") if device in (None, each) and (each == "cpu" or device_capability("cuda") is not None)]
    if not devices:
        refused = "no CUDA device"
    for where in devices:
        for kind in [dtype] if dtype else DTYPES:
            config = MLAPrefillSelectorConfig(dtype=kind, dimensions=dimensions, num_heads=HEADS, device_type=where, scale=SCALE)
            row = next(row for row in explain(config, name).rows if row.backend == name)
            if row.valid:
                return _checked(f"{name.partition('.')[0]}.{row.variant}", where, kind, dimensions, False, backend_class(name))
            refused = refused or f"{where}, {kind}: {'; '.join(row.reasons)}"
    raise MLAUnsupportedError(f"{name} cannot be checked here: {refused}")


def require(backend: str, kernel: Kernel, config: MLAPrefillSelectorConfig) -> None:
    """Raise unless a kernel passes; each is checked once in a process.  One for any scale is checked with negative scales, which call for it.

    Raises:
        MLAUnavailableError: It deviates; with what and how.
    """
    name = backend.partition(".")[0]
    found = _checked(f"{name}.{kernel.variant}", config.device_type, config.dtype, config.dimensions, kernel.any_scale, backend_class(name))
    if not found.ok:
        raise MLAUnavailableError(f"its self-check failed: {found.failures}")


@functools.lru_cache(maxsize=256)
def _checked(name: str, device: str, dtype: str, dimensions: MLADimensions, any_scale: bool, cls: type) -> SelfCheck:
    del cls  # only a part of the key: a name can be registered anew
    with use_config({"self_check": False, "policy": "order"}):
        try:
            door = _door(device, dtype)
            with door.scope():
                findings = _Checks(name, door, dtype, dimensions, any_scale).run()
        except Exception as error:
            findings = [Finding("call", False, f"{type(error).__name__}: {error}")]
    return SelfCheck(name, device, dtype, tuple(findings))


class _Door(NamedTuple):
    """A frontend: its function, arrays in and out, and what has to be around a call of it."""

    call: Callable[..., Any]
    array: Callable[[np.ndarray], Any]
    numpy: Callable[[Any], np.ndarray]
    scope: Callable[[], Any] = contextlib.nullcontext


def _framework() -> str:
    """The framework to check through: one that is loaded, else one that is installed, else plain NumPy."""
    names = ("torch", "jax")
    loaded = next((name for name in names if sys.modules.get(name) is not None), None)
    return loaded or next((name for name in names if name not in sys.modules and importlib.util.find_spec(name)), "numpy")


def _door(device: str, dtype: str) -> _Door:
    framework = _framework()
    if framework == "torch":
        torch = importlib.import_module("torch")
        call = importlib.import_module("torch_side").mla_prefill
        return _Door(
            call, lambda x: torch.from_numpy(np.ascontiguousarray(x)).to(getattr(torch, dtype)).to(device), lambda x: x.double().cpu().numpy(), torch.no_grad
        )
    if framework == "jax":
        jax = importlib.import_module("jax")
        where = jax.devices(device)[0]
        call = importlib.import_module("jax_side").mla_prefill
        # A choice can be made while a program is traced; these calls are not a part of it.
        return _Door(
            call, lambda x: jax.device_put(x, where).astype(dtype), lambda x: np.asarray(x.astype("float32")).astype(np.float64), jax.ensure_compile_time_eval
        )
    return _Door(importlib.import_module("mla_interop").mla_prefill, lambda x: x.astype(dtype), lambda x: x.astype(np.float64))


class _Problem(NamedTuple):
    """Inputs of the frontend, and their exact values."""

    inputs: tuple[Any, Any, Any]
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    projection: np.ndarray
    cu_q: np.ndarray
    cu_k: np.ndarray


class _Checks:
    """The properties, one method each."""

    def __init__(self, name: str, door: _Door, dtype: str, dimensions: MLADimensions, any_scale: bool) -> None:
        self.name, self.door, self.dimensions = name, door, dimensions
        self.default = dimensions.qk_head_dim**-0.5
        self.usual, self.given = (-self.default, -SCALE) if any_scale else (None, SCALE)
        self.out_tolerance, self.lse_tolerance = _TOLERANCES[dtype]

    def run(self) -> list[Finding]:
        checks = (self._out, self._lse, self._strides, self._alignment, self._scale, self._empty_rows)
        return [finding for check in checks for finding in check()]

    def _problem(self, lengths: tuple[tuple[int, int], ...], strided: bool = False) -> _Problem:
        random = np.random.default_rng(7)
        cu_q, cu_k = (np.concatenate([[0], np.cumsum(column)]).astype(np.int32) for column in zip(*lengths))
        width, v_dim = self.dimensions.qk_head_dim, self.dimensions.v_head_dim
        shapes = ((cu_q[-1], HEADS, width), (cu_k[-1], HEADS, width), (cu_k[-1], HEADS, 128 + v_dim))
        q, k, projection = (self.door.array(random.standard_normal(shape).astype(np.float32)) for shape in shapes)
        v = projection[..., 128:]
        values = self.door.numpy(v)
        inputs = (q, k, v if strided else self.door.array(values.astype(np.float32)))
        return _Problem(inputs, self.door.numpy(q), self.door.numpy(k), values, self.door.numpy(projection), cu_q, cu_k)

    def _call(self, problem: _Problem, is_causal: bool, scale: float | None = None) -> tuple[np.ndarray, np.ndarray]:
        scale = self.usual if scale is None else scale
        lengths = {"cu_seqlens_q": problem.cu_q.tolist(), "cu_seqlens_k": problem.cu_k.tolist()}
        out, lse = self.door.call(*problem.inputs, **lengths, is_causal=is_causal, scale=scale, return_lse=True, backend=self.name)
        return self.door.numpy(out), self.door.numpy(lse)

    def _right(self, problem: _Problem, is_causal: bool, scale: float | None = None, top_left: bool = False) -> tuple[np.ndarray, np.ndarray]:
        return attention(problem, is_causal, self.usual if scale is None else scale, top_left)

    def _out(self) -> list[Finding]:
        problem = self._problem(WITH_KEYS)
        out, _ = self._call(problem, False)
        return [self._compare("out", out, self._right(problem, False)[0], {})]

    def _lse(self) -> list[Finding]:
        """Base and layout together: the one combination that fits names what is wrong."""
        problem = self._problem(WITH_KEYS)
        _, lse = self._call(problem, False)
        right = self._right(problem, False)[1]
        fits = [
            (layout, factor)
            for layout, seen in (("[N, T]", lse), ("[T, N]", lse.reshape(lse.shape[::-1]).T))
            for factor in (1.0, *NAMED_FACTORS)
            if np.abs(seen / factor - right).max() <= self.lse_tolerance
        ]
        if fits:
            layout, factor = fits[0]
            base = Finding("LSE base", factor == 1, "" if factor == 1 else f"off by a factor of {factor:.4f} ({NAMED_FACTORS[factor]})")
            return [base, Finding("LSE layout", layout == "[N, T]", "" if layout == "[N, T]" else "token-major [T, N], where [N, T] is right")]
        with np.errstate(all="ignore"):
            factor, error = float(np.median(lse / right)), float(np.nanmax(np.abs(lse - right)))
        text = f"off by up to {error:.3g}; the median factor is {factor:.4f}, which is no base or layout that is known"
        return [Finding("LSE base", False, text), Finding("LSE layout", False, text)]

    def _strides(self) -> list[Finding]:
        problem = self._problem(WITH_KEYS, strided=True)
        out, _ = self._call(problem, False)
        as_if_packed = problem.projection.reshape(-1)[: problem.v.size].reshape(problem.v.shape)
        start = problem.projection.reshape(-1)[128:]
        packed_from_there = start[: problem.v.size].reshape(problem.v.shape)
        known = {"v is read as if it were contiguous": packed_from_there, "v is read from the start of the buffer that it is a view of": as_if_packed}
        others = {text: self._right(problem._replace(v=v), False)[0] for text, v in known.items()}
        return [self._compare("strides", out, self._right(problem, False)[0], others)]

    def _alignment(self) -> list[Finding]:
        problem = self._problem(WITH_KEYS)
        out, _ = self._call(problem, True)
        others = {"the causal mask is aligned top-left": self._right(problem, True, top_left=True)[0], "there is no mask": self._right(problem, False)[0]}
        return [self._compare("causal alignment", out, self._right(problem, True)[0], others)]

    def _scale(self) -> list[Finding]:
        problem = self._problem(WITH_KEYS)
        out, _ = self._call(problem, False, self.given)
        known = {
            "the given scale is ignored": self.default,
            "the given scale is multiplied with the default": self.given * self.default,
            "the given scale is multiplied with ln 2": self.given * math.log(2),
        }
        others = {text: self._right(problem, False, scale)[0] for text, scale in known.items()}
        return [self._compare("scale", out, self._right(problem, False, self.given)[0], others)]

    def _empty_rows(self) -> list[Finding]:
        problem = self._problem(WITH_EMPTY_ROWS)
        out, lse = self._call(problem, True)
        empty = np.isneginf(self._right(problem, True)[1])
        rows, values = out[empty.T], lse[empty]
        said = [f"out holds {rows[rows != 0][0]:.4g}, where 0 is right"] if rows.any() else []
        if not np.isneginf(values).all():
            said.append(f"lse holds {values[~np.isneginf(values)][0]:.4g}, where -inf is right")
        right = self._right(problem, True)[0]
        said = said or ([] if self._error(out, right) <= self.out_tolerance else ["rows that have keys deviate beside rows that have none"])
        return [Finding("empty rows", not said, "; ".join(said))]

    def _error(self, made: np.ndarray, right: np.ndarray) -> float:
        error = float(np.linalg.norm(made - right) / np.linalg.norm(right))
        return math.inf if math.isnan(error) else error

    def _compare(self, what: str, made: np.ndarray, right: np.ndarray, others: dict[str, np.ndarray]) -> Finding:
        error = self._error(made, right)
        if error <= self.out_tolerance:
            return Finding(what, True)
        cause = next((text for text, other in others.items() if self._error(made, other) <= self.out_tolerance), None)
        factor = float((made * right).sum() / (right * right).sum())
        name = next((text for known, text in NAMED_FACTORS.items() if self._error(made, known * right) <= self.out_tolerance), None)
        return Finding(what, False, cause or f"relative error {error:.2g}, factor {factor:.4f}{f' ({name})' if name else ''}")


def attention(problem: _Problem, is_causal: bool, scale: float | None = None, top_left: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """out ``[T, N, V]`` and lse ``[N, T]`` in float64, one sequence at a time; 0 and -inf where a row sees no key."""
    scale = problem.q.shape[2] ** -0.5 if scale is None else scale
    out = np.zeros((*problem.q.shape[:2], problem.v.shape[2]))
    lse = np.full(problem.q.shape[1::-1], -math.inf)
    for start_q, end_q, start_k, end_k in zip(problem.cu_q[:-1], problem.cu_q[1:], problem.cu_k[:-1], problem.cu_k[1:]):
        queries, keys = end_q - start_q, end_k - start_k
        shift = 0 if top_left else keys - queries
        for row in range(queries):
            seen = int(max(0, min(keys, row + shift + 1))) if is_causal else int(keys)
            if seen:
                scores = np.einsum("nd,snd->ns", problem.q[start_q + row], problem.k[start_k : start_k + seen]) * scale
                top = scores.max(axis=1, keepdims=True)
                weights = np.exp(scores - top)
                lse[:, start_q + row] = top[:, 0] + np.log(weights.sum(axis=1))
                out[start_q + row] = np.einsum("ns,snv->nv", weights / weights.sum(axis=1, keepdims=True), problem.v[start_k : start_k + seen])
    return out, lse
