"""``MLAPrefill``: the attention of one layer as a module, with its dimensions, scale and backend fixed at construction."""

from typing import Any

import torch

from mla_interop.backends.registry import parse_names
from mla_interop.dimensions import MLADimensions
from mla_interop.errors import input_error
from mla_interop.prefill import number_of_scale
from torch_side.functional import mla_prefill


class MLAPrefill(torch.nn.Module):
    """MLA prefill attention with fixed head dimensions. It has no parameters.

    Args:
        dimensions: Head dimensions that q, k and v must have.
        scale: Softmax scale; None: ``dimensions.qk_head_dim ** -0.5``. With YaRN, pass ``mla_interop.softmax_scale(config)``.
        is_causal: Bottom-right causal mask, or none.
        backend: As in :func:`torch_side.mla_prefill`; an unknown name is refused here.

    Raises:
        MLAInputError: ``dimensions`` is something else, the scale is no number, or the backend's name is unknown.
    """

    def __init__(self, dimensions: MLADimensions, *, scale: float | None = None, is_causal: bool = True, backend: Any = None) -> None:
        super().__init__()
        if not isinstance(dimensions, MLADimensions):
            raise input_error("dimensions", type(dimensions).__name__, "MLADimensions")
        self.dimensions = dimensions
        self.scale = dimensions.qk_head_dim**-0.5 if scale is None else number_of_scale(scale)
        self.is_causal = is_causal
        self.backend = None if backend is None else parse_names("backend", backend)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
        """Attention of q over k and v; ``options`` are those of :func:`torch_side.mla_prefill` (metadata, return_lse, ...).

        Raises:
            MLAInputError: Also if the last dimensions are not the module's.
        """
        if q.shape[-1] != self.dimensions.qk_head_dim or v.shape[-1] != self.dimensions.v_head_dim:
            raise input_error("q, v", f"last dims {q.shape[-1]}, {v.shape[-1]}", f"this module's {self.dimensions.qk_head_dim}, {self.dimensions.v_head_dim}")
        settings = {"scale": self.scale, "is_causal": self.is_causal, "backend": self.backend}
        return mla_prefill(q, k, v, **{**settings, **options})

    def extra_repr(self) -> str:
        """Shown by ``print(module)``."""
        return f"{self.dimensions}, scale={self.scale:.6g}, is_causal={self.is_causal}, backend={self.backend}"
