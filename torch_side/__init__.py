"""MLA prefill attention for PyTorch: ``mla_prefill`` on tensors, ``MLAPrefill`` as a module; ``MLAAttention``, a whole layer from latents."""

from torch_side.attention import MLAAttention as MLAAttention
from torch_side.attention import mla_attention as mla_attention
from torch_side.attention import prepare_context_metadata as prepare_context_metadata
from torch_side.attention import write_latent_cache as write_latent_cache
from torch_side.functional import mla_prefill as mla_prefill
from torch_side.metadata import prepare_metadata as prepare_metadata
from torch_side.metadata import update_metadata as update_metadata
from torch_side.module import MLAPrefill as MLAPrefill
from torch_side.parallel import context_parallel_mla_prefill as context_parallel_mla_prefill
from torch_side.parallel import prepare_context_parallel_metadata as prepare_context_parallel_metadata
from torch_side.transformers import register_transformers as register_transformers

__all__ = [
    "MLAAttention",
    "MLAPrefill",
    "context_parallel_mla_prefill",
    "mla_attention",
    "mla_prefill",
    "prepare_context_metadata",
    "prepare_context_parallel_metadata",
    "prepare_metadata",
    "register_transformers",
    "update_metadata",
    "write_latent_cache",
]
