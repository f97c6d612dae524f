"""MLA prefill attention for PyTorch, JAX and plain arrays: one core, the fastest kernel that can serve, LSE that can be trusted.

Public names are loaded when first used: importing the package imports nothing else, NumPy neither.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mla_interop.backends.base import Kernel as Kernel
    from mla_interop.backends.base import MLAPrefillBackend as MLAPrefillBackend
    from mla_interop.backends.registry import MLAPrefillBackendEnum as MLAPrefillBackendEnum
    from mla_interop.backends.registry import register_mla_prefill_backend as register_mla_prefill_backend
    from mla_interop.backends.registry import unregister_mla_prefill_backend as unregister_mla_prefill_backend
    from mla_interop.capability import DeviceCapability as DeviceCapability
    from mla_interop.chunks import ContextShard as ContextShard
    from mla_interop.chunks import context_bucket as context_bucket
    from mla_interop.config import MLAPrefillConfig as MLAPrefillConfig
    from mla_interop.config import current_config as current_config
    from mla_interop.config import set_config as set_config
    from mla_interop.config import use_config as use_config
    from mla_interop.context import ContextMetadata as ContextMetadata
    from mla_interop.context import prepare_context_metadata as prepare_context_metadata
    from mla_interop.dimensions import MODELS as MODELS
    from mla_interop.dimensions import MLADimensions as MLADimensions
    from mla_interop.dimensions import is_deepseek_r1_mla_compatible as is_deepseek_r1_mla_compatible
    from mla_interop.dimensions import softmax_scale as softmax_scale
    from mla_interop.errors import MLABuildError as MLABuildError
    from mla_interop.errors import MLAError as MLAError
    from mla_interop.errors import MLAInputError as MLAInputError
    from mla_interop.errors import MLAUnavailableError as MLAUnavailableError
    from mla_interop.errors import MLAUnsupportedError as MLAUnsupportedError
    from mla_interop.lse import merge as merge
    from mla_interop.neutral import mla_prefill as mla_prefill
    from mla_interop.numeric_check import self_check as self_check
    from mla_interop.selector import clear_cache as clear_cache
    from mla_interop.selector import explain as explain
    from mla_interop.selector import get_mla_prefill_backend as get_mla_prefill_backend
    from mla_interop.selector import select as select
    from mla_interop.selector_config import MLAPrefillSelectorConfig as MLAPrefillSelectorConfig
    from mla_interop.sequences import PrefillMetadata as PrefillMetadata
    from mla_interop.sequences import prepare_metadata as prepare_metadata
    from mla_interop.version import __version__ as __version__
    from mla_interop.workspace import workspace_bytes as workspace_bytes

_HOMES = {
    "Kernel": "backends.base",
    "MLAPrefillBackend": "backends.base",
    "MLAPrefillBackendEnum": "backends.registry",
    "register_mla_prefill_backend": "backends.registry",
    "unregister_mla_prefill_backend": "backends.registry",
    "DeviceCapability": "capability",
    "ContextShard": "chunks",
    "context_bucket": "chunks",
    "MLAPrefillConfig": "config",
    "current_config": "config",
    "set_config": "config",
    "use_config": "config",
    "ContextMetadata": "context",
    "prepare_context_metadata": "context",
    "MODELS": "dimensions",
    "MLADimensions": "dimensions",
    "is_deepseek_r1_mla_compatible": "dimensions",
    "softmax_scale": "dimensions",
    "MLABuildError": "errors",
    "MLAError": "errors",
    "MLAInputError": "errors",
    "MLAUnavailableError": "errors",
    "MLAUnsupportedError": "errors",
    "merge": "lse",
    "mla_prefill": "neutral",
    "MLAPrefillSelectorConfig": "selector_config",
    "clear_cache": "selector",
    "explain": "selector",
    "get_mla_prefill_backend": "selector",
    "select": "selector",
    "self_check": "numeric_check",
    "PrefillMetadata": "sequences",
    "prepare_metadata": "sequences",
    "__version__": "version",
    "workspace_bytes": "workspace",
}

__all__ = [*_HOMES]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
