"""``softmax_scale`` against the attention layers of transformers, for every model family of the table that it has, with every kind of YaRN fields."""

import importlib
from typing import Any

import pytest

from mla_interop import softmax_scale

pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

# Module of transformers -> prefix of its classes.
FAMILIES = {
    "deepseek_v2": "DeepseekV2",
    "deepseek_v3": "DeepseekV3",
    "glm4_moe_lite": "Glm4MoeLite",
    "mistral4": "Mistral4",
    "minicpm3": "MiniCPM3",
    "longcat_flash": "LongcatFlash",
    "youtu": "Youtu",
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 4096}
ROPES = {
    "none": {"rope_type": "default", "rope_theta": 1e4},
    "equal": {**YARN, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    "v2": {**YARN, "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 0.707},
    "unequal": {**YARN, "factor": 64.0, "mscale": 1.0, "mscale_all_dim": 0.3},
    "mscale alone": {**YARN, "factor": 40.0, "mscale": 1.0},
    "all_dim alone": {**YARN, "factor": 32.0, "mscale_all_dim": 1.0},
    "all_dim 0": {**YARN, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.0},
    "factor below 1": {**YARN, "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    "a default that has the fields": {"rope_type": "default", "rope_theta": 1e4, "factor": 40.0, "mscale_all_dim": 1.0},
}
SIZES: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "kv_lora_rank": 16, "q_lora_rank": 16}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dims", [(128, 64, 128), (192, 64, 256), (64, 32, 64)], ids=str)
def test_the_scale_is_the_layers_own(family: str, dims: tuple[int, int, int]) -> None:
    """transformers#47435: DeepSeek-V2 and Mistral 4 had left the factor out; Megatron-LM#1429: the other field was used."""
    try:
        module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    except ImportError as error:
        pytest.skip(f"not in this transformers: {error}")
    prefix = FAMILIES[family]
    fields = dict(zip(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), dims))
    seen = set()
    for name, rope in ROPES.items():
        config = getattr(module, f"{prefix}Config")(**SIZES, **fields, rope_parameters=dict(rope))
        cls = getattr(module, f"{prefix}MLA", None) or getattr(module, f"{prefix}Attention")
        with torch.device("meta"):
            layer = cls(config, layer_idx=0)
        for given in (config, config.to_dict()):
            assert softmax_scale(given) == pytest.approx(layer.scaling, rel=1e-12), name
        seen.add(round(layer.scaling * (dims[0] + dims[1]) ** 0.5, 5))
    assert {1.0, 1.87385, 1.58963, 1.81326} <= seen
