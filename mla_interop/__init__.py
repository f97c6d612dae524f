"""MLA prefill attention for PyTorch, JAX and plain arrays: one core, the fastest kernel that can serve, LSE that can be trusted."""

from mla_interop.backends.base import Kernel as Kernel
from mla_interop.backends.base import MLAPrefillBackend as MLAPrefillBackend
from mla_interop.backends.registry import MLAPrefillBackendEnum as MLAPrefillBackendEnum
from mla_interop.backends.registry import register_mla_prefill_backend as register_mla_prefill_backend
from mla_interop.backends.registry import unregister_mla_prefill_backend as unregister_mla_prefill_backend
from mla_interop.capability import DeviceCapability as DeviceCapability
from mla_interop.config import MLAPrefillConfig as MLAPrefillConfig
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
from mla_interop.selector import MLAPrefillSelectorConfig as MLAPrefillSelectorConfig
from mla_interop.selector import clear_cache as clear_cache
from mla_interop.selector import explain as explain
from mla_interop.selector import get_mla_prefill_backend as get_mla_prefill_backend
from mla_interop.selector import select as select
from mla_interop.sequences import PrefillMetadata as PrefillMetadata
from mla_interop.sequences import prepare_metadata as prepare_metadata
from mla_interop.version import __version__ as __version__
