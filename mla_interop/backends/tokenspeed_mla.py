"""TOKENSPEED_MLA: the prefill kernel of tokenspeed-mla for 8-bit q, k and v, on compute capability 10.0 and 10.3."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mla_interop.backends.base import Kernel, MLAPrefillBackend
from mla_interop.capability import DeviceCapability
from mla_interop.kernels.blackwell_packages import TOKENSPEED_MLA

if TYPE_CHECKING:
    from mla_interop.selector_config import MLAPrefillSelectorConfig


class TokenSpeedMLABackend(MLAPrefillBackend):
    """float8_e4m3fn in, bfloat16 out.

    The factors by which q and k were divided when they were made 8-bit belong into ``scale``, and that of v is the caller's to apply to out:
    the kernel takes no others.
    """

    name = "TOKENSPEED_MLA"
    supported_dtypes = tuple(TOKENSPEED_MLA.dtypes)
    dtype_note = "upstream checks its kernel for no other at D = 192, and does not refuse one"
    supported_head_dims = TOKENSPEED_MLA.head_dims
    min_capability = DeviceCapability(10, 0)
    max_major = 10

    @classmethod
    def unavailable_reasons(cls) -> list[str]:
        """Whether the package is missing."""
        return TOKENSPEED_MLA.missing()

    @classmethod
    def kernels(cls, config: "MLAPrefillSelectorConfig") -> tuple[Sequence[Kernel], list[str]]:
        """The one kernel, compiled by the package on first use."""
        reasons = TOKENSPEED_MLA.reasons(config)
        return ([], reasons) if reasons else ([TOKENSPEED_MLA.kernel(cls.name, config)], [])
