"""FLASHINFER: FlashInfer's ragged prefill kernels, FA3 on Hopper, CUTLASS and cuDNN on Blackwell, and FA2 everywhere.

FA3 and FA2 run compiled, with our own work lists; the others by FlashInfer's Python functions.
"""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from mla_interop.backends.base import Kernel, MLAPrefillBackend
from mla_interop.capability import device_properties
from mla_interop.kernels import blackwell_packages, flashinfer_module
from mla_interop.kernels.build import package_version
from mla_interop.sequences import HostLengths

if TYPE_CHECKING:
    from mla_interop.selector_config import MLAPrefillSelectorConfig


class FlashInferBackend(MLAPrefillBackend):
    """FA3 and FA2 need lengths on the host, or metadata prepared with its configuration: they follow a work list."""

    name = "FLASHINFER"

    @classmethod
    def unavailable_reasons(cls) -> list[str]:
        """None by itself: what is missing depends on the kernel, so ``kernels`` says it."""
        return []

    @classmethod
    def kernels(cls, config: "MLAPrefillSelectorConfig") -> tuple[Sequence[Kernel], list[str]]:
        """FA3 on compute capability 9.0 and FA2 after it, FA2 elsewhere; before it, on 10.x, the kernels that were made for that."""
        assert config.capability is not None  # validate_configuration refuses an unknown GPU first
        made: list[Kernel] = []
        refused: list[str] = []
        for package in blackwell_packages.FLASHINFER if config.capability.major == 10 else ():
            reasons = package.reasons(config)
            if reasons:
                refused += [f"{package.variant}: {reason}" for reason in reasons]
            else:
                made.append(package.kernel(cls.name, config))
        for generation in (3, 2) if config.capability == (9, 0) else (2,):
            reasons = cls._reasons(config, generation)
            if reasons:
                refused += [f"fa{generation}: {reason}" for reason in reasons]
            else:
                made.append(_kernel(config, generation))
        return made, refused

    @classmethod
    def _reasons(cls, config: "MLAPrefillSelectorConfig", generation: int) -> list[str]:
        assert config.capability is not None  # validate_configuration refuses an unknown GPU first
        dimensions = config.dimensions
        reasons = flashinfer_module.unsupported_reasons(config.capability, config.dtype, dimensions.qk_head_dim, dimensions.v_head_dim, generation)
        if config.traced:
            reasons.append(
                "lengths known to the device only (allowed: host lengths, or metadata prepared with config=, since the work list is made on the host)"
            )
        least = flashinfer_module.MIN_SCALE[generation]
        if config.scale is not None and config.scale < least:
            why = "its masked scores are finite, flashinfer#4451" if generation == 2 else "it multiplies masked scores, which are -inf"
            reasons.append(f"scale {config.scale:g} (allowed: >= {least:g}; {why})")
        if config.scale is not None and config.scale > flashinfer_module.MAX_SCALE:
            reasons.append(f"scale {config.scale:g} (allowed: <= {flashinfer_module.MAX_SCALE:g}; it would leave what rounding a maximum leaves)")
        return reasons


def _kernel(config: "MLAPrefillSelectorConfig", generation: int) -> Kernel:
    dimensions, capability = config.dimensions, config.capability
    assert capability is not None

    def plan(host: HostLengths, rows: int, heads: int) -> np.ndarray:
        num_sms = config.num_sms or device_properties(0).num_sms
        return flashinfer_module.plan(generation, host.cu_seqlens_q, host.cu_seqlens_k, rows, heads, config.is_causal, num_sms)

    problem = generation, config.dtype, dimensions.qk_head_dim, dimensions.v_head_dim
    return Kernel(
        name=config.kernel_name("FLASHINFER", f"fa{generation}"),
        kind="compiled",
        make=lambda: flashinfer_module.load(*problem, config.is_causal, capability),
        parts=flashinfer_module.parts(*problem, capability),
        strided=frozenset("qkv"),
        native_empty_rows=False,  # fa2: a finite LSE (flashinfer#4452); fa3: its work list leaves out tiles without keys
        scratch_floats=partial(flashinfer_module.scratch_floats, generation),
        plan=plan,
        plan_by_mask=generation == 3,
        cuda_graph=True,
        versions=(f"flashinfer {package_version('flashinfer-python')}",),
    )
