"""Machines that are not this one: which packages are installed, as far as the backends can tell."""

from collections.abc import Iterator

import pytest

import mla_interop
from mla_interop.config import ENVIRONMENT
from mla_interop.installed import assume_installed


@pytest.fixture
def all_installed() -> Iterator[None]:
    """Every package that a backend may want."""
    with assume_installed():
        yield


@pytest.fixture
def none_installed() -> Iterator[None]:
    """None of them."""
    with assume_installed(False):
        yield


@pytest.fixture(autouse=True)
def clean_selection(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No setting of the person who runs the tests, and no choice that another test made."""
    for variable in ENVIRONMENT.values():
        monkeypatch.delenv(variable, raising=False)
    mla_interop.clear_cache()
    yield
    mla_interop.clear_cache()
