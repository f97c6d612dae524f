"""q, k and v as one attention layer of a model gives them to its attention, on real text.

Nothing is re-implemented: the layer is the ``transformers`` library's own, and a function registered with that library's
attention interface takes down what the layer hands over after its projections, norms and rotary embedding.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.models.deepseek_v2 import modeling_deepseek_v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3

from mla_interop.dimensions import MLADimensions, read_config
from mla_interop.errors import input_error

VOCABULARY = 256
# What an attention layer is made of; everything else in a model's config (experts, vocabulary) plays no part here.
FIELDS = ("hidden_size", "num_attention_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
OPTIONAL_FIELDS = ("rms_norm_eps", "max_position_embeddings", "attention_bias", "rope_theta", "rope_scaling", "rope_parameters")


@dataclass(frozen=True)
class Text:
    """One sequence: a file's name and its first bytes, which are its token ids."""

    name: str
    ids: np.ndarray


@dataclass(frozen=True)
class LayerInputs:
    """What the layer gave to its attention, over all sequences packed end to end.

    Attributes:
        q, k, v: ``[T, N, D]``, ``[T, N, D]``, ``[T, N, V]``: the layer's own memory, with its strides.
        scale: The layer's softmax scale, YaRN's factor included.
        cu_seqlens: int32 ``[B + 1]``, on the host.
        eager: The library's own eager attention on these inputs, one sequence after the other; ``[T, N, V]``.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    cu_seqlens: np.ndarray
    eager: Callable[[], Tensor]

    @property
    def dimensions(self) -> MLADimensions:
        """Head dimensions, as a kernel sees them."""
        return MLADimensions.from_head_dims(self.q.shape[-1], self.v.shape[-1])


def default_files() -> list[Path]:
    """The project's README and some of its docs in a checkout; in an installed package, which has neither, its own source files."""
    package = Path(__file__).parents[1]
    root = package.parent
    docs = [root / name for name in ("README.md", "CHANGELOG.md", "docs/adding_a_backend.md", "docs/architecture.md", "docs/backends.md")]
    return docs if (root / "pyproject.toml").exists() and docs[0].exists() else sorted(package.glob("*.py"))[:4]


def read_texts(files: Sequence[Path], max_tokens: int) -> list[Text]:
    """Files as token ids: their UTF-8 bytes, 256 of them, since a real tokenizer would have to be downloaded.

    Raises:
        MLAInputError: A file cannot be read, or there is not one byte in all of them.
    """
    texts = []
    for path in files:
        try:
            with open(path, "rb") as file:
                data = file.read(max_tokens)
        except OSError as error:
            raise input_error("TEXT_FILES", f"{str(path)!r} ({error.strerror})", "files that can be read") from error
        texts.append(Text(path.name, np.frombuffer(data, np.uint8).astype(np.int64)))
    if not any(len(text.ids) for text in texts):
        raise input_error("TEXT_FILES", "no text at all", "at least one file that is not empty")
    return texts


def known_models() -> dict[str, dict[str, Any]]:
    """The attention fields of public models' configurations, by name, each with its source."""
    return json.loads((resources.files("mla_interop") / "data" / "models.json").read_text())


def read_model(model: str, config: Path | None) -> tuple[str, Mapping[str, Any]]:
    """A name and the attention fields of a known model, or of any MLA model's ``config.json``.

    Raises:
        MLAInputError: The model is not known, or the file is not that of an MLA model.
    """
    models = known_models()
    if config is None and model not in models:
        raise input_error("--model", repr(model), ", ".join(models), "For any other model, give its config.json with --config.")
    fields: dict[str, Any] = dict(read_config(models[model] if config is None else config))
    missing = [name for name in FIELDS if name not in fields]
    if missing:
        raise input_error("--config", f"no {', '.join(missing)} in {config}", "the config.json of a model with multi-head latent attention")
    return (model if config is None else str(fields.get("_name_or_path") or fields.get("model_type") or config)), fields


def build_layer(fields: Mapping[str, Any], dtype: torch.dtype, device: str, seed: int) -> tuple[Any, nn.Module, ModuleType]:
    """One attention layer of ``transformers``, its rotary embedding, and the module they come from.

    DeepSeek-V2's classes for DeepSeek-V2, and DeepSeek-V3's for all others, which follow it. The weights are random, of a
    size that keeps q, k and v near unit variance. The output projection is left out: it comes after the attention.
    """
    family, module = ("DeepseekV2", modeling_deepseek_v2) if fields.get("model_type") == "deepseek_v2" else ("DeepseekV3", modeling_deepseek_v3)
    chosen = {name: fields[name] for name in (*FIELDS, *OPTIONAL_FIELDS) if name in fields}
    config = getattr(module, f"{family}Config")(**chosen, num_key_value_heads=fields["num_attention_heads"])
    with torch.device("meta"):
        layer = getattr(module, f"{family}Attention")(config, layer_idx=0)
    layer.o_proj = nn.Identity()
    layer = layer.to(dtype).to_empty(device=device)
    generator = torch.Generator(device).manual_seed(seed)
    for name, weight in layer.named_parameters():
        if weight.ndim == 2:
            nn.init.normal_(weight, std=weight.shape[1] ** -0.5, generator=generator)
        else:
            nn.init.constant_(weight, 0.0 if name.endswith("bias") else 1.0)
    rotary = getattr(module, f"{family}RotaryEmbedding")(config)
    return layer.eval().requires_grad_(False), rotary.to(device), module


def take_layer_inputs(fields: Mapping[str, Any], texts: Sequence[Text], dtype: torch.dtype, device: str, seed: int) -> LayerInputs:
    """Run the texts, packed end to end, through one layer and take down what it gives to its attention."""
    layer, rotary, module = build_layer(fields, dtype, device, seed)
    lengths = [len(text.ids) for text in texts]
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    taken: dict[str, Any] = {}

    def take(_: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float, **__: Any) -> tuple[Tensor, None]:
        taken.update(query=query, key=key, value=value, scale=scaling)
        return _eager(module, layer, query, key, value, scaling, cu_seqlens), None

    AttentionInterface.register("mla_interop_demo", take)
    layer.config._attn_implementation = "mla_interop_demo"
    embedding = torch.randn(VOCABULARY, fields["hidden_size"], generator=torch.Generator(device).manual_seed(seed + 1), device=device)
    ids = torch.from_numpy(np.concatenate([text.ids for text in texts])).to(device)
    hidden = embedding.to(dtype)[ids][None]
    positions = torch.cat([torch.arange(length) for length in lengths])[None].to(device)
    with torch.inference_mode():
        layer(hidden_states=hidden, position_embeddings=rotary(hidden, positions), attention_mask=None)
    query, key, value, scale = taken["query"], taken["key"], taken["value"], float(taken["scale"])

    def eager() -> Tensor:
        with torch.inference_mode():
            return _eager(module, layer, query, key, value, scale, cu_seqlens)[0]

    q, k, v = (part[0].transpose(0, 1) for part in (query, key, value))
    return LayerInputs(q, k, v, scale, cu_seqlens, eager)


def _eager(module: ModuleType, layer: nn.Module, query: Tensor, key: Tensor, value: Tensor, scale: float, cu_seqlens: np.ndarray) -> Tensor:
    """The library's eager attention of each sequence on itself; ``[1, N, T, *]`` in, ``[1, T, N, V]`` out."""
    outs = []
    for start, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist()):
        mask = torch.full((1, 1, end - start, end - start), -torch.inf, dtype=query.dtype, device=query.device).triu(1)
        q, k, v = (part[:, :, start:end] for part in (query, key, value))
        outs.append(module.eager_attention_forward(layer, q, k, v, mask, scaling=scale)[0])
    return torch.cat(outs, dim=1)
