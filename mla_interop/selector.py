"""Select and explain: one answer to "which kernel, and why", for every frontend.

An explicit choice and an automatic one go through the same ``validate_configuration``. Support is data: reasons, each
with what was found and what is allowed. A choice is cached under everything it depends on, the environment included.
"""

import functools
import math
import numbers
import re
import warnings
from dataclasses import dataclass, replace
from typing import Any

from mla_interop.backends.base import Kernel, MLAPrefillBackend
from mla_interop.backends.registry import backend_class, names, order_for, parse_names
from mla_interop.capability import DeviceCapability, device_capability, stated_target
from mla_interop.config import MLAPrefillConfig, current_config, environment_key
from mla_interop.dimensions import MLADimensions
from mla_interop.errors import MLAUnavailableError, MLAUnsupportedError, input_error
from mla_interop.installed import PROBE_SECONDS, within
from mla_interop.measured import Times, fastest_first, tables, times_for
from mla_interop.selection_table import Row, SelectionTable

DTYPES = ("bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2")


def nearest_power_of_two(size: int) -> int:
    """The power of two that is nearest to a positive size on a logarithmic scale."""
    return 1 << round(math.log2(size))


@dataclass(frozen=True, kw_only=True)
class MLAPrefillSelectorConfig:
    """The problem, as far as the choice of a kernel depends on it. Hashable, and free of any framework's types.

    Attributes:
        dtype: NumPy-style name of q, k and v's dtype.
        dimensions: Head dimensions.
        num_heads: N.
        device_type: ``"cpu"`` or ``"cuda"``.
        capability: Compute capability of the (stated) target; read from device 0 if left out on CUDA.
        is_causal: Causal (bottom-right) or full attention.
        needs_lse: Whether LSE is wanted.
        traced: Whether the lengths are known on the device only, and no work list came with them.
        scale: The softmax scale, where known: some kernels are wrong for scales that are negative or nearly 0.
        num_sms: Multiprocessors of the target, for work lists; None: as on device 0.
        flash_attn_version: 2, 3 or 4: the only generation that FLASH_ATTN may use; None: ``MLA_INTEROP_FLASH_ATTN_VERSION``, else any.
        num_tokens, num_seqs: T and B, where known, for the choice by measured times. Kept as the nearest power of two (on a logarithmic scale), so
            that batches of about one size get one kernel. 0 counts as unknown.

    Raises:
        MLAInputError: A dtype, device, size or flag is not one that a problem can have.
    """

    dtype: str = "bfloat16"
    dimensions: MLADimensions
    num_heads: int
    device_type: str = "cuda"
    capability: DeviceCapability | None = None
    is_causal: bool = True
    needs_lse: bool = True
    traced: bool = False
    scale: float | None = None
    num_sms: int | None = None
    flash_attn_version: int | None = None
    num_tokens: int | None = None
    num_seqs: int | None = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise input_error("dtype", repr(self.dtype), ", ".join(DTYPES))
        if self.flash_attn_version not in (None, 2, 3, 4):
            raise input_error("flash_attn_version", repr(self.flash_attn_version), "2, 3, 4 or None")
        if self.device_type not in ("cpu", "cuda"):
            raise input_error("device_type", repr(self.device_type), "'cpu' or 'cuda'")
        self._check_values()
        for name in ("num_tokens", "num_seqs"):
            size = getattr(self, name)
            object.__setattr__(self, name, nearest_power_of_two(size) if size else None)
        capability = self.capability
        if capability is not None:
            object.__setattr__(self, "capability", DeviceCapability.parse(capability))
        elif self.device_type == "cuda":
            object.__setattr__(self, "capability", device_capability("cuda"))

    def _check_values(self) -> None:
        d = self.dimensions
        if not isinstance(d, MLADimensions):
            raise input_error("dimensions", repr(d), "MLADimensions")
        sizes = (d.qk_nope_head_dim, 1), (d.qk_rope_head_dim, 0), (d.v_head_dim, 1)
        if not all(_is_integer(size) and size >= least for size, least in sizes):
            raise input_error("dimensions", str(d), "positive integers; the rotary part may be 0")
        for name, least in (("num_heads", 0), ("num_sms", 1), ("num_tokens", 0), ("num_seqs", 0)):
            size = getattr(self, name)
            if size is None and name != "num_heads":
                continue
            if size is None or not _is_integer(size) or size < least:
                raise input_error(name, repr(size), f"an integer of at least {least}" + (", or None" if name != "num_heads" else ""))
        for name in ("is_causal", "needs_lse", "traced"):
            if not isinstance(getattr(self, name), bool):
                raise input_error(name, repr(getattr(self, name)), "True or False")
        if self.scale is not None and (not isinstance(self.scale, numbers.Real) or isinstance(self.scale, bool)):
            raise input_error("scale", repr(self.scale), "a number, or None where it is not known")

    @classmethod
    def of_kernel_name(cls, name: str) -> "MLAPrefillSelectorConfig":
        """A configuration that has the kernel of that name, as :meth:`kernel_name` makes it.

        Raises:
            MLAInputError: It is no name of a kernel.
        """
        match = re.fullmatch(r"[A-Z0-9_]+\.\w+\.(cpu|cuda|sm_(\d+)(\d))\.(\w+)\.(\d+)x(\d+)\.(causal|full)\.(lse|nolse)", name)
        if match is None:
            raise input_error("kernel", repr(name), "BACKEND.variant.arch.dtype.DxV.mask.lse")
        arch, major, minor, dtype, qk_head_dim, v_head_dim, mask, lse = match.groups()
        return cls(
            dtype=dtype,
            dimensions=MLADimensions.from_head_dims(int(qk_head_dim), int(v_head_dim)),
            num_heads=1,
            device_type="cpu" if arch == "cpu" else "cuda",
            capability=DeviceCapability(int(major), int(minor)) if major else None,
            is_causal=mask == "causal",
            needs_lse=lse == "lse",
        )

    def kernel_name(self, backend: str, variant: str) -> str:
        """The one form of kernel names: ``BACKEND.variant.arch.dtype.DxV.mask.lse``."""
        arch = f"sm_{self.capability.major}{self.capability.minor}" if self.capability else self.device_type
        head_dims = f"{self.dimensions.qk_head_dim}x{self.dimensions.v_head_dim}"
        mask, lse = "causal" if self.is_causal else "full", "lse" if self.needs_lse else "nolse"
        return f"{backend}.{variant}.{arch}.{self.dtype}.{head_dims}.{mask}.{lse}"


def select(config: MLAPrefillSelectorConfig, backend: Any = None, fallback: bool = False) -> MLAPrefillBackend:
    """The backend to use for ``config``, ready to run: its kernel is compiled and loaded.

    Args:
        config: The problem.
        backend: An explicit choice: a name in any case, an enum member, or an ordered sequence; ``"FLASH_ATTN.fa3"`` names one of a
            backend's kernels. None: what ``use_config``, ``set_config`` or ``MLA_INTEROP_BACKEND`` say; else
            the fastest, where a table of measured times covers the problem and T and B are known; else the order of the device's architecture.
        fallback: If the explicit choice is not valid, warn and choose automatically instead of raising.

    Raises:
        MLAInputError: An unknown name.
        MLAUnsupportedError: The explicit choice is not valid, or nothing is; with every reason.
    """
    _check_config(config)
    if fallback is not True and fallback is not False:
        raise input_error("fallback", repr(fallback), "True or False")
    return _select(config, _hashable(backend), fallback, environment_key())


def get_mla_prefill_backend(config: MLAPrefillSelectorConfig, backend: Any = None, fallback: bool = False) -> type[MLAPrefillBackend]:
    """The class that :func:`select` chooses, by the same rules; nothing is compiled or loaded.

    Args:
        config, backend, fallback: As for :func:`select`.

    Raises:
        MLAInputError: An unknown name.
        MLAUnsupportedError: The explicit choice is not valid, or nothing is; with every reason.
    """
    table = explain(config, backend, fallback)
    if table.chosen is None:
        raise MLAUnsupportedError(table.refusal())
    return backend_class(table.chosen)


def clear_cache() -> None:
    """Forget every choice made so far in this process, but for those that metadata in the caller's hands keeps."""
    from mla_interop import prefill, sequences  # these import this module
    from mla_interop.numeric_check import _checked

    for cached in (_select, prefill._resolve, sequences._dense_metadata, _checked, tables):
        cached.cache_clear()


def explain(config: MLAPrefillSelectorConfig, backend: Any = None, fallback: bool = False) -> SelectionTable:
    """Which backends can serve ``config``, why the others cannot, and which one is chosen. Compiles and loads nothing.

    Args:
        config: The problem.
        backend, fallback: As for :func:`select`.

    Returns:
        A table that prints as text, shows itself in a notebook, and has ``to_dict()``, ``chosen`` (None where nothing can serve) and ``rows``.

    Raises:
        MLAInputError: An unknown name. That nothing can serve raises nothing here.
    """
    _check_config(config)
    settings = MLAPrefillConfig(backend=_hashable(backend), flash_attn_version=config.flash_attn_version).over(current_config())
    config = replace(config, flash_attn_version=settings.flash_attn_version)
    explicit = parse_names("backend", settings.backend) if settings.backend is not None else ()
    order = parse_names("order", settings.order) if settings.order is not None else order_for(config.device_type, config.capability)
    measured = times_for(config) if (settings.policy or ("order" if settings.order else "measured")) == "measured" else None
    rows = {name: _row(name, config, settings.allow_reference is not False, measured) for name in dict.fromkeys([*explicit, *order, *names()])}
    order = tuple(fastest_first(order, lambda name: rows[name].us))
    valid = {row.backend for row in rows.values() if row.valid}
    chosen = next((name for name in explicit if name in valid), None)
    if chosen is None and (not explicit or fallback):
        chosen = next((name for name in order if name in valid), None)
    ranked = tuple(rows[name] for name in dict.fromkeys([*explicit, *order, *rows]))
    return SelectionTable(config=config, rows=ranked, chosen=chosen, explicit=explicit, order=order, measured=measured)


@functools.lru_cache(maxsize=4096)
def _select(config: MLAPrefillSelectorConfig, backend: Any, fallback: bool, environment: tuple[Any, ...]) -> MLAPrefillBackend:
    del environment  # only a part of the key
    from mla_interop.numeric_check import require  # it makes calls, for which it needs a choice

    table = explain(config, backend, fallback)
    tried: dict[str, str] = {}
    cause: MLAUnavailableError | None = None
    here = table.config.device_type != "cuda" or stated_target() is None  # kernels for a stated target need not load on this machine
    for name in _candidates(table, fallback):
        cls = backend_class(name)
        for kernel in kernels_of(name, table.config, table.measured):
            try:
                _ = kernel.launch if here else None
                if here and current_config().self_check:
                    require(name, kernel.variant, table.config)
            except MLAUnavailableError as error:
                tried[f"{name} ({kernel.variant})"] = str(error)
                cause = error
                continue
            _warn(table, name, kernel.name, tried)
            return cls(table.config, kernel)
    raise MLAUnsupportedError(table.refusal(tried)) from cause


def _candidates(table: SelectionTable, fallback: bool) -> list[str]:
    valid = [row.backend for row in table.rows if row.valid]
    wanted = table.explicit if table.explicit and not fallback else (*table.explicit, *table.order)
    return [name for name in dict.fromkeys(wanted) if name in valid]


def _warn(table: SelectionTable, name: str, kernel: str, tried: dict[str, str]) -> None:
    """A choice that is not the one to expect is never silent; it is made, and said, once (torchtitan#1610)."""
    failed = [f"{where}: {why}" for where, why in tried.items()]
    if table.explicit and name not in table.explicit:
        reasons = "; ".join([f"{row.backend}: {', '.join(row.reasons)}" for row in table.rows if row.reasons and row.backend in table.explicit] + failed)
        warnings.warn(f"backend {', '.join(table.explicit)} cannot be used ({reasons}); using {name} instead", stacklevel=4)
    elif name == "REFERENCE" and table.config.device_type == "cuda" and "REFERENCE" not in table.explicit:
        warnings.warn(f"no kernel can serve this on the GPU; using REFERENCE, plain array code, which is slow. {table.refusal(tried)}", stacklevel=4)
    elif failed:
        warnings.warn(f"{'; '.join(failed)}; using {kernel} instead", stacklevel=4)


def _row(name: str, config: MLAPrefillSelectorConfig, allow_reference: bool, measured: Times | None) -> Row:
    try:
        reasons, kernels = within(PROBE_SECONDS, f"the probe of {name}", functools.partial(_probe, name, config, measured))
    except Exception as error:  # whatever a backend's probe raises is a reason, and stops no other backend (oumi#2586)
        reasons, kernels = [str(error) if isinstance(error, MLAUnavailableError) else f"its probe failed: {type(error).__name__}: {error}"], []
    if name == "REFERENCE" and not allow_reference:
        reasons, kernels = [*reasons, "not allowed (allow_reference=False)"], []
    us = measured.of(name.partition(".")[0], kernels[0].variant) if measured and kernels else None
    return Row.of(name, tuple(reasons), kernels[0] if kernels else None, us)


def _probe(name: str, config: MLAPrefillSelectorConfig, measured: Times | None) -> tuple[list[str], list[Kernel]]:
    cls = backend_class(name)
    said: Any = cls.validate_configuration(config)
    reasons = [said] if isinstance(said, str) else [str(reason) for reason in said]  # anyone may have written the class
    kernels = [] if reasons else kernels_of(name, config, measured)
    if not reasons and not kernels:
        made, refused = cls.kernels(config)
        wanted = f"no kernel {name.partition('.')[2]} (can be used: {', '.join(kernel.variant for kernel in made)})"
        reasons = [*refused, wanted if made else "no kernel for this configuration"]
    return reasons, kernels


def kernels_of(name: str, config: MLAPrefillSelectorConfig, measured: Times | None = None) -> list[Kernel]:
    """The kernels that a name as ``parse_names`` gives it stands for: all of a backend's, or the one after the dot; the preferred one first."""
    backend, _, variant = name.partition(".")
    kernels = [kernel for kernel in backend_class(name).kernels(config)[0] if variant in ("", kernel.variant)]
    return kernels if measured is None else fastest_first(kernels, lambda kernel: measured.of(backend, kernel.variant))


def kernel_named(name: str) -> Kernel:
    """The kernel of that name, as another process had it; it is not loaded yet.

    Raises:
        MLAInputError: It is no name of a kernel, or of an unknown backend.
        MLAUnavailableError: This machine cannot have it; with the reasons.
    """
    config = MLAPrefillSelectorConfig.of_kernel_name(name)
    cls = backend_class(parse_names("kernel", name.partition(".")[0])[0])
    reasons = cls.validate_configuration(config)
    made, refused = ([], reasons) if reasons else cls.kernels(config)
    kernel = next((kernel for kernel in made if kernel.name == name), None)
    if kernel is None:
        raise MLAUnavailableError(f"kernel {name} cannot be had on this machine: {'; '.join(refused) or 'there are ' + ', '.join(k.name for k in made)}")
    return kernel


def _check_config(config: object) -> None:
    if not isinstance(config, MLAPrefillSelectorConfig):
        raise input_error("config", repr(config), "an MLAPrefillSelectorConfig")


def _is_integer(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _hashable(backend: Any) -> Any:
    """A choice as a cache's key; what is neither a name nor None is read at once, since it may be a list or a set."""
    return backend if backend is None or isinstance(backend, str) else parse_names("backend", backend)
