"""The problem that a kernel is chosen for, as far as the choice depends on it; and the names of kernels, which say the same."""

import math
import numbers
import re
from dataclasses import dataclass

from mla_interop.capability import DeviceCapability, device_capability
from mla_interop.dimensions import MLADimensions
from mla_interop.errors import input_error

DTYPES = ("bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2")
ANY_SCALE = "anyscale"


def nearest_power_of_two(size: int) -> int:
    """The power of two that is nearest to a positive size on a logarithmic scale."""
    return 1 << round(math.log2(size))


@dataclass(frozen=True, kw_only=True)
class MLAPrefillSelectorConfig:
    """The problem, as far as the choice of a kernel depends on it. Hashable, and free of any framework's types.

    Attributes:
        dtype: NumPy-style name of q, k and v's dtype.
        dimensions: Head dimensions.
        num_heads: N.
        device_type: ``"cpu"`` or ``"cuda"``.
        capability: Compute capability of the (stated) target; read from device 0 if left out on CUDA.
        is_causal: Causal (bottom-right) or full attention.
        needs_lse: Whether LSE is wanted.
        traced: Whether the lengths are known on the device only, and no work list came with them.
        scale: The softmax scale, where known: some kernels are wrong for scales that are negative or nearly 0.
        num_sms: Multiprocessors of the target, for work lists; None: as on device 0.
        flash_attn_version: 2, 3 or 4: the only generation that FLASH_ATTN may use; None: ``MLA_INTEROP_FLASH_ATTN_VERSION``, else any.
        num_tokens, num_seqs: T and B, where known, for the choice by measured times. Kept as the nearest power of two (on a logarithmic scale), so
            that batches of about one size get one kernel. 0 counts as unknown.

    Raises:
        MLAInputError: A dtype, device, size or flag is not one that a problem can have.
    """

    dtype: str = "bfloat16"
    dimensions: MLADimensions
    num_heads: int
    device_type: str = "cuda"
    capability: DeviceCapability | None = None
    is_causal: bool = True
    needs_lse: bool = True
    traced: bool = False
    scale: float | None = None
    num_sms: int | None = None
    flash_attn_version: int | None = None
    num_tokens: int | None = None
    num_seqs: int | None = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise input_error("dtype", repr(self.dtype), ", ".join(DTYPES))
        if self.flash_attn_version not in (None, 2, 3, 4):
            raise input_error("flash_attn_version", repr(self.flash_attn_version), "2, 3, 4 or None")
        if self.device_type not in ("cpu", "cuda"):
            raise input_error("device_type", repr(self.device_type), "'cpu' or 'cuda'")
        self._check_values()
        for name in ("num_tokens", "num_seqs"):
            size = getattr(self, name)
            object.__setattr__(self, name, nearest_power_of_two(size) if size else None)
        capability = self.capability
        if capability is not None:
            object.__setattr__(self, "capability", DeviceCapability.parse(capability))
        elif self.device_type == "cuda":
            object.__setattr__(self, "capability", device_capability("cuda"))

    def _check_values(self) -> None:
        d = self.dimensions
        if not isinstance(d, MLADimensions):
            raise input_error("dimensions", repr(d), "MLADimensions")
        sizes = (d.qk_nope_head_dim, 1), (d.qk_rope_head_dim, 0), (d.v_head_dim, 1)
        if not all(_is_integer(size) and size >= least for size, least in sizes):
            raise input_error("dimensions", str(d), "positive integers; the rotary part may be 0")
        for name, least in (("num_heads", 0), ("num_sms", 1), ("num_tokens", 0), ("num_seqs", 0)):
            size = getattr(self, name)
            if size is None and name != "num_heads":
                continue
            if size is None or not _is_integer(size) or size < least:
                raise input_error(name, repr(size), f"an integer of at least {least}" + (", or None" if name != "num_heads" else ""))
        for name in ("is_causal", "needs_lse", "traced"):
            if not isinstance(getattr(self, name), bool):
                raise input_error(name, repr(getattr(self, name)), "True or False")
        if self.scale is not None and (not isinstance(self.scale, numbers.Real) or isinstance(self.scale, bool)):
            raise input_error("scale", repr(self.scale), "a number, or None where it is not known")

    @classmethod
    def of_kernel_name(cls, name: str) -> "MLAPrefillSelectorConfig":
        """A configuration that has the kernel of that name, as :meth:`kernel_name` makes it.

        Raises:
            MLAInputError: It is no name of a kernel.
        """
        match = re.fullmatch(rf"[A-Z0-9_]+\.\w+\.(cpu|cuda|sm_(\d+)(\d))\.(\w+)\.(\d+)x(\d+)\.(causal|full)\.(lse|nolse)(\.{ANY_SCALE})?", name)
        if match is None:
            raise input_error("kernel", repr(name), f"BACKEND.variant.arch.dtype.DxV.mask.lse, with or without .{ANY_SCALE}")
        arch, major, minor, dtype, qk_head_dim, v_head_dim, mask, lse, any_scale = match.groups()
        return cls(
            dtype=dtype,
            dimensions=MLADimensions.from_head_dims(int(qk_head_dim), int(v_head_dim)),
            num_heads=1,
            device_type="cpu" if arch == "cpu" else "cuda",
            capability=DeviceCapability(int(major), int(minor)) if major else None,
            is_causal=mask == "causal",
            needs_lse=lse == "lse",
            scale=0.0 if any_scale else None,
        )

    def kernel_name(self, backend: str, variant: str, any_scale: bool = False) -> str:
        """The one form of kernel names: ``BACKEND.variant.arch.dtype.DxV.mask.lse``.

        With ``any_scale``, ``.anyscale`` follows: a variant's other kernel, for scales that the first one is wrong for. 0 is such a scale.
        """
        arch = f"sm_{self.capability.major}{self.capability.minor}" if self.capability else self.device_type
        head_dims = f"{self.dimensions.qk_head_dim}x{self.dimensions.v_head_dim}"
        mask, lse = "causal" if self.is_causal else "full", "lse" if self.needs_lse else "nolse"
        return f"{backend}.{variant}.{arch}.{self.dtype}.{head_dims}.{mask}.{lse}{f'.{ANY_SCALE}' * any_scale}"


def _is_integer(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)
