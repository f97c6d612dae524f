"""The only list of backends, and the orders in which they are tried. Importing it imports no backend and no kernel package."""

import enum
import functools
import importlib
from collections.abc import Sequence

from mla_interop.backends.base import MLAPrefillBackend
from mla_interop.capability import DeviceCapability
from mla_interop.errors import input_error


class MLAPrefillBackendEnum(enum.Enum):
    """Names of the backends; a value is the class's path, which is imported when first asked for."""

    FLASH_ATTN = "mla_interop.backends.flash_attn:FlashAttnBackend"
    FLASHINFER = "mla_interop.backends.flashinfer:FlashInferBackend"
    CPU_SDPA = "mla_interop.backends.cpu_sdpa:CPUSDPABackend"
    REFERENCE = "mla_interop.backends.reference:ReferenceBackend"

    def get_class(self) -> type[MLAPrefillBackend]:
        """The backend's class."""
        return _load(self.value)


@functools.cache
def _load(path: str) -> type[MLAPrefillBackend]:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


# Preferred first. Keys: a compute capability's major version, or a device without one.
ORDERS: dict[str, tuple[str, ...]] = {
    "10": ("FLASHINFER", "FLASH_ATTN", "REFERENCE"),
    "9": ("FLASH_ATTN", "FLASHINFER", "REFERENCE"),
    "8": ("FLASH_ATTN", "FLASHINFER", "REFERENCE"),
    "12": ("FLASH_ATTN", "FLASHINFER", "REFERENCE"),
    "cuda": ("FLASH_ATTN", "FLASHINFER", "REFERENCE"),
    "cpu": ("CPU_SDPA", "REFERENCE"),
}


def names() -> list[str]:
    """Every backend's name."""
    return [member.name for member in MLAPrefillBackendEnum]


def backend_class(name: str) -> type[MLAPrefillBackend]:
    """The class of a name as :func:`parse_names` gives it."""
    return MLAPrefillBackendEnum[name.partition(".")[0]].get_class()


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
        if backend.upper() in MLAPrefillBackendEnum.__members__ and bool(dot) == bool(variant):
            return (f"{backend.upper()}{dot}{variant.lower()}",)
    raise input_error(argument, repr(value), ", ".join(names()), "Upper or lower case, or an ordered sequence of these.")


def order_for(device_type: str, capability: DeviceCapability | None) -> tuple[str, ...]:
    """The documented order of a device."""
    if device_type != "cuda":
        return ORDERS["cpu"]
    return ORDERS.get(str(capability.major) if capability else "cuda", ORDERS["cuda"])
