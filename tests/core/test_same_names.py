"""The frontends have the same functions, with the same keywords, defaults and order; what only one can have is listed here."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest

import mla_interop
from mla_interop import neutral

torch_side = pytest.importorskip("torch_side")
jax_side = pytest.importorskip("jax_side")

# JAX arrays cannot be written, and have a second way to a kernel; lengths of a captured CUDA graph change in place.
TORCH_ALONE = {"mla_attention": {"workspace", "out"}, "prepare_metadata": {"changing"}}
JAX_ALONE = {"mla_prefill": {"route"}, "mla_attention": {"route"}}
SHARED = ("mla_prefill", "mla_attention", "prepare_metadata", "prepare_context_metadata", "write_latent_cache")


def parameters(function: Callable[..., Any], without: set[str]) -> list[tuple[str, Any, Any]]:
    """Name, kind and default of each; JAX's ``out`` is annotated as None alone, which is no difference for a caller."""
    return [(x.name, x.kind, x.default) for x in inspect.signature(function).parameters.values() if x.name not in without]


@pytest.mark.parametrize("name", SHARED)
def test_both_frontends_are_called_alike(name: str) -> None:
    of_torch, of_jax = (parameters(getattr(side, name), alone.get(name, set())) for side, alone in ((torch_side, TORCH_ALONE), (jax_side, JAX_ALONE)))
    assert of_torch == of_jax
    for side, alone in ((torch_side, TORCH_ALONE), (jax_side, JAX_ALONE)):
        assert alone.get(name, set()) <= set(inspect.signature(getattr(side, name)).parameters), "a difference that is none any more"


def test_numpy_is_called_like_both() -> None:
    assert parameters(neutral._numpy, set()) == parameters(torch_side.mla_prefill, set())


@pytest.mark.parametrize("name", ["prepare_metadata", "prepare_context_metadata"])
def test_what_a_frontend_hands_on_is_what_the_core_takes(name: str) -> None:
    """A frontend's positional arguments are the core's first ones, and its other options are the core's."""
    core = [x.name for x in inspect.signature(getattr(mla_interop, name)).parameters.values()]
    for side in (torch_side, jax_side):
        positional = [x.name for x in inspect.signature(getattr(side, name)).parameters.values() if x.kind is x.POSITIONAL_OR_KEYWORD]
        assert core[: len(positional)] == positional
