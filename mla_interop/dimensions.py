"""The sizes that define an MLA prefill, the public models that have them, and the softmax scale they use."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

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


def read_config(config: object) -> Mapping[str, object]:
    """The fields of a Hugging Face style configuration as a mapping; a nested ``text_config`` wins.

    Args:
        config: A mapping, an object with attributes (``transformers`` configs have ``to_dict``), or a path to a ``config.json``.

    Raises:
        MLAInputError: It is none of these, or the file cannot be read.
    """
    if isinstance(config, (str, PathLike)):
        try:
            config = json.loads(Path(config).read_text())
        except (OSError, ValueError) as error:
            raise MLAInputError(f"config: cannot read {str(config)!r} as JSON: {error}") from error
    elif hasattr(config, "to_dict"):
        config = config.to_dict()  # pyright: ignore[reportAttributeAccessIssue]
    elif not isinstance(config, Mapping) and hasattr(config, "__dict__"):
        config = vars(config)
    if not isinstance(config, Mapping):
        raise input_error("config", type(config).__name__, "a mapping, a config object, or a path to a config.json")
    nested = config.get("text_config")
    if nested is not None and not isinstance(nested, Mapping):
        nested = read_config(nested)
    return nested if isinstance(nested, Mapping) and "v_head_dim" in nested else config


def dimensions_from_config(config: object) -> MLADimensions:
    """MLA dimensions of a Hugging Face style configuration.

    Raises:
        MLAInputError: A field is missing: the model has no MLA layers, or names them differently.
    """
    fields = read_config(config)
    values = {}
    for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
        value = fields.get(name)
        if not isinstance(value, int):
            raise input_error(f"config.{name}", repr(value), "an integer", "An MLA model's config has all of qk_nope_head_dim, qk_rope_head_dim, v_head_dim.")
        values[name] = value
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
    mscale = yarn_mscale(float(factor), float(all_dim))
    return scale * mscale * mscale
