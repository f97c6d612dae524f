"""TRTLLM_RAGGED: TensorRT-LLM's ragged prefill kernels, which FlashInfer downloads and calls, on compute capability 10.x."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mla_interop.backends.base import Kernel, MLAPrefillBackend
from mla_interop.capability import DeviceCapability
from mla_interop.kernels import needs
from mla_interop.kernels.blackwell_packages import TRTLLM_RAGGED
from mla_interop.sequences import PrefillMetadata

if TYPE_CHECKING:
    from mla_interop.selector_config import MLAPrefillSelectorConfig


class TRTLLMRaggedBackend(MLAPrefillBackend):
    """Needs lengths on the host, or metadata prepared with its configuration: sequences without queries or keys are left out there.

    8-bit inputs give bfloat16. Its workspace grows with the number of sequences times the longest of them
    (``trtllm_workspace_bytes``): state ``max_seqlen_q`` where a compiled program knows bounds only.
    """

    name = "TRTLLM_RAGGED"
    supported_dtypes = tuple(TRTLLM_RAGGED.dtypes)
    supported_head_dims = TRTLLM_RAGGED.head_dims
    min_capability = DeviceCapability(10, 0)
    max_major = 10

    @classmethod
    def unavailable_reasons(cls) -> list[str]:
        """What is missing of FlashInfer."""
        return TRTLLM_RAGGED.missing()

    @classmethod
    def kernels(cls, config: "MLAPrefillSelectorConfig") -> tuple[Sequence[Kernel], list[str]]:
        """The one kernel; dtype, dimensions and mask are read from the call."""
        reasons = TRTLLM_RAGGED.reasons(config)
        return ([], reasons) if reasons else ([TRTLLM_RAGGED.kernel(cls.name, config)], [])

    def prepare_metadata(self, metadata: PrefillMetadata) -> PrefillMetadata:
        """``metadata`` with the sequences that are not empty, and a workspace that holds what they need."""
        prepared, host = super().prepare_metadata(metadata), metadata.host
        if host is not None:
            needs.reserve_workspace(TRTLLM_RAGGED.workspace_bytes(metadata.bounds.num_seqs, self.config.num_heads, host.max_seqlen_q))
        return prepared
