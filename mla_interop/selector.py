"""Select and explain: one answer to "which kernel, and why", for every frontend.

An explicit choice and an automatic one go through the same ``validate_configuration``. Support is data: reasons, each
with what was found and what is allowed. A choice is cached under everything it depends on, the environment included.
"""

import functools
import warnings
from dataclasses import replace
from typing import Any

from mla_interop.backends.base import Kernel, MLAPrefillBackend
from mla_interop.backends.registry import backend_class, names, order_for, parse_names
from mla_interop.capability import stated_target
from mla_interop.config import MLAPrefillConfig, current_config, environment_key
from mla_interop.errors import MLAUnavailableError, MLAUnsupportedError, input_error
from mla_interop.installed import PROBE_SECONDS, within
from mla_interop.measured import Times, fastest_first, tables, times_for
from mla_interop.selection_table import Row, SelectionTable
from mla_interop.selector_config import MLAPrefillSelectorConfig


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
                    require(name, kernel, table.config)
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
        reasons, kernels, refused = within(PROBE_SECONDS, f"the probe of {name}", functools.partial(_probe, name, config, measured))
    except Exception as error:  # whatever a backend's probe raises is a reason, and stops no other backend (oumi#2586)
        reasons, kernels = [str(error) if isinstance(error, MLAUnavailableError) else f"its probe failed: {type(error).__name__}: {error}"], []
        refused = []
    if name == "REFERENCE" and not allow_reference:
        reasons, kernels = [*reasons, "not allowed (allow_reference=False)"], []
    us = measured.of(name.partition(".")[0], kernels[0].variant) if measured and kernels else None
    return Row.of(name, tuple(reasons), kernels[0] if kernels else None, us, [] if "." in name else refused)


def _probe(name: str, config: MLAPrefillSelectorConfig, measured: Times | None) -> tuple[list[str], list[Kernel], list[str]]:
    """Reasons against a backend, its kernels, and, where none is compiled, the reasons why others are not among them."""
    cls = backend_class(name)
    said: Any = cls.validate_configuration(config)
    reasons = [said] if isinstance(said, str) else [str(reason) for reason in said]  # anyone may have written the class
    kernels = [] if reasons else kernels_of(name, config, measured)
    if reasons or any(kernel.kind == "compiled" for kernel in kernels):
        return reasons, kernels, []
    made, refused = cls.kernels(config)
    if not kernels:
        wanted = f"no kernel {name.partition('.')[2]} (can be used: {', '.join(kernel.variant for kernel in made)})"
        reasons = [*refused, wanted if made else "no kernel for this configuration"]
    return reasons, kernels, refused


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


def _hashable(backend: Any) -> Any:
    """A choice as a cache's key; what is neither a name nor None is read at once, since it may be a list or a set."""
    return backend if backend is None or isinstance(backend, str) else parse_names("backend", backend)
