"""What a device is: its compute capability and size, read once through the CUDA driver, without a framework.

The driver is asked through ctypes, so that neither torch nor JAX has to be imported, and no CUDA context is made.
"""

import contextlib
import contextvars
import ctypes
import functools
import os
import platform
from collections.abc import Iterator
from typing import NamedTuple

from mla_interop.errors import MLAUnavailableError, input_error


class DeviceCapability(NamedTuple):
    """A CUDA compute capability, major and minor number, e.g. ``DeviceCapability(9, 0)`` for Hopper."""

    major: int
    minor: int

    @classmethod
    def parse(cls, value: "DeviceCapability | tuple[int, int] | str") -> "DeviceCapability":
        """From ``"9.0"``, a pair, or itself.

        Raises:
            MLAInputError: It is none of these.
        """
        try:
            major, minor = value.split(".") if isinstance(value, str) else value
            made = cls(int(major), int(minor))
            # Names of kernels have the minor number as one digit; int() cuts what is no whole number.
            if made.major < 1 or not 0 <= made.minor <= 9 or isinstance(major, float) or isinstance(minor, float):
                raise ValueError
        except (TypeError, ValueError, OverflowError):
            raise input_error("capability", repr(value), 'a pair such as (9, 0) or a string such as "9.0"') from None
        return made

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


class DeviceProperties(NamedTuple):
    """What selection and planning need to know of one CUDA device."""

    name: str
    capability: DeviceCapability
    num_sms: int


# Streaming multiprocessors of the GPUs one may plan for without having one (work lists depend on the count).
KNOWN_GPUS = {
    "a100": DeviceProperties("NVIDIA A100", DeviceCapability(8, 0), 108),
    "h100": DeviceProperties("NVIDIA H100", DeviceCapability(9, 0), 132),
    "h200": DeviceProperties("NVIDIA H200", DeviceCapability(9, 0), 132),
    "b200": DeviceProperties("NVIDIA B200", DeviceCapability(10, 0), 148),
    "b300": DeviceProperties("NVIDIA B300", DeviceCapability(10, 3), 148),
    "rtx-5090": DeviceProperties("NVIDIA GeForce RTX 5090", DeviceCapability(12, 0), 170),
}


def known_gpu(name: str) -> DeviceProperties | None:
    """The GPU of that name, in any case, out of ``KNOWN_GPUS``; None for any other name."""
    return KNOWN_GPUS.get(name.lower())


_ATTRIBUTE_SM_COUNT, _ATTRIBUTE_MAJOR, _ATTRIBUTE_MINOR = 16, 75, 76
_stated: contextvars.ContextVar[DeviceProperties | None] = contextvars.ContextVar("mla_interop_stated_target", default=None)


@contextlib.contextmanager
def state_target(gpu: str | DeviceProperties) -> Iterator[DeviceProperties]:
    """Inside, every CUDA device counts as ``gpu``, and no driver is asked: for programs that are made here and run elsewhere.

    Nothing is loaded for a stated target: its kernels need not run on this machine.

    Args:
        gpu: A name out of ``KNOWN_GPUS``, in any case, or the properties of another GPU.

    Raises:
        MLAInputError: The name is unknown.
    """
    properties = known_gpu(gpu) if isinstance(gpu, str) else gpu
    if not isinstance(properties, DeviceProperties):
        raise input_error("target", repr(gpu), f"{', '.join(KNOWN_GPUS)}, or a DeviceProperties")
    token = _stated.set(properties)
    try:
        yield properties
    finally:
        _stated.reset(token)


def stated_target() -> DeviceProperties | None:
    """The GPU that :func:`state_target` stated here, if it did: part of every cache key whose entry depends on a device."""
    return _stated.get()


def device_properties(index: int = 0) -> DeviceProperties:
    """Properties of CUDA device ``index`` (the driver's numbering, which torch and JAX share); those of the stated target, if there is one.

    Raises:
        MLAUnavailableError: There is no CUDA driver, or no such device.
    """
    return _stated.get() or _read_properties(index)


@functools.cache
def _read_properties(index: int) -> DeviceProperties:
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise MLAUnavailableError(f"no CUDA driver on this machine ({error}); state the target's capability instead") from error
    device = ctypes.c_int()
    if cuda.cuInit(0) != 0 or cuda.cuDeviceGet(ctypes.byref(device), index) != 0:
        raise MLAUnavailableError(f"the CUDA driver shows no device {index}")
    name = ctypes.create_string_buffer(128)
    cuda.cuDeviceGetName(name, len(name), device)
    values = []
    for attribute in (_ATTRIBUTE_MAJOR, _ATTRIBUTE_MINOR, _ATTRIBUTE_SM_COUNT):
        value = ctypes.c_int()
        cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        values.append(value.value)
    return DeviceProperties(name.value.decode(), DeviceCapability(values[0], values[1]), values[2])


def machine_name(device_type: str) -> str:
    """What measured times belong to: the name of CUDA device 0 (``""`` where there is none), or the kind and number of CPU cores."""
    if device_type != "cuda":
        return f"{platform.machine()}, {os.cpu_count()} cores"
    try:
        return device_properties(0).name
    except MLAUnavailableError:
        return ""


def device_capability(device_type: str, index: int = 0) -> DeviceCapability | None:
    """Compute capability of a device; None for devices that have none (CPU) and where it cannot be read."""
    if device_type != "cuda":
        return None
    try:
        return device_properties(index).capability
    except MLAUnavailableError:
        return None
