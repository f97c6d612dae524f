"""What is here: versions, GPUs, backends with the reasons why they cannot serve, settings and caches. Imports no package that may be broken."""

import functools
import os
import platform
import shutil
from collections.abc import Callable
from typing import Any

from mla_interop import machine
from mla_interop.capability import KNOWN_GPUS, DeviceCapability, DeviceProperties, device_properties, known_gpu
from mla_interop.config import ENVIRONMENT
from mla_interop.dimensions import DEEPSEEK_R1
from mla_interop.errors import MLAError, input_error
from mla_interop.kernels.build import cache_dir, package_version
from mla_interop.known_bad import known_bad
from mla_interop.numeric_check import SelfCheck, self_check
from mla_interop.progress import Progress, silent, told
from mla_interop.selection_table import SelectionTable
from mla_interop.selector import explain, kernels_of
from mla_interop.selector_config import MLAPrefillSelectorConfig
from mla_interop.version import __version__

DISTRIBUTIONS = {
    "frameworks": ("numpy", "torch", "jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin"),
    "CUDA": ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12"),
    "kernels": ("flash-attn-4", "flash-attn", "flashinfer-python", "nvidia-cudnn-frontend", "tokenspeed-mla", "nvidia-cutlass-dsl", "quack-kernels", "triton"),
    "others": ("apache-tvm-ffi", "jax-tvm-ffi", "transformers"),
}
OTHER_SETTINGS = (
    "MLA_INTEROP_CACHE",
    "CXX",
    "CUDA_HOME",
    "CUDA_VISIBLE_DEVICES",
    "JAX_PLATFORMS",
    "XLA_PYTHON_CLIENT_PREALLOCATE",
    "XLA_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_ALLOCATOR",
)


def gpus() -> list[DeviceProperties]:
    """The CUDA devices of this machine; none where there is no driver."""
    found: list[DeviceProperties] = []
    try:
        while True:
            found.append(device_properties(len(found)))
    except MLAError:
        return found


def look() -> dict[str, Any]:
    """Everything that an answer to "why does it not work here" needs. Never raises: what cannot be found out is in ``problems``.

    Returns:
        ``version``, ``python``, ``platform``; ``packages`` by group, name to version (``"none"``: not installed); ``tools``; ``gpus``; ``memory`` of
        the GPUs and what JAX takes of it; ``known_bad`` versions; ``backends``: one ``SelectionTable`` for each kind of device here, for
        DeepSeek's dimensions; ``settings``; ``cache``; ``problems``.
    """
    problems: list[str] = []

    def attempt(what: str, find: Callable[[], Any], otherwise: Any) -> Any:
        try:
            return find()
        except Exception as error:  # a broken machine is what this is asked about
            problems.append(f"{what}: {type(error).__name__}: {error}")
            return otherwise

    devices = attempt("GPUs", gpus, [])
    packages = {
        group: {name: attempt(name, functools.partial(package_version, name), "cannot be read") for name in distributions}
        for group, distributions in DISTRIBUTIONS.items()
    }
    driver = attempt("CUDA driver", machine.driver_cuda, "none")
    versions = {name: found for group in packages.values() for name, found in group.items()} | {"driver": driver}
    tools = {
        "driver": attempt("driver", machine.driver_version, "none"),
        "CUDA driver": driver,
        "nvcc": attempt("nvcc", machine.nvcc_version, "none"),
        "C++ compiler": attempt("C++ compiler", lambda: shutil.which(os.environ.get("CXX", "g++")), None) or "none",
    }
    return {
        "version": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": packages,
        "tools": tools,
        "gpus": [{"name": gpu.name, "capability": str(gpu.capability), "num_sms": gpu.num_sms} for gpu in devices],
        "memory": {"gpus": attempt("GPU memory", machine.gpu_memory, []), "jax": attempt("JAX's memory", machine.jax_memory, {})},
        "known_bad": [finding._asdict() for finding in attempt("known-bad versions", lambda: known_bad(versions), [])],
        "backends": attempt("backends", lambda: tables(devices), []),
        "settings": {variable: os.environ[variable] for variable in (*ENVIRONMENT.values(), *OTHER_SETTINGS) if variable in os.environ},
        "cache": attempt("cache", cache, {"folder": "unknown", "writable": False, "files": 0, "mib": 0.0}),
        "problems": problems,
    }


def tables(devices: list[DeviceProperties]) -> list[SelectionTable]:
    """What can serve DeepSeek's dimensions in bfloat16 here: on each kind of GPU, and on the CPU."""
    kinds = dict.fromkeys((gpu.capability, gpu.num_sms) for gpu in devices)
    configs = [MLAPrefillSelectorConfig(dimensions=DEEPSEEK_R1, num_heads=16, capability=capability, num_sms=num_sms) for capability, num_sms in kinds]
    return [explain(config) for config in (*configs, MLAPrefillSelectorConfig(dimensions=DEEPSEEK_R1, num_heads=16, device_type="cpu"))]


def self_checks(progress: Progress = silent) -> list[SelfCheck]:
    """A self-check of every kernel that can serve DeepSeek's dimensions here, on each kind of device; loading one may build it first."""
    rows = [(row.backend, table.config) for table in tables(gpus()[:1]) for row in table.rows if row.valid]
    kernels = [(f"{name}.{kernel.variant}", config.device_type) for name, config in rows for kernel in kernels_of(name, config)]
    return [self_check(name, device) for name, device in told(kernels, progress, lambda each: f"checking {each[0]} on {each[1]}")]


def target_settings(gpu: str | None) -> dict[str, Any]:
    """Settings of a selector configuration for a GPU by name, a compute capability, ``"cpu"``, or (None) what this machine has.

    Raises:
        MLAInputError: The name is unknown.
    """
    target = next(iter(gpus()), None) if gpu is None else known_gpu(gpu)
    if target is not None:
        return {"capability": target.capability, "num_sms": target.num_sms}
    if gpu in (None, "cpu"):
        return {"device_type": "cpu"}
    try:
        return {"capability": DeviceCapability.parse(gpu)}
    except MLAError:
        raise input_error("gpu", repr(gpu), f"{', '.join(KNOWN_GPUS)}, a compute capability such as 9.0, or cpu") from None


def sections(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What :func:`report` found but for the backends, as titled lists of names and values, for people."""
    head = {"mla-interop": found["version"], "Python": found["python"], "platform": found["platform"]}
    devices = {f"GPU {index}": f"{gpu['name']}, {gpu['capability']}, {gpu['num_sms']} SMs" for index, gpu in enumerate(found["gpus"])} or {"GPU": "none"}
    cached, jax = found["cache"], found["memory"]["jax"]
    kept = f"{cached['folder']}, {cached['files']} files, {cached['mib']} MiB{'' if cached['writable'] else ', cannot be written'}"
    memory = {f"GPU {index}": f"{gpu['free_gib']} of {gpu['total_gib']} GiB free" for index, gpu in enumerate(found["memory"]["gpus"])}
    if jax:
        share = "a part" if jax["fraction"] is None else f"{jax['fraction']:.0%} of a GPU"
        memory["JAX"] = f"{'takes ' + share + ' when it starts' if jax['preallocates'] else 'takes memory as it needs it'} ({jax['why']})"
    bad = {pair["found"]: f"{pair['why']}. {pair['do']}." for pair in found["known_bad"]}
    shown = {
        "machine": {**head, **devices, **found["tools"]},
        **found["packages"],
        "memory": memory,
        "versions that do not get along": bad or {"none known": ""},
        "settings": found["settings"] or {"none": ""},
        "cache": {"folder": kept},
    }
    return shown | ({"problems": dict(problem.split(": ", 1) for problem in found["problems"])} if found["problems"] else {})


def cache() -> dict[str, Any]:
    """The folder of built kernels: where it is, whether it can be written, and how much is in it."""
    folder = cache_dir()
    nearest = next(parent for parent in (folder, *folder.parents) if parent.exists())
    files = [path.stat().st_size for path in folder.iterdir() if path.is_file()] if folder.is_dir() and os.access(folder, os.R_OK | os.X_OK) else []
    return {"folder": str(folder), "writable": os.access(nearest, os.W_OK), "files": len(files), "mib": round(sum(files) / 2**20, 1)}
