"""Versions that do not get along, by name: what ``doctor`` says of them before someone meets the error.

A rule looks at versions of distributions, which are read from their metadata: nothing is imported, so that a package that breaks its
process can be named as well.
"""

import re
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, requires
from typing import NamedTuple

from mla_interop.kernels.cudnn_graph import FAULTY

Version = tuple[int, ...]


class Rule(NamedTuple):
    """Distributions that must not be together in these versions.

    Attributes:
        packages: Their names; the rule holds only where all of them are installed. ``driver`` is the newest CUDA that the driver can run.
        bad: Whether these versions, in that order, do not get along.
        why: What happens.
        do: What helps.
    """

    packages: tuple[str, ...]
    bad: Callable[..., bool]
    why: str
    do: str


class Finding(NamedTuple):
    """A rule that holds here: what was found, what happens, and what helps."""

    found: str
    why: str
    do: str

    def __str__(self) -> str:
        return f"{self.found}: {self.why}. {self.do}."


def _plugin_rule(plugin: str) -> Rule:
    return Rule((plugin, "jaxlib"), lambda a, b: a[:3] != b[:3], "JAX leaves out a plugin of another version, and finds no GPU", "Install both in one version")


def _cudnn_rule(package: str) -> Rule:
    return Rule((package,), lambda version: version[:3] in FAULTY, "wrong results in 16-bit attention", "Install 9.10.2 or later")


RULES: tuple[Rule, ...] = (
    Rule(("jaxlib", "jax"), lambda lib, jax: lib[:3] > jax[:3], "JAX refuses a jaxlib that is newer than itself", "Install both in one version"),
    _plugin_rule("jax-cuda13-plugin"),
    _plugin_rule("jax-cuda12-plugin"),
    Rule(
        ("jax-tvm-ffi", "jax"),
        lambda ffi, jax: (ffi >= (0, 1, 3)) != (jax >= (0, 9, 1)),
        "handlers are registered, and not found by the first call",
        "Pair jax-tvm-ffi 0.1.3 and later with jax 0.9.1 and later, older ones with older ones (mla-interop does not use it)",
    ),
    _cudnn_rule("nvidia-cudnn-cu13"),
    _cudnn_rule("nvidia-cudnn-cu12"),
    Rule(
        ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12"),
        lambda *versions: True,
        "a process that loads both cuDNNs fails in the second (IsaacLab#4980)",
        "Install torch and JAX for one CUDA",
    ),
    Rule(
        ("nvidia-cudnn-frontend", "nvidia-cutlass-dsl"),
        lambda frontend, dsl: frontend >= (1, 32) and dsl < (4, 8),
        "this frontend needs CuTe DSL 4.8.0 or later",
        "Update nvidia-cutlass-dsl",
    ),
    Rule(
        ("quack-kernels", "nvidia-cutlass-dsl"),
        lambda quack, dsl: quack >= (0, 6, 5) and dsl < (4, 7),
        "FlashAttention-4's compiler imports quack, which needs CuTe DSL 4.7 or later",
        "Update nvidia-cutlass-dsl",
    ),
    Rule(
        ("transformers",),
        lambda version: version < (5, 20),
        "its DeepSeek-V2 layer leaves YaRN out of the softmax scale",
        "Update it where its own attention is compared with this one",
    ),
    Rule(
        ("nvidia-cuda-runtime", "driver"),
        lambda runtime, driver: runtime[0] > driver[0],
        "the driver is older than the CUDA that packages were built for, and they will find no GPU",
        "Update the driver, or install the packages for its CUDA",
    ),
)


def known_bad(versions: Mapping[str, str]) -> list[Finding]:
    """The rules that hold for these versions, and what is older than this package states that it needs.

    Args:
        versions: Distribution to version, as in ``{"jax": "0.10.2"}``; ``"none"`` or absent: not installed.
    """
    numbers = {name: parsed for name, text in versions.items() if (parsed := _numbers(text))}
    found = []
    for rule in RULES:
        if all(name in numbers for name in rule.packages) and rule.bad(*(numbers[name] for name in rule.packages)):
            found.append(Finding(" with ".join(f"{name} {versions[name]}" for name in rule.packages), rule.why, rule.do))
    for name, oldest in stated_minima().items():
        if name in numbers and numbers[name] < oldest and not any(each.found == f"{name} {versions[name]}" for each in found):
            wanted = ".".join(map(str, oldest))
            found.append(Finding(f"{name} {versions[name]}", f"mla-interop needs {wanted} or later", f"pip install '{name}>={wanted}'"))
    return found


def stated_minima() -> dict[str, Version]:
    """The oldest versions that this package's own metadata asks for; empty where it is not installed as a package."""
    try:
        stated = requires("mla-interop") or []
    except PackageNotFoundError:
        return {}
    oldest: dict[str, Version] = {}
    parts = [re.match(r"([A-Za-z0-9._-]+)(?:\[[^]]*\])?[^;]*?[>=]=\s*([0-9.]+)", text) for text in stated]
    for part in parts:
        if part:  # extras may ask for different ones: the least of them
            oldest[part[1].lower()] = min(_numbers(part[2]), oldest.get(part[1].lower(), _numbers(part[2])))
    return oldest


def _numbers(text: str) -> Version:
    release = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(map(int, release[0].split("."))) if release else ()
