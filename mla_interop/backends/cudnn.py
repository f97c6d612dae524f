"""CUDNN: cuDNN's fused attention through its graph interface, compiled into the kernel ABI."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mla_interop.backends.base import Kernel, MLAPrefillBackend
from mla_interop.capability import DeviceCapability, stated_target
from mla_interop.kernels import cudnn_graph

if TYPE_CHECKING:
    from mla_interop.selector_config import MLAPrefillSelectorConfig


class CudnnBackend(MLAPrefillBackend):
    """Takes lengths from the host or the device alike: it needs no work list."""

    name = "CUDNN"
    min_capability = DeviceCapability(8, 0)
    max_major = 10

    @classmethod
    def unavailable_reasons(cls) -> list[str]:
        """None by itself: which cuDNN is needed depends on the device, so ``kernels`` says it."""
        return []

    @classmethod
    def kernels(cls, config: "MLAPrefillSelectorConfig") -> tuple[Sequence[Kernel], list[str]]:
        """One kernel for each mask; its plans are made for the calls that come."""
        capability, dimensions = config.capability, config.dimensions
        assert capability is not None  # validate_configuration refuses an unknown GPU first
        head_dims = dimensions.qk_head_dim, dimensions.v_head_dim
        reasons = cudnn_graph.unsupported_reasons(capability, config.dtype, *head_dims)
        if config.scale is not None and config.scale <= 0:
            reasons.append(f"scale {config.scale:g} (allowed: > 0)")
        if stated_target() is not None:
            reasons.append("a target that is only stated (allowed: the device itself, where its plan is made when a call is prepared or traced)")
        if reasons:
            return [], [f"graph: {reason}" for reason in reasons]
        kernel = Kernel(
            name=config.kernel_name("CUDNN", "graph"),
            kind="compiled",
            make=lambda: cudnn_graph.load(config.is_causal, capability),
            parts=cudnn_graph.parts(capability),
            strided=frozenset("qkv"),
            native_empty_rows=False,  # NaN before cuDNN 9.25 (cudnn-frontend#943); here such rows are kept from it
            prepare=lambda shape: cudnn_graph.prepare(shape, config.dtype, config.num_heads, head_dims, config.is_causal, capability),
            cuda_graph=True,
            versions=cudnn_graph.versions(),
        )
        return [kernel], []
