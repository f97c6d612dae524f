"""Where a traced program will run: JAX's default device, or the GPU that a user states for a program that is made here and runs elsewhere."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax

from mla_interop.capability import DeviceProperties, state_target, stated_target
from mla_interop.errors import input_error

_traced_for = jax.make_user_context(default_value=None)  # a part of the key of every cache of jax.jit


@contextlib.contextmanager
def target(gpu: str | DeviceProperties) -> Iterator[DeviceProperties]:
    """Trace for ``gpu``, whatever this machine has: kernels are selected for it, and no GPU is asked and no kernel loaded.

    The program is lowered or exported inside, and run elsewhere::

        with jax_side.target("h200"):
            exported = jax.export.export(jax.jit(f), platforms=["cuda"], disabled_checks=jax_side.EXPORT_CHECKS)(*shapes)

    The process that runs it calls ``jax_side.ffi.register_all()`` first, and has the kernels' packages. The machine that exports must have
    them too, in the same versions, or take them as given: ``mla_interop.installed.assume_installed()``.

    Args:
        gpu: A name out of ``mla_interop.capability.KNOWN_GPUS`` (``"h200"``, ``"b200"``, ...), or the properties of another one.

    Raises:
        MLAInputError: The name is unknown.
    """
    with state_target(gpu) as properties, _traced_for(properties):
        yield properties


def traced_device() -> tuple[str, int]:
    """Type and index of the device that traced code is for, as far as tracing can know."""
    if stated_target() is not None:
        return "cuda", 0
    device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(device, jax.Device):
        return device_of({device})
    return _platform(device or jax.default_backend()), 0


def device_of(devices: set[Any]) -> tuple[str, int]:
    """Type and index of the device that stands for all that an array is on."""
    device = min(devices, key=lambda device: device.id)
    return _platform(device.platform), device.local_hardware_id or 0


def _platform(platform: str) -> str:
    if platform not in ("cpu", "gpu", "cuda"):
        raise input_error("q, k, v", f"arrays on {platform}", "CPU or CUDA GPU", "jax.device_put moves them; jax_side.target(...) states a GPU for tracing.")
    return "cpu" if platform == "cpu" else "cuda"
