"""Kernels of packages with a torch API, as declarations: what one serves, what it needs, and how its function is opened."""

import importlib.util
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, Any

from mla_interop.backends.base import Kernel
from mla_interop.errors import MLAUnavailableError
from mla_interop.installed import IMPORT_SECONDS, missing, within
from mla_interop.kernels import needs, torch_call
from mla_interop.kernels.build import package_version
from mla_interop.lse import LSEBase, LSELayout

if TYPE_CHECKING:
    from mla_interop.selector_config import MLAPrefillSelectorConfig


@dataclass(frozen=True, kw_only=True)
class TorchPackage:
    """One kernel family behind a package's torch API.

    Attributes:
        variant: Its word in kernel names.
        module: The module that has to be importable; found, not imported, before the kernel is used.
        distribution: Whose version is shown and checked.
        open: Imports the package, checks the signature, returns the adapter that ``torch_call.adapt`` takes.
        capabilities: Compute capabilities it runs on, as in ``"10.3"`` or, for every one of a major version, ``"10.x"``.
        head_dims: (D, V) pairs.
        max_head_dim: Where it is stated, D = V of every multiple of 8 up to it is served too.
        pads_v: Whether V is padded to D where they differ; then every V of a multiple of 8 up to D is served.
        dtypes: Of q, k and v; each with the dtype of out.
        minimum_version: Of the distribution; older ones are refused.
        also: Further modules that have to be importable, each with the distribution that brings it.
        strided: As in :class:`Kernel`.
        lse_base, lse_layout: The package's convention.
        needs: What both masks need (``mla_interop.kernels.needs``).
        needs_without_mask: What the non-causal kernel needs besides.
        workspace_bytes: Bytes of workspace for (B, N, longest query sequence); with ``zeroed_workspace``.
    """

    variant: str
    module: str
    distribution: str
    open: Callable[[], Callable[..., tuple[Any, Any]]]
    capabilities: tuple[str, ...]
    head_dims: tuple[tuple[int, int], ...] = ()
    max_head_dim: int | None = None
    pads_v: bool = False
    dtypes: Mapping[str, str] = field(default_factory=lambda: {"bfloat16": "bfloat16", "float16": "float16"})
    minimum_version: tuple[int, int] | None = None
    also: Mapping[str, str] = field(default_factory=dict)
    strided: frozenset[str] = frozenset("qkv")
    lse_base: LSEBase = "e"
    lse_layout: LSELayout = "TN"
    needs: frozenset[str] = frozenset()
    needs_without_mask: frozenset[str] = frozenset()
    workspace_bytes: Callable[[int, int, int], int] = lambda num_seqs, heads, max_q: 0

    def reasons(self, config: "MLAPrefillSelectorConfig") -> list[str]:
        """Why it cannot serve a problem here; imports nothing."""
        found, capability = [*self.missing()], config.capability
        if capability is None or not {str(capability), f"{capability.major}.x"} & {*self.capabilities}:
            found.append(f"compute capability {capability} (allowed: {', '.join(self.capabilities)})")
        if config.dtype not in self.dtypes:
            found.append(f"dtype {config.dtype} (allowed: {', '.join(self.dtypes)})")
        head_dims = config.dimensions.qk_head_dim, config.dimensions.v_head_dim
        allowed = self._other_head_dims(*head_dims)
        if allowed:
            found.append(f"head dims {head_dims[0]}/{head_dims[1]} (allowed: {allowed})")
        # Scores are masked with -inf and scaled afterwards: a scale of 0 makes NaN of that, a negative one +inf.
        if config.scale is not None and config.scale <= 0:
            found.append(f"scale {config.scale:g} (allowed: > 0)")
        return found + needs.reasons(self._needs(config.is_causal), config.traced)

    def missing(self) -> list[str]:
        """What is not installed."""
        return missing(self._missing)

    def kernel(self, backend: str, config: "MLAPrefillSelectorConfig") -> Kernel:
        """The kernel for a problem that there are no ``reasons`` against."""
        declared = self._needs(config.is_causal)
        compacts = needs.NO_EMPTY_SEQUENCES in declared
        head_dims = config.dimensions.qk_head_dim, config.dimensions.v_head_dim
        pads = self.pads_v and head_dims[0] != head_dims[1]
        padded = (f"v padded from {head_dims[1]} to {head_dims[0]}, out cut back",) if pads else ()
        return Kernel(
            name=config.kernel_name(backend, self.variant),
            kind="python",
            make=lambda: self.load(config.is_causal),
            strided=self.strided - (frozenset("v") if pads else frozenset()),
            native_empty_rows=False,
            plan=needs.active_sequences if compacts else None,
            out_dtype=self.dtypes[config.dtype],
            copies=(*padded, *(("empty sequences cut out",) if compacts else ())),
            versions=(f"{self.distribution} {package_version(self.distribution)}",),
        )

    def load(self, is_causal: bool) -> Callable[..., None]:
        """The launch function (docs/architecture.md).

        Raises:
            MLAUnavailableError: The package cannot be imported, or does not have the signature that the adapter was written for.
        """
        try:
            attention = within(IMPORT_SECONDS, f"importing {self.module}", self.open)
        except MLAUnavailableError:
            raise
        except Exception as error:  # whatever a package raises on import is a reason (oumi#2586)
            raise MLAUnavailableError(f"{self.distribution} is installed but cannot be used: {type(error).__name__}: {error}") from error
        return torch_call.adapt(
            attention,
            is_causal=is_causal,
            pad_v=self.pads_v,
            lse_base=self.lse_base,
            lse_layout=self.lse_layout,
            needs=self._needs(is_causal),
            workspace_bytes=self.workspace_bytes,
        )

    def _needs(self, is_causal: bool) -> frozenset[str]:
        return self.needs if is_causal else self.needs | self.needs_without_mask

    def _other_head_dims(self, qk_head_dim: int, v_head_dim: int) -> str:
        """What it serves in place of these head dimensions, in words; "" if it serves them."""
        pairs = ", ".join(f"{d}/{v}" for d, v in self.head_dims)
        if self.max_head_dim is None:
            return "" if (qk_head_dim, v_head_dim) in self.head_dims else pairs
        if qk_head_dim > self.max_head_dim or qk_head_dim % 8 or v_head_dim % 8 or v_head_dim > qk_head_dim:
            return f"multiples of 8 up to {self.max_head_dim}, V at most D"
        return "" if self.pads_v or qk_head_dim == v_head_dim or (qk_head_dim, v_head_dim) in self.head_dims else f"equal ones, and {pairs}"

    def _missing(self) -> list[str]:
        wanted = {self.module: self.distribution, "torch": "torch", **self.also}
        found = [f"{owner} not installed (no module {module})" for module, owner in wanted.items() if not _findable(module)]
        if found or self.minimum_version is None:
            return found
        version = package_version(self.distribution)
        numbers = re.match(r"(\d+)\.(\d+)", version)
        if numbers and (int(numbers[1]), int(numbers[2])) >= self.minimum_version:
            return []
        return [f"{self.distribution} {version} (allowed: {'.'.join(map(str, self.minimum_version))} and later)"]


def _findable(module: str) -> bool:
    """Whether a module could be imported. Unlike ``importlib.util.find_spec`` it does not import the packages around it, which may raise anything."""
    if module in sys.modules:
        return sys.modules[module] is not None
    package, _, rest = module.partition(".")
    try:
        spec = importlib.util.find_spec(package)
        for part in rest.split(".") if rest else ():
            package = f"{package}.{part}"
            spec = PathFinder.find_spec(package, spec.submodule_search_locations) if spec and spec.submodule_search_locations else None
    except (ImportError, ValueError, AttributeError):
        return False
    return spec is not None
