"""The sizes that define an MLA prefill, the public models that have them, and the softmax scale they use."""

import json
import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from mla_interop.errors import MLAInputError, input_error


@dataclass(frozen=True, kw_only=True, order=True)
class MLADimensions:
    """Head dimensions of multi-head latent attention, in elements.

    Attributes:
        qk_nope_head_dim: P, the part of q and k without rotary embedding.
        qk_rope_head_dim: R, the rotary part; 0 for models without one.
        v_head_dim: V.
    """

    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    @property
    def qk_head_dim(self) -> int:
        """D = P + R, the last dimension of q and k."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @classmethod
    def from_head_dims(cls, qk_head_dim: int, v_head_dim: int) -> "MLADimensions":
        """Dimensions for kernels, which see D and V only: P is taken as min(D, V), R as the rest."""
        nope = min(qk_head_dim, v_head_dim)
        return cls(qk_nope_head_dim=nope, qk_rope_head_dim=qk_head_dim - nope, v_head_dim=v_head_dim)

    def __str__(self) -> str:
        return f"(nope {self.qk_nope_head_dim}, rope {self.qk_rope_head_dim}, v {self.v_head_dim})"


@dataclass(frozen=True, kw_only=True)
class Model:
    """A public model's MLA geometry: its dimensions and its query heads (before any tensor parallelism)."""

    dimensions: MLADimensions
    num_heads: int


def _model(nope: int, rope: int, v: int, heads: int) -> Model:
    return Model(dimensions=MLADimensions(qk_nope_head_dim=nope, qk_rope_head_dim=rope, v_head_dim=v), num_heads=heads)


# Read from the models' public configuration classes.
MODELS: Mapping[str, Model] = {
    "deepseek-v2": _model(128, 64, 128, 128),
    "deepseek-v2-lite": _model(128, 64, 128, 16),
    "deepseek-v3": _model(128, 64, 128, 128),
    "deepseek-r1": _model(128, 64, 128, 128),
    "kimi-k2": _model(128, 64, 128, 64),
    "moonlight-16b": _model(128, 64, 128, 16),
    "glm-4.7-flash": _model(192, 64, 256, 20),
    "glm-5": _model(192, 64, 256, 64),
    "glm5-next": _model(256, 0, 256, 64),
    "minicpm3-4b": _model(64, 32, 64, 40),
    "mistral-small-4": _model(64, 64, 128, 32),
    "longcat-flash": _model(128, 64, 128, 64),
}
"""Public models by name: ``.dimensions`` (:class:`MLADimensions`) and ``.num_heads``, query heads before any tensor parallelism."""

DEEPSEEK_R1 = MODELS["deepseek-r1"].dimensions

DIMENSIONS = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
TEXT_MODELS = ("text_config", "language_config")
"""Where models for more than text keep the configuration of their text model."""
_READ = (*DIMENSIONS, *TEXT_MODELS, "rope_scaling", "rope_parameters")


def read_config(config: object) -> Mapping[str, object]:
    """The fields of a Hugging Face style configuration as a mapping; a nested configuration of the text model wins, if it is one of MLA.

    Args:
        config: A mapping, an object with attributes (``transformers`` configs have ``to_dict``), or a path to a ``config.json``.

    Raises:
        MLAInputError: It is none of these, or cannot be read.
    """
    found = _fields(config)
    for name in TEXT_MODELS:
        nested = found.get(name)
        if nested is not config and (isinstance(nested, Mapping) or hasattr(nested, "__dict__")):
            inner = read_config(nested)
            if all(inner.get(field) is not None for field in DIMENSIONS):
                return inner
    if found.get("v_head_dim") is None and found.get("kv_lora_rank"):
        width, heads = found.get("hidden_size"), found.get("num_attention_heads")
        if isinstance(width, int) and isinstance(heads, int) and heads > 0:  # MiniCPM3's config.json leaves it to the model's code
            return {**found, "v_head_dim": width // heads}
    return found


def _fields(config: object) -> Mapping[str, object]:
    if isinstance(config, (str, PathLike)):
        try:
            config = json.loads(Path(config).read_text())
        except (OSError, ValueError) as error:
            raise MLAInputError(f"config: cannot read {str(config)!r} as JSON: {error}") from error
    elif not isinstance(config, Mapping):
        config = _attributes(config)
    if not isinstance(config, Mapping):
        raise input_error("config", type(config).__name__, "a mapping, a config object, or a path to a config.json")
    return config


def _attributes(config: Any) -> object:
    """An object's fields: of ``to_dict``, or its own; and those that only its class, its slots or a property has."""
    try:
        made = config.to_dict() if hasattr(config, "to_dict") else getattr(config, "__dict__", None)
        more = {name: getattr(config, name) for name in _READ if hasattr(config, name)}
    except Exception as error:  # configurations come with a model's own code
        raise MLAInputError(f"config: cannot read a {type(config).__name__}: {type(error).__name__}: {error}") from error
    return {**more, **made} if isinstance(made, Mapping) else more or config


def dimensions_from_config(config: object) -> MLADimensions:
    """MLA dimensions of a Hugging Face style configuration.

    Raises:
        MLAInputError: A field is missing: the model has no MLA layers, or names them differently.
    """
    fields = read_config(config)
    values = {}
    for name in DIMENSIONS:
        value, least = fields.get(name), 0 if name == "qk_rope_head_dim" else 1  # DeepSeek-VL2-Tiny, which has no MLA, says 0 for all
        if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < least:
            allowed = f"an integer of at least {least}"
            raise input_error(f"config.{name}", repr(value), allowed, "An MLA model's config has all of qk_nope_head_dim, qk_rope_head_dim, v_head_dim.")
        values[name] = int(value)
    return MLADimensions(**values)


def is_deepseek_r1_mla_compatible(config: object) -> bool:
    """Whether a model has DeepSeek-R1's head dimensions (128, 64, 128), for which every kernel family was built.

    Args:
        config: As in :func:`softmax_scale`. One that has no MLA dimensions, or cannot be read, is not compatible: nothing is raised.
    """
    try:
        return dimensions_from_config(config) == DEEPSEEK_R1
    except MLAInputError:
        return False


def yarn_mscale(factor: float, mscale: float) -> float:
    """YaRN's magnitude factor: 0.1 * mscale * ln(factor) + 1, and 1 for factor <= 1 (arXiv:2309.00071, section 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def softmax_scale(config: object) -> float:
    """The scale a model multiplies its raw scores with: D ** -0.5, times yarn_mscale(factor, mscale_all_dim) squared.

    The factor is ``mscale_all_dim``'s, not ``mscale``'s (NVIDIA/Megatron-LM#1429), and is absent without YaRN.
    ``mla_prefill`` never applies it by itself: pass the result as ``scale``. The magnitude factor is that of arXiv:2309.00071, section 3.4.

    Args:
        config: A ``transformers`` config, a mapping of a ``config.json``'s fields, or a path to one.

    Raises:
        MLAInputError: It cannot be read, or has no MLA dimensions.
    """
    fields = read_config(config)
    scale = dimensions_from_config(config).qk_head_dim ** -0.5
    rope = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    if not isinstance(rope, Mapping):
        return scale
    all_dim, factor = rope.get("mscale_all_dim"), rope.get("factor")
    plain = rope.get("rope_type", rope.get("type", "")) == "default"  # says that no scaling is on, whatever fields were left behind
    if plain or not all_dim or not factor:
        return scale
    if not all(isinstance(value, numbers.Real) for value in (all_dim, factor)):
        raise input_error("config.rope_scaling", f"factor {factor!r}, mscale_all_dim {all_dim!r}", "numbers")
    mscale = yarn_mscale(float(factor), float(all_dim))
    return scale * mscale * mscale
