"""The only list of backends, and the orders in which they are tried. Importing it imports no backend and no kernel package.

A third party adds a backend with :func:`register_mla_prefill_backend`, or with an entry point of the group
``mla_interop.backends``, which is found when a name is first asked for and imported when its class is.
"""

import enum
import functools
import importlib
import warnings
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import NamedTuple, TypeVar

from mla_interop.backends.base import MLAPrefillBackend
from mla_interop.capability import DeviceCapability
from mla_interop.errors import MLAInputError, MLAUnavailableError, input_error
from mla_interop.installed import IMPORT_SECONDS, within

ENTRY_POINTS = "mla_interop.backends"


class MLAPrefillBackendEnum(enum.Enum):
    """Names of the built-in backends; a value is the class's path, which is imported when first asked for."""

    FLASH_ATTN = "mla_interop.backends.flash_attn:FlashAttnBackend"
    FLASHINFER = "mla_interop.backends.flashinfer:FlashInferBackend"
    CUDNN = "mla_interop.backends.cudnn:CudnnBackend"
    TRTLLM_RAGGED = "mla_interop.backends.trtllm_ragged:TRTLLMRaggedBackend"
    TOKENSPEED_MLA = "mla_interop.backends.tokenspeed_mla:TokenSpeedMLABackend"
    CPU_SDPA = "mla_interop.backends.cpu_sdpa:CPUSDPABackend"
    REFERENCE = "mla_interop.backends.reference:ReferenceBackend"

    def get_class(self) -> type[MLAPrefillBackend]:
        """The backend's class, or the one that was registered in its place."""
        return _registered[self.name][-1].cls if self.name in _registered else _load(self.value)


# Preferred first. Keys: a compute capability's major version, or a device without one.
ORDERS: dict[str, tuple[str, ...]] = {
    "10": ("TRTLLM_RAGGED", "FLASHINFER", "CUDNN", "FLASH_ATTN", "TOKENSPEED_MLA", "REFERENCE"),
    "9": ("FLASH_ATTN", "FLASHINFER", "CUDNN", "REFERENCE"),
    "8": ("FLASH_ATTN", "FLASHINFER", "REFERENCE"),
    "12": ("FLASH_ATTN", "FLASHINFER", "REFERENCE"),
    "cuda": ("FLASH_ATTN", "FLASHINFER", "REFERENCE"),
    "cpu": ("CPU_SDPA", "REFERENCE"),
}

_Class = TypeVar("_Class", bound=type[MLAPrefillBackend])


class _Registration(NamedTuple):
    cls: type[MLAPrefillBackend]
    before: str | None


# What was registered for a name, newest last and never empty: removing one brings back the one before, and at last the built-in.
_registered: dict[str, list[_Registration]] = {}


def register_mla_prefill_backend(name: str, *, override: bool = False, before: str | None = None) -> Callable[[_Class], _Class]:
    """A class decorator that adds a backend under ``name``, from now on and for the whole process.

    Args:
        name: Upper-case name, equal to the class's ``name``.
        override: Whether the name may be in use already; the new class then takes its place, in the orders too.
        before: A backend in front of which the new one stands in every order that has it. None: it is used only where it is named, by
            ``backend`` or ``order``.

    Raises:
        MLAInputError: The name is taken or malformed, or the class lacks a method or a declaration; with all that is missing.
    """

    def register(cls: _Class) -> _Class:
        problems = _problems(name, cls)
        if problems:
            raise MLAInputError(f"{name}: {getattr(cls, '__qualname__', cls)!s} cannot be registered as a backend: {'; '.join(problems)}.")
        places = () if before is None else parse_names("before", before)
        if len(places) > 1 or any("." in place for place in places):
            raise input_error("before", repr(before), "one backend, and not one of its kernels")
        place = next(iter(places), None)
        stack = list(_registered.get(name, ()))
        if stack and (stack[-1].cls.__module__, stack[-1].cls.__qualname__) == (cls.__module__, cls.__qualname__):
            stack.pop()  # its module was imported again
        elif name in names() and not override:
            raise input_error("name", repr(name), "a name that is not in use", "override=True puts the class in its place.")
        _registered[name] = [*stack, _Registration(cls, place)]
        _forget()
        return cls

    return register


def unregister_mla_prefill_backend(name: str) -> None:
    """Take back the newest registration of ``name``: what it overrode serves again.

    Args:
        name: As it was registered.

    Raises:
        MLAInputError: Nothing is registered under that name; built-in backends cannot be removed.
    """
    if not isinstance(name, str) or name not in _registered:
        raise input_error("name", repr(name), ", ".join(_registered) or "none, since nothing was registered")
    stack = _registered.pop(name)[:-1]
    if stack:
        _registered[name] = stack
    _forget()


def names() -> list[str]:
    """Every backend's name: the built-in ones, then those of entry points, then what was registered."""
    return list(dict.fromkeys([*MLAPrefillBackendEnum.__members__, *_entry_points(), *_registered]))


def backend_class(name: str) -> type[MLAPrefillBackend]:
    """The class of a name as :func:`parse_names` gives it.

    Raises:
        MLAUnavailableError: It comes from an entry point that cannot be loaded, or whose class cannot serve.
    """
    name = name.partition(".")[0]
    if name in MLAPrefillBackendEnum.__members__:
        return MLAPrefillBackendEnum[name].get_class()
    return _registered[name][-1].cls if name in _registered else _load_entry_point(name)


@functools.cache
def _load(path: str) -> type[MLAPrefillBackend]:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


@functools.cache
def _entry_points() -> dict[str, metadata.EntryPoint]:
    found: dict[str, metadata.EntryPoint] = {}
    for point in metadata.entry_points(group=ENTRY_POINTS):
        if point.name in MLAPrefillBackendEnum.__members__ or point.name in found or point.name != point.name.upper() or "." in point.name:
            warnings.warn(f"entry point {point.name} = {point.value} of {ENTRY_POINTS} is left out: its name is in use or not upper case", stacklevel=2)
        else:
            found[point.name] = point
    return found


@functools.cache
def _load_entry_point(name: str) -> type[MLAPrefillBackend]:
    point = _entry_points()[name]
    try:
        cls = within(IMPORT_SECONDS, f"importing {point.value}", point.load)
    except Exception as error:
        raise MLAUnavailableError(f"entry point {name} = {point.value} cannot be loaded: {type(error).__name__}: {error}") from error
    problems = _problems(name, cls)
    if problems:
        raise MLAUnavailableError(f"entry point {name} = {point.value} is not a backend: {'; '.join(problems)}")
    return cls


def _problems(name: str, cls: object) -> list[str]:
    """All that a class lacks to be a backend of that name."""
    named = isinstance(name, str) and name == name.upper() and name.replace("_", "").isalnum()
    problems = [] if named else [f"name {name!r} (allowed: upper-case letters, digits and _)"]
    if not isinstance(cls, type) or not issubclass(cls, MLAPrefillBackend):
        return [*problems, "no subclass of MLAPrefillBackend"]
    problems += [f"no method {method}" for method in sorted(cls.__abstractmethods__)]
    if getattr(cls, "name", None) != name:
        problems.append(f"declares name {getattr(cls, 'name', None)!r}, not {name!r}")
    if not _are(cls.device_types, lambda device: device in ("cpu", "cuda")) or not cls.device_types:
        problems.append(f"declares device_types {cls.device_types!r} (allowed: 'cpu', 'cuda')")
    if not _are(cls.supported_dtypes, lambda dtype: isinstance(dtype, str)) or not cls.supported_dtypes:
        problems.append(f"declares supported_dtypes {cls.supported_dtypes!r} (allowed: a tuple of NumPy-style names)")
    if not _are(cls.supported_head_dims, lambda pair: isinstance(pair, tuple) and len(pair) == 2):
        problems.append(f"declares supported_head_dims {cls.supported_head_dims!r} (allowed: a tuple of pairs, (D, V))")
    if not isinstance(cls.min_capability, DeviceCapability):
        problems.append(f"declares min_capability {cls.min_capability!r} (allowed: a DeviceCapability)")
    for method in ("unavailable_reasons", "kernels", "validate_configuration"):
        if method not in cls.__abstractmethods__ and getattr(getattr(cls, method), "__self__", None) is not cls:
            problems.append(f"{method} is no class method")
    return problems


def _are(values: object, good: Callable[[object], bool]) -> bool:
    return isinstance(values, tuple | list | set | frozenset) and all(map(good, values))


def _forget() -> None:
    from mla_interop.selector import clear_cache  # the selector imports this module

    clear_cache()


def parse_names(argument: str, value: object) -> tuple[str, ...]:
    """Canonical names from a name in any case, an enum member, or an ordered sequence of them.

    A name may be followed by one of the backend's kernels, as in ``"FLASH_ATTN.fa3"``, which then is the only one considered.

    Raises:
        MLAInputError: A name is unknown, empty, or of another type; the text lists the known ones (vllm#22217).
    """
    if isinstance(value, Sequence) and not isinstance(value, str) and value:
        return tuple(name for item in value for name in parse_names(argument, item))
    if isinstance(value, MLAPrefillBackendEnum):
        return (value.name,)
    if isinstance(value, str):
        backend, dot, variant = value.partition(".")
        if backend.upper() in names() and bool(dot) == bool(variant):
            return (f"{backend.upper()}{dot}{variant.lower()}",)
    raise input_error(argument, repr(value), ", ".join(names()), "Upper or lower case, or an ordered sequence of these.")


def order_for(device_type: str, capability: DeviceCapability | None) -> tuple[str, ...]:
    """The documented order of a device, with what was registered to stand before one of its backends."""
    order = list(ORDERS["cpu"] if device_type != "cuda" else ORDERS.get(str(capability.major) if capability else "cuda", ORDERS["cuda"]))
    for name, stack in _registered.items():
        if name not in order and stack[-1].before in order:
            order.insert(order.index(stack[-1].before), name)
    return tuple(order)
