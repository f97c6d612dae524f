"""The interface of a backend, and the kernel that it hands out."""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np

from mla_interop.capability import DeviceCapability
from mla_interop.dimensions import MLADimensions
from mla_interop.errors import MLAError, MLAInputError, MLAUnavailableError, MLAUnsupportedError
from mla_interop.installed import missing
from mla_interop.selector_config import ANY_SCALE, MLAPrefillSelectorConfig
from mla_interop.sequences import HostLengths, PrefillMetadata

KERNEL_PREFIX = "mla_interop.kernel."
"""Start of the names of kernels among TVM FFI's global functions. Names end up in exported programs."""

KernelKind = Literal["compiled", "python", "array"]


class CallShape(NamedTuple):
    """What a launch will get, as far as it is known before: a kernel may prepare for it.

    Attributes:
        num_tokens_q, num_tokens_k: Rows of q, and of k and v.
        num_seqs: B.
        max_seqlen_q, max_seqlen_k: Upper bounds of one sequence's length.
        needs_lse: Whether lse is wanted.
        device_index: Of the device; inside a traced program, of the one that stands for all.
        strides: Row and head strides of q, k and v, in elements.
    """

    num_tokens_q: int
    num_tokens_k: int
    num_seqs: int
    max_seqlen_q: int
    max_seqlen_k: int
    needs_lse: bool
    device_index: int
    strides: tuple[tuple[int, int], tuple[int, int], tuple[int, int]]


@dataclass(frozen=True, eq=False, kw_only=True)
class Kernel:
    """One kernel: what it needs, declared as data, and how to get its launch function. Making one compiles and imports nothing.

    Attributes:
        name: Unique and stable, e.g. ``FLASH_ATTN.fa4.sm_90.bfloat16.192x128.causal.lse``: the name it has inside XLA programs. It says all that the
            launch function is made from: two kernels of one name would get each other's.
        kind: ``compiled``: native code, no Python frame and no GIL when it runs. ``python``: a Python function over torch
            tensors. ``array``: plain array code in the namespace of its inputs, with a signature of its own (see REFERENCE).
        make: Loads, and where needed compiles, the launch function (docs/architecture.md has its signature).
        strided: Which of ``"q"``, ``"k"``, ``"v"`` it reads through row and head strides that are multiples of 16 bytes; of the others the
            frontend makes a contiguous copy where it has to, and ``explain`` says so.
        native_empty_rows: Whether it gives out 0 and lse -inf to rows without a key by itself, without ``finish`` bit 2.
        scratch_floats: float32 elements of scratch for (T, N, lse wanted).
        prepare: In place of ``scratch_floats``, where more decides: called when a call is prepared, and may build what the launch needs on the device.
        plan: Makes the work list from host lengths, (lengths, T, N) -> uint8 array; None if the kernel needs none.
        plan_by_mask: The list is right under the kernel's own mask only.
        cuda_graph: Whether a launch can be captured: no host reads, no allocation.
        out_dtype: Dtype of out, where it is not that of q: kernels for 8-bit inputs write 16 bits.
        copies: What the kernel copies or pads by itself in a call, in words.
        versions: What it was built from, for ``explain``.
        parts: Each builds a file that the launch function is loaded from, if the cache does not hold it, and returns its path. They load nothing and
            need no GPU: ``mla-interop warmup`` calls them. Empty where nothing can be built ahead of the first call.
    """

    name: str
    kind: KernelKind
    make: Callable[[], Callable[..., Any]]
    strided: frozenset[str] = frozenset()
    native_empty_rows: bool = True
    scratch_floats: Callable[[int, int, bool], int] = field(default=lambda tokens, heads, lse: 0)
    prepare: Callable[[CallShape], int] | None = None
    plan: Callable[[HostLengths, int, int], np.ndarray] | None = None
    plan_by_mask: bool = False
    cuda_graph: bool = False
    out_dtype: str | None = None
    copies: tuple[str, ...] = ()
    versions: tuple[str, ...] = ()
    parts: tuple[Callable[[], Path], ...] = ()

    @functools.cached_property
    def launch(self) -> Callable[..., Any]:
        """The launch function, made on first use and kept.

        Raises:
            MLAUnavailableError: It cannot be made. Whatever a package raises is a reason, so that another kernel can serve (oumi#2586).
        """
        try:
            return self.make()
        except MLAError:
            raise
        except Exception as error:
            raise MLAUnavailableError(f"kernel {self.name} cannot be loaded: {type(error).__name__}: {error}") from error

    @property
    def variant(self) -> str:
        """Which of its backend's kernels it is, e.g. ``fa4``."""
        return self.name.split(".")[1]

    @property
    def any_scale(self) -> bool:
        """Whether it is its variant's kernel for scales that the other one is wrong for."""
        return self.name.endswith(f".{ANY_SCALE}")

    @property
    def global_name(self) -> str:
        """Name of the kernel among TVM FFI's global functions, where XLA programs find it."""
        return KERNEL_PREFIX + self.name

    @functools.cached_property
    def function(self) -> Callable[..., Any]:
        """The launch function for callers that hold DLPack tensors, not torch's: native code, and the callback route."""
        if self.kind != "python":
            return self.launch
        from mla_interop.kernels.torch_call import over_dlpack

        return over_dlpack(self.launch)

    @functools.cached_property
    def _registered(self) -> str:
        from tvm_ffi import register_global_func

        register_global_func(self.global_name, self.function, override=True)
        return self.global_name

    def register(self) -> str:
        """Make the kernel callable by name from native code; returns the name. Idempotent."""
        return self._registered


class MLAPrefillBackend(ABC):
    """A family of kernels for MLA prefill. A class answers what it supports; an instance is bound to one configuration and is ready.

    Subclasses declare the class attributes and give ``unavailable_reasons`` and ``kernels``; the rest follows from those.

    Attributes:
        name: Upper-case name, equal to its registry name.
        device_types: Where it runs.
        supported_dtypes: NumPy-style names of q, k and v's dtypes.
        dtype_note: Why no others, where that is not plain.
        supported_head_dims: Allowed (D, V) pairs; empty means that ``kernels`` alone decides.
        min_capability, max_major: Range of compute capabilities, for backends that run on CUDA.
    """

    name: ClassVar[str]
    device_types: ClassVar[tuple[str, ...]] = ("cuda",)
    supported_dtypes: ClassVar[tuple[str, ...]] = ("bfloat16", "float16")
    dtype_note: ClassVar[str] = ""
    supported_head_dims: ClassVar[tuple[tuple[int, int], ...]] = ()
    min_capability: ClassVar[DeviceCapability] = DeviceCapability(8, 0)
    max_major: ClassVar[int | None] = None

    @classmethod
    def get_name(cls) -> str:
        """The backend's name in the registry."""
        return cls.name

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability | None) -> bool:
        """Whether it has kernels for a compute capability; None is a device without one (CPU)."""
        if capability is None:
            return "cpu" in cls.device_types
        return capability >= cls.min_capability and (cls.max_major is None or capability.major <= cls.max_major)

    @classmethod
    def supports_dtype(cls, dtype: str) -> bool:
        """Whether q, k and v may have this dtype."""
        return dtype in cls.supported_dtypes

    @classmethod
    def supports_mla_dimensions(cls, dimensions: MLADimensions) -> bool:
        """Whether it serves these head dimensions."""
        return not cls.supported_head_dims or (dimensions.qk_head_dim, dimensions.v_head_dim) in cls.supported_head_dims

    @classmethod
    def is_available(cls) -> bool:
        """Whether what it needs is installed on this machine."""
        return not cls.unavailable_reasons()

    @classmethod
    def validate_configuration(cls, config: MLAPrefillSelectorConfig) -> list[str]:
        """Every reason why this backend cannot serve ``config``, each with what was found and what is allowed; empty means it can."""
        reasons = []
        if config.device_type not in cls.device_types:
            return [f"device {config.device_type} (runs on: {', '.join(cls.device_types)})"]
        if config.device_type == "cuda" and config.capability is None:
            reasons.append("compute capability unknown (state it in the configuration)")
        elif not cls.supports_compute_capability(config.capability):
            reasons.append(f"compute capability {config.capability} (allowed: {cls._capability_range()})")
        if not cls.supports_dtype(config.dtype):
            note = f"; {cls.dtype_note}" if cls.dtype_note else ""
            reasons.append(f"dtype {config.dtype} (allowed: {', '.join(cls.supported_dtypes)}{note})")
        if not cls.supports_mla_dimensions(config.dimensions):
            allowed = ", ".join(f"{d}/{v}" for d, v in cls.supported_head_dims)
            reasons.append(f"head dims {config.dimensions.qk_head_dim}/{config.dimensions.v_head_dim} (allowed: {allowed})")
        reasons += missing(cls.unavailable_reasons)
        if reasons:
            return reasons
        kernels, refused = cls.kernels(config)
        return [] if kernels else refused or ["no kernel for this configuration"]

    @classmethod
    def _capability_range(cls) -> str:
        return f">= {cls.min_capability}" if cls.max_major is None else f"{cls.min_capability} to {cls.max_major}.x"

    @classmethod
    @abstractmethod
    def unavailable_reasons(cls) -> list[str]:
        """Why nothing of this backend can run on this machine, whatever the problem; never raises."""

    @classmethod
    @abstractmethod
    def kernels(cls, config: MLAPrefillSelectorConfig) -> tuple[Sequence[Kernel], list[str]]:
        """Its kernels for ``config`` in order of preference, and the reasons why others are not among them. Imports nothing heavy."""

    def __init__(self, config: MLAPrefillSelectorConfig, kernel: Kernel) -> None:
        self.config = config
        self.kernel = kernel

    def __repr__(self) -> str:
        return f"<{self.get_name()}: {self.kernel.name}, {self.kernel.kind}>"

    def prepare_metadata(self, metadata: PrefillMetadata) -> PrefillMetadata:
        """``metadata`` with this backend's work list; itself, where the kernel needs none.

        Raises:
            MLAUnsupportedError: The kernel needs a work list, which is made on the host, and only the device knows the lengths.
        """
        return self.with_plan(metadata)

    def with_plan(self, metadata: PrefillMetadata) -> PrefillMetadata:
        """``metadata`` carrying this kernel's work list (NumPy, made once per metadata); unchanged where there is none to make."""
        make, bounds = self.kernel.plan, metadata.bounds
        if make is None or bounds.plan_for == self.plan_name:
            return metadata
        host, rows = metadata.host, bounds.num_tokens_q
        if host is None or rows is None:
            there = f" The list of this metadata is for {bounds.plan_for}, this call needs one for {self.plan_name}." if bounds.plan_for else ""
            raise MLAUnsupportedError(
                f"{self.get_name()} needs a work list, which is made on the host, and these lengths are known to the device only.{there} "
                "Give cu_seqlens as NumPy arrays or lists, prepare metadata with the config= and is_causal= of this call, or choose another backend."
            )
        plan = metadata.remember((self.plan_name, rows), lambda: make(host, rows, self.config.num_heads))
        return metadata.with_arrays(metadata.cu_seqlens_q, metadata.cu_seqlens_k, plan, bounds._replace(plan_for=self.plan_name))

    @property
    def plan_name(self) -> str:
        """Names the work list: one serves every dtype of a kernel family, for one architecture and number of heads, as a rule under both masks."""
        family, variant, arch, _, head_dims, mask, *_ = self.kernel.name.split(".")
        return f"{family}.{variant}.{arch}.{head_dims}.{self.config.num_heads}{f'.{mask}' * self.kernel.plan_by_mask}"

    def run_prefill_new_tokens(self, q: Any, k: Any, v: Any, metadata: PrefillMetadata, **options: Any) -> Any:
        """Causal (bottom-right) attention of new tokens on themselves; options as in ``mla_prefill``."""
        return self._run(q, k, v, metadata, True, options)

    def run_prefill_context_chunk(self, q: Any, k: Any, v: Any, metadata: PrefillMetadata, **options: Any) -> Any:
        """Non-causal attention of the same queries on a chunk of earlier tokens; returns (out, lse), to be merged."""
        return self._run(q, k, v, metadata, False, {"return_lse": True, **options})

    def _run(self, q: Any, k: Any, v: Any, metadata: PrefillMetadata, is_causal: bool, options: dict[str, Any]) -> Any:
        from mla_interop.neutral import mla_prefill

        if options.get("backend") not in (None, self.get_name()):
            raise MLAInputError(f"backend: got {options['backend']!r}; this object is {self.get_name()} already.")
        return mla_prefill(q, k, v, metadata=metadata, is_causal=is_causal, **{**options, "backend": self.get_name()})
