"""MLA prefill attention for JAX: ``mla_prefill`` inside and outside ``jax.jit``, ``prepare_metadata`` once per batch."""

from jax_side.ffi import EXPORT_CHECKS as EXPORT_CHECKS
from jax_side.functional import mla_prefill as mla_prefill
from jax_side.functional import prepare_metadata as prepare_metadata

__all__ = ["EXPORT_CHECKS", "mla_prefill", "prepare_metadata"]
