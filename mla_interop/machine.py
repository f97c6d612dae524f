"""The machine below the packages: driver, CUDA compiler, memory of the GPUs, and what JAX will take of it. No framework, no CUDA context."""

import ctypes
import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mla_interop.kernels.build import find_nvcc

_KERNEL_MODULE = Path("/proc/driver/nvidia/version")
# JAX's documented defaults (its page on GPU memory allocation).
_JAX_FRACTION = 0.75


def driver_cuda() -> str:
    """The newest CUDA that the driver can run, as in ``"13.0"``, or ``"none"``."""
    try:
        driver, answer = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(0)
    except OSError:
        return "none"
    return f"{answer.value // 1000}.{answer.value % 1000 // 10}" if driver.cuDriverGetVersion(ctypes.byref(answer)) == 0 else "none"


def driver_version() -> str:
    """The driver's own version, as in ``"580.65.06"``, or ``"none"``."""
    try:
        found = re.search(r"\b\d{3}(?:\.\d+)+\b", _KERNEL_MODULE.read_text())
    except OSError:
        return "none"
    return found[0] if found else "none"


def nvcc_version() -> str:
    """The CUDA compiler and its version, or ``"none"``."""
    path = find_nvcc()
    if path is None:
        return "none"
    try:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return f"{path} does not run ({error})"
    release = re.search(r"release (\d+\.\d+)", said)
    return f"{release[1]}, {path}" if release else path


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


def gpu_memory() -> list[dict[str, Any]]:
    """``name``, ``total_gib`` and ``free_gib`` of every GPU, in NVML's order, which ``CUDA_VISIBLE_DEVICES`` does not change; [] without NVML."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return []
    count, found = ctypes.c_uint(0), []
    if nvml.nvmlInit_v2() != 0:
        return []
    try:
        nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        for index in range(count.value):
            handle, memory, name = ctypes.c_void_p(), _Memory(), ctypes.create_string_buffer(96)
            if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) != 0 or nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) != 0:
                continue
            nvml.nvmlDeviceGetName(handle, name, len(name))
            found.append({"name": name.value.decode(), "total_gib": round(memory.total / 2**30, 1), "free_gib": round(memory.free / 2**30, 1)})
    finally:
        nvml.nvmlShutdown()
    return found


def jax_memory(environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """What JAX takes of a GPU's memory when it first uses it, by the variables that decide it: ``preallocates``, ``fraction``, ``why``."""
    allocator = environment.get("XLA_PYTHON_CLIENT_ALLOCATOR", "default").lower()
    if allocator == "platform":
        return {"preallocates": False, "fraction": 0.0, "why": "XLA_PYTHON_CLIENT_ALLOCATOR=platform"}
    preallocate = environment.get("XLA_PYTHON_CLIENT_PREALLOCATE", "")
    if preallocate in ("false", "False", "0"):  # jaxlib takes every other value for a yes
        return {"preallocates": False, "fraction": 0.0, "why": f"XLA_PYTHON_CLIENT_PREALLOCATE={preallocate}"}
    names = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")  # the second is its older name
    stated = [name for name in names if environment.get(name)]
    if len(stated) == 2:
        return {"preallocates": True, "fraction": None, "why": f"JAX refuses {' and '.join(names)} together; unset the second"}
    if not stated:
        return {"preallocates": True, "fraction": _JAX_FRACTION, "why": "JAX's default; XLA_PYTHON_CLIENT_PREALLOCATE=false leaves memory to torch"}
    try:
        return {"preallocates": True, "fraction": float(environment[stated[0]]), "why": stated[0]}
    except ValueError:
        return {"preallocates": True, "fraction": None, "why": f"{stated[0]} is no number: {environment[stated[0]]!r}"}
