"""Kernels of packages with a torch API, as declarations: what one serves, what it needs, and how its function is opened."""

import importlib.util
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mla_interop.backends.base import Kernel
from mla_interop.capability import DeviceCapability
from mla_interop.errors import MLAUnavailableError
from mla_interop.installed import IMPORT_SECONDS, missing, within
from mla_interop.kernels import needs, torch_call
from mla_interop.kernels.build import package_version
from mla_interop.lse import LSEBase, LSELayout

if TYPE_CHECKING:
    from mla_interop.selector import MLAPrefillSelectorConfig


@dataclass(frozen=True, kw_only=True)
class TorchPackage:
    """One kernel family behind a package's torch API.

    Attributes:
        variant: Its word in kernel names.
        module: The module that has to be importable; found, not imported, before the kernel is used.
        distribution: Whose version is shown and checked.
        open: Imports the package, checks the signature, returns the adapter that ``torch_call.adapt`` takes.
        capabilities: Compute capabilities it runs on.
        head_dims: (D, V) pairs.
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
    capabilities: tuple[tuple[int, int], ...]
    head_dims: tuple[tuple[int, int], ...]
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
        found = [*self.missing()]
        if config.capability not in self.capabilities:
            allowed = ", ".join(str(DeviceCapability(*each)) for each in self.capabilities)
            found.append(f"compute capability {config.capability} (allowed: {allowed})")
        if config.dtype not in self.dtypes:
            found.append(f"dtype {config.dtype} (allowed: {', '.join(self.dtypes)})")
        pair = config.dimensions.qk_head_dim, config.dimensions.v_head_dim
        if pair not in self.head_dims:
            found.append(f"head dims {pair[0]}/{pair[1]} (allowed: {', '.join(f'{d}/{v}' for d, v in self.head_dims)})")
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
        return Kernel(
            name=config.kernel_name(backend, self.variant),
            kind="python",
            make=lambda: self.load(config.is_causal),
            strided=self.strided,
            native_empty_rows=False,
            plan=needs.active_sequences if compacts else None,
            out_dtype=self.dtypes[config.dtype],
            copies=("empty sequences cut out",) if compacts else (),
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
            pad_v=False,
            lse_base=self.lse_base,
            lse_layout=self.lse_layout,
            needs=self._needs(is_causal),
            workspace_bytes=self.workspace_bytes,
        )

    def _needs(self, is_causal: bool) -> frozenset[str]:
        return self.needs if is_causal else self.needs | self.needs_without_mask

    def _missing(self) -> list[str]:
        wanted = {self.module.partition(".")[0]: self.distribution, **self.also}
        found = [f"{owner} not installed (no module {module})" for module, owner in wanted.items() if importlib.util.find_spec(module) is None]
        if found or self.minimum_version is None:
            return found
        version = package_version(self.distribution)
        numbers = re.match(r"(\d+)\.(\d+)", version)
        if numbers and (int(numbers[1]), int(numbers[2])) >= self.minimum_version:
            return []
        return [f"{self.distribution} {version} (allowed: {'.'.join(map(str, self.minimum_version))} and later)"]
