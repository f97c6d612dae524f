"""Tests of the JAX frontend run on a CPU, also where there is a GPU, unless they are marked ``gpu``."""

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def on_a_cpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """JAX's default device is what a traced program is made for."""
    jax = pytest.importorskip("jax")
    with jax.default_device(jax.local_devices(backend="cuda" if request.node.get_closest_marker("gpu") else "cpu")[0]):
        yield
