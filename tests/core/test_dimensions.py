"""Dimensions and scales of public models, read as their configurations say them."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import mla_interop
from mla_interop import MODELS, MLADimensions, MLAInputError, is_deepseek_r1_mla_compatible, softmax_scale
from mla_interop.backends.registry import backend_class, names
from mla_interop.dimensions import dimensions_from_config, read_config, yarn_mscale

R1 = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
# (nope, rope, v) to what serves it, on a GPU of compute capability 9.0 and on a CPU, with every package installed (vllm#48855).
SUPPORT = {
    (128, 64, 128): {"FLASH_ATTN", "FLASHINFER", "CUDNN", "CPU_SDPA", "REFERENCE"},
    (192, 64, 256): {"FLASH_ATTN", "FLASHINFER", "CUDNN", "CPU_SDPA", "REFERENCE"},
    (256, 0, 256): {"FLASH_ATTN", "FLASHINFER", "CUDNN", "CPU_SDPA", "REFERENCE"},
    (64, 32, 64): {"FLASH_ATTN", "CUDNN", "CPU_SDPA", "REFERENCE"},
    (64, 64, 128): {"FLASH_ATTN", "FLASHINFER", "CUDNN", "CPU_SDPA", "REFERENCE"},
}


def yarn(factor: float, **mscales: float) -> dict[str, Any]:
    return {**R1, "rope_scaling": {"type": "yarn", "factor": factor, **mscales}}


@pytest.mark.parametrize(
    ("factor", "all_dim", "squared"),
    [(40, 1.0, 1.87385), (40, 0.707, 1.58963), (32, 1.0, 1.81326), (64, 1.0, 2.00474), (128, 1.0, 2.20583), (1, 1.0, 1.0), (0.5, 1.0, 1.0)],
)
def test_the_scale_with_yarn(factor: float, all_dim: float, squared: float) -> None:
    """transformers#47435, onnxruntime/mobius#548: the squared factor was missing."""
    assert yarn_mscale(factor, all_dim) ** 2 == pytest.approx(squared, abs=5e-6)
    assert softmax_scale(yarn(factor, mscale=all_dim, mscale_all_dim=all_dim)) == pytest.approx(192**-0.5 * squared, rel=3e-6)


def test_it_is_mscale_all_dim_that_counts() -> None:
    """Megatron-LM#1429: ``mscale`` was used; unequal values show it. exllamav3#259: equal ones cancel in the rotary factor, not here."""
    expected = softmax_scale(yarn(40, mscale=1.0, mscale_all_dim=1.0))
    assert softmax_scale(yarn(40, mscale=0.3, mscale_all_dim=1.0)) == expected
    assert softmax_scale(yarn(40, mscale_all_dim=1.0)) == expected
    assert softmax_scale(yarn(40, mscale=1.0)) == softmax_scale(yarn(40, mscale=1.0, mscale_all_dim=0)) == 192**-0.5


@pytest.mark.parametrize("rope", [None, {}, {"rope_type": "default", "rope_theta": 1e4}, "yarn"])
def test_without_yarn_the_scale_is_d_to_minus_a_half(rope: Any) -> None:
    assert softmax_scale({**R1, "rope_scaling": rope}) == 192**-0.5


def test_newer_configurations_call_it_rope_parameters() -> None:
    assert softmax_scale({**R1, "rope_parameters": {"factor": 40, "mscale_all_dim": 1.0}}) == pytest.approx(0.13523, abs=5e-6)


def test_deepseek_v3s_known_scale() -> None:
    assert softmax_scale(yarn(40, mscale=1.0, mscale_all_dim=1.0)) == pytest.approx(0.13523, abs=5e-6)


def test_the_table_of_models() -> None:
    """Every distinct triple of the public models is there, and no other."""
    assert {(m.dimensions.qk_nope_head_dim, m.dimensions.qk_rope_head_dim, m.dimensions.v_head_dim) for m in MODELS.values()} == set(SUPPORT)
    assert {name: MODELS[name].num_heads for name in ("deepseek-v3", "deepseek-v2-lite", "kimi-k2", "glm-4.7-flash", "minicpm3-4b")} == {
        "deepseek-v3": 128,
        "deepseek-v2-lite": 16,
        "kimi-k2": 64,
        "glm-4.7-flash": 20,
        "minicpm3-4b": 40,
    }


@pytest.mark.parametrize("triple", SUPPORT, ids=str)
@pytest.mark.usefixtures("all_installed")
def test_which_backends_serve_which_dimensions(triple: tuple[int, int, int]) -> None:
    """vllm#48855: a triple was left out of a list, and a model had no backend."""
    dimensions = MLADimensions(qk_nope_head_dim=triple[0], qk_rope_head_dim=triple[1], v_head_dim=triple[2])
    served = set()
    for name in names():
        for device in ("cuda", "cpu"):
            config = mla_interop.MLAPrefillSelectorConfig(
                dimensions=dimensions, num_heads=16, device_type=device, capability="9.0" if device == "cuda" else None, scale=0.1
            )
            served |= {name} if not backend_class(name).validate_configuration(config) else set()
    assert served == SUPPORT[triple]


def test_from_head_dims_keeps_what_kernels_see() -> None:
    for qk, v in ((192, 128), (256, 256), (96, 64), (128, 128), (64, 128)):
        dimensions = MLADimensions.from_head_dims(qk, v)
        assert (dimensions.qk_head_dim, dimensions.v_head_dim) == (qk, v) and dimensions.qk_rope_head_dim >= 0


class Slots:
    """A configuration without ``__dict__``."""

    __slots__ = tuple(R1)

    def __init__(self) -> None:
        for name, value in R1.items():
            setattr(self, name, value)


class TextOnly(SimpleNamespace):
    """What is asked for its text model, whatever it is, and answers with itself."""

    def __init__(self) -> None:
        super().__init__(**R1)

    @property
    def text_config(self) -> "TextOnly":
        return self


FORMS = ["mapping", "object", "to_dict", "path", "nested", "nested object", "language model", "twice nested"]
FORMS += ["class's own", "slots", "its own text model", "numpy"]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_configuration(form: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(R1))
    forms = {
        "mapping": R1,
        "object": SimpleNamespace(**R1),
        "to_dict": SimpleNamespace(to_dict=lambda: R1),
        "path": str(path),
        "nested": {"v_head_dim": 7, "text_config": R1},
        "nested object": {"text_config": SimpleNamespace(**R1)},
        "language model": {"language_config": R1, "v_head_dim": 7},
        "twice nested": {"text_config": {"text_config": R1}},
        "class's own": type("Config", (), dict(R1))(),
        "slots": Slots(),
        "its own text model": TextOnly(),
        "numpy": {name: np.int64(value) for name, value in R1.items()},
    }
    assert dimensions_from_config(forms[form]) == MODELS["deepseek-r1"].dimensions and is_deepseek_r1_mla_compatible(forms[form])


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({}, "config.qk_nope_head_dim: got None; allowed: an integer of at least 1."),
        ({**R1, "v_head_dim": "128"}, "config.v_head_dim: got '128'; allowed: an integer of at least 1."),
        ({**R1, "qk_rope_head_dim": True}, "config.qk_rope_head_dim: got True; allowed: an integer of at least 0."),
        ({**R1, "v_head_dim": -128}, "config.v_head_dim: got -128; allowed: an integer of at least 1."),
        ({"language_config": dict.fromkeys(R1, 0)}, "config.qk_nope_head_dim: got 0; allowed: an integer of at least 1."),  # DeepSeek-VL2-Tiny
        (SimpleNamespace(to_dict=lambda: 1 / 0), "config: cannot read a SimpleNamespace: ZeroDivisionError: division by zero"),
        ("/no/such/config.json", "config: cannot read '/no/such/config.json' as JSON"),
        (7, "config: got int; allowed: a mapping, a config object, or a path to a config.json."),
        ([1], "config: got list; allowed: a mapping"),
    ],
)
def test_what_is_no_configuration(config: Any, text: str) -> None:
    with pytest.raises(MLAInputError) as refusal:
        softmax_scale(config)
    assert str(refusal.value).startswith(text)
    assert not is_deepseek_r1_mla_compatible(config)


def test_a_scale_of_words_is_refused() -> None:
    with pytest.raises(MLAInputError, match="config.rope_scaling: got factor 'forty', mscale_all_dim 1.0; allowed: numbers"):
        softmax_scale({**R1, "rope_scaling": {"factor": "forty", "mscale_all_dim": 1.0}})


def test_minicpm3_leaves_the_width_of_v_to_its_code() -> None:
    fields = {"qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "kv_lora_rank": 256, "hidden_size": 2560, "num_attention_heads": 40}
    assert dimensions_from_config(fields) == MODELS["minicpm3-4b"].dimensions and softmax_scale(fields) == 96**-0.5


def test_a_config_without_mla_inside_a_text_config_is_read_as_it_is() -> None:
    assert read_config({**R1, "text_config": {"hidden_size": 3}})["v_head_dim"] == 128


def test_other_dimensions_are_not_deepseeks() -> None:
    assert not is_deepseek_r1_mla_compatible({**R1, "qk_nope_head_dim": 192, "v_head_dim": 256})
    assert math.isclose(softmax_scale({**R1, "qk_nope_head_dim": 192, "v_head_dim": 256}), 256**-0.5)
