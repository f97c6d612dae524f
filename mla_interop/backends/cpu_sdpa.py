"""CPU_SDPA: torch's CPU flash kernel behind native code of ours, which makes it ragged, pads V, and guards its edges."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mla_interop.backends.base import Kernel, MLAPrefillBackend
from mla_interop.kernels import cpu_sdpa
from mla_interop.kernels.build import package_version

if TYPE_CHECKING:
    from mla_interop.selector_config import MLAPrefillSelectorConfig


class CPUSDPABackend(MLAPrefillBackend):
    """float32, bfloat16 and float16 on the CPU, from torch, JAX and NumPy alike."""

    name = "CPU_SDPA"
    device_types = ("cpu",)
    supported_dtypes = ("bfloat16", "float16", "float32")

    @classmethod
    def unavailable_reasons(cls) -> list[str]:
        """What is missing of torch and a compiler."""
        return cpu_sdpa.unsupported_reasons("float32", 192, 128)

    @classmethod
    def kernels(cls, config: "MLAPrefillSelectorConfig") -> tuple[Sequence[Kernel], list[str]]:
        """One kernel for each mask; dtype and dimensions are read from the tensors."""
        head_dims = config.dimensions.qk_head_dim, config.dimensions.v_head_dim
        reasons = cpu_sdpa.unsupported_reasons(config.dtype, *head_dims)
        if reasons:
            return [], reasons
        kernel = Kernel(
            name=config.kernel_name("CPU_SDPA", "torch"),
            kind="compiled",
            make=lambda: cpu_sdpa.load(config.is_causal),
            parts=(cpu_sdpa.library,),
            strided=frozenset("qkv"),
            copies=(f"v padded from {head_dims[1]} to {head_dims[0]}",) if head_dims[0] != head_dims[1] else (),
            versions=(f"torch {package_version('torch')}",),
        )
        return [kernel], []
