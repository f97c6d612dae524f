"""MLA prefill attention for PyTorch: ``mla_prefill`` on tensors, ``MLAPrefill`` as a module, ``prepare_metadata`` once per batch."""

from torch_side.functional import mla_prefill as mla_prefill
from torch_side.functional import prepare_metadata as prepare_metadata
from torch_side.module import MLAPrefill as MLAPrefill

__all__ = ["MLAPrefill", "mla_prefill", "prepare_metadata"]
