"""FLASH_ATTN: FlashAttention in the best form that is installed and that the architecture and dimensions allow.

In order: FlashAttention-4 compiled ahead of time with our own signature; its Python API; FlashAttention-3; FlashAttention-2;
torch's built-in FlashAttention-2.  ``flash_attn_version`` narrows the choice to one generation.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from mla_interop.backends.base import Kernel, MLAPrefillBackend
from mla_interop.kernels import fa4, flash_attn_packages
from mla_interop.kernels.build import package_version

if TYPE_CHECKING:
    from mla_interop.selector_config import MLAPrefillSelectorConfig


class FlashAttnBackend(MLAPrefillBackend):
    """FlashAttention 4, 3 or 2, natively for 192/128 where the generation can, with V padded where it cannot."""

    name = "FLASH_ATTN"

    @classmethod
    def unavailable_reasons(cls) -> list[str]:
        """None by itself: what is missing depends on the variant, so ``kernels`` says it."""
        return []

    @classmethod
    def kernels(cls, config: "MLAPrefillSelectorConfig") -> tuple[Sequence[Kernel], list[str]]:
        """Every variant that can serve ``config``, and why each other one cannot."""
        made: list[Kernel] = []
        refused: list[str] = []
        for variant, generation, kernel in _variants(config):
            if config.flash_attn_version not in (None, generation):
                refused.append(f"{variant}: flash_attn_version {config.flash_attn_version} was asked for")
            elif isinstance(kernel, Kernel):
                made.append(kernel)
            else:
                refused.append(f"{variant}: {'; '.join(kernel)}")
        return made, refused


def _variants(config: "MLAPrefillSelectorConfig") -> Iterator[tuple[str, int, Kernel | list[str]]]:
    yield "fa4", 4, _ahead_of_time(config)
    for package in flash_attn_packages.PACKAGES:
        reasons = package.reasons(config)
        yield package.variant, int(package.variant[2]), reasons or package.kernel(FlashAttnBackend.name, config)


def _ahead_of_time(config: "MLAPrefillSelectorConfig") -> Kernel | list[str]:
    dimensions, capability = config.dimensions, config.capability
    assert capability is not None  # validate_configuration refuses an unknown GPU first
    any_scale = config.scale is not None and config.scale < fa4.SMALLEST_SCALE
    problem = config.dtype, dimensions.qk_head_dim, dimensions.v_head_dim, config.is_causal, config.needs_lse, any_scale
    reasons = fa4.unsupported_reasons(capability, *problem)
    arch = fa4.arch_for(capability)
    if reasons or arch is None:
        return reasons
    variant = arch, *problem
    return Kernel(
        name=config.kernel_name("FLASH_ATTN", "fa4", any_scale),
        kind="compiled",
        make=lambda: fa4.load(*variant),
        parts=(lambda: fa4.build(*variant),),
        strided=frozenset("qkv"),
        native_empty_rows=False,  # right only while the values of the next sequence are finite
        cuda_graph=True,
        versions=(f"flash-attn-4 {package_version('flash-attn-4')}",),
    )
