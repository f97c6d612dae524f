"""Machines that are not this one: which packages are installed, as far as the backends' own probes can tell."""

from collections.abc import Iterator

import pytest

import mla_interop
from mla_interop.config import ENVIRONMENT
from mla_interop.kernels import cpu_sdpa, fa4, flash_attn_packages, flashinfer_module


def _stub_probes(monkeypatch: pytest.MonkeyPatch, installed: bool) -> None:
    reasons = [] if installed else ["not installed (stub)"]
    versions = {name: proven[0] for name, proven in fa4.PROVEN_VERSIONS.items()} if installed else {}
    monkeypatch.setattr(fa4, "package_version", lambda name: versions.get(name, "none"))
    monkeypatch.setattr(fa4, "_importable", lambda module: installed)
    monkeypatch.setattr(flash_attn_packages, "_findable", lambda module: installed)
    monkeypatch.setattr(flashinfer_module, "_installation_reasons", lambda *problem: reasons)
    monkeypatch.setattr(cpu_sdpa, "_torch_reasons", lambda: reasons)
    monkeypatch.setattr(cpu_sdpa, "_compiler_reasons", lambda: [])


@pytest.fixture
def all_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every package that a backend may want."""
    _stub_probes(monkeypatch, True)


@pytest.fixture
def none_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of them."""
    _stub_probes(monkeypatch, False)


@pytest.fixture(autouse=True)
def clean_selection(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No setting of the person who runs the tests, and no choice that another test made."""
    for variable in ENVIRONMENT.values():
        monkeypatch.delenv(variable, raising=False)
    mla_interop.clear_cache()
    yield
    mla_interop.clear_cache()
