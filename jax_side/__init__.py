"""MLA prefill attention for JAX: ``mla_prefill`` inside and outside ``jax.jit``; ``mla_attention``, a whole layer from latents."""

from jax_side.attention import mla_attention as mla_attention
from jax_side.attention import prepare_context_metadata as prepare_context_metadata
from jax_side.attention import write_latent_cache as write_latent_cache
from jax_side.ffi import EXPORT_CHECKS as EXPORT_CHECKS
from jax_side.functional import mla_prefill as mla_prefill
from jax_side.functional import prepare_metadata as prepare_metadata
from jax_side.parallel import context_parallel_mla_prefill as context_parallel_mla_prefill
from jax_side.parallel import sharded_mla_prefill as sharded_mla_prefill
from jax_side.target import target as target

__all__ = [
    "EXPORT_CHECKS",
    "context_parallel_mla_prefill",
    "mla_attention",
    "mla_prefill",
    "prepare_context_metadata",
    "prepare_metadata",
    "sharded_mla_prefill",
    "target",
    "write_latent_cache",
]
