"""Settings: their precedence, their refusals, and the environment's part."""

from typing import Any

import pytest

import mla_interop
from mla_interop import MLAInputError, MLAPrefillConfig
from mla_interop.config import ENVIRONMENT, environment_key

SELECTOR = mla_interop.MLAPrefillSelectorConfig(
    dimensions=mla_interop.MLADimensions(qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128), num_heads=16, device_type="cpu", dtype="float64"
)


def test_the_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in zip(ENVIRONMENT.values(), ("reference", "3", "REFERENCE, CPU_SDPA", "False")):
        monkeypatch.setenv(variable, value)
    assert MLAPrefillConfig.from_environment() == MLAPrefillConfig("reference", 3, ("REFERENCE", "CPU_SDPA"), False)


def test_nothing_set_is_nothing() -> None:
    assert MLAPrefillConfig.from_environment() == MLAPrefillConfig()


def test_several_backends_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_INTEROP_BACKEND", " FLASH_ATTN , reference ")
    assert MLAPrefillConfig.from_environment().backend == ("FLASH_ATTN", "reference")
    assert mla_interop.select(SELECTOR).get_name() == "REFERENCE"


@pytest.mark.parametrize("variable", ENVIRONMENT.values())
@pytest.mark.parametrize("value", ["", " "])
def test_an_empty_value_is_an_error(monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> None:
    """vllm#22217: empty is not "unset"."""
    monkeypatch.setenv(variable, value)
    with pytest.raises(MLAInputError, match=f"{variable}: got .*Unset the variable"):
        mla_interop.select(SELECTOR)


@pytest.mark.parametrize(
    ("variable", "value", "text"),
    [
        ("MLA_INTEROP_BACKEND", "FLASHATTN", "backend: got 'FLASHATTN'; allowed: FLASH_ATTN"),
        ("MLA_INTEROP_BACKEND", "REFERENCE,", "backend: got ''; allowed: FLASH_ATTN"),
        ("MLA_INTEROP_BACKEND", "None", "backend: got 'None'; allowed: FLASH_ATTN"),
        ("MLA_INTEROP_ORDER", "CPU,REFERENCE", "order: got 'CPU'; allowed: FLASH_ATTN"),
        ("MLA_INTEROP_FLASH_ATTN_VERSION", "fa3", "MLA_INTEROP_FLASH_ATTN_VERSION: got 'fa3'; allowed: 2, 3 or 4."),
        ("MLA_INTEROP_FLASH_ATTN_VERSION", "-3", "MLA_INTEROP_FLASH_ATTN_VERSION: got '-3'; allowed: 2, 3 or 4."),
        ("MLA_INTEROP_FLASH_ATTN_VERSION", "5", "flash_attn_version: got 5; allowed: 2, 3, 4 or None."),
        ("MLA_INTEROP_ALLOW_REFERENCE", "maybe", "MLA_INTEROP_ALLOW_REFERENCE: got 'maybe'; allowed: 0 or 1."),
    ],
)
def test_wrong_values_are_errors(monkeypatch: pytest.MonkeyPatch, variable: str, value: str, text: str) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(MLAInputError) as refusal:
        mla_interop.select(SELECTOR)
    assert str(refusal.value).startswith(text)


def test_a_keyword_beats_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_INTEROP_BACKEND", "FLASH_ATTN")
    assert mla_interop.select(SELECTOR, "REFERENCE").get_name() == "REFERENCE"
    with pytest.raises(mla_interop.MLAUnsupportedError, match="backend FLASH_ATTN cannot serve"):
        mla_interop.select(SELECTOR)


def test_over_fills_what_is_left_open() -> None:
    keyword, environment = MLAPrefillConfig(backend="A", flash_attn_version=None), MLAPrefillConfig(backend="B", flash_attn_version=3, allow_reference=False)
    assert keyword.over(environment) == MLAPrefillConfig("A", 3, None, False)
    assert MLAPrefillConfig(allow_reference=True).over(environment).allow_reference is True


def test_reference_can_be_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_INTEROP_ALLOW_REFERENCE", "0")
    with pytest.raises(mla_interop.MLAUnsupportedError, match=r"REFERENCE: not allowed \(allow_reference=False\)"):
        mla_interop.select(SELECTOR)
    with pytest.raises(mla_interop.MLAUnsupportedError, match=r"REFERENCE: not allowed \(allow_reference=False\)"):
        mla_interop.select(SELECTOR, "REFERENCE")


@pytest.mark.parametrize("version", [1, 5, "3", 3.5])
def test_flash_attn_versions_that_do_not_exist(version: Any) -> None:
    with pytest.raises(MLAInputError, match="flash_attn_version: got .*; allowed: 2, 3, 4 or None"):
        MLAPrefillConfig(flash_attn_version=version)


def test_from_mapping_refuses_what_it_does_not_know() -> None:
    assert MLAPrefillConfig.from_mapping({"backend": "REFERENCE"}) == MLAPrefillConfig("REFERENCE")
    with pytest.raises(MLAInputError, match="config: got 'backends', 'verbose'; allowed: allow_reference, backend, flash_attn_version, order"):
        MLAPrefillConfig.from_mapping({"backends": "REFERENCE", "verbose": 1})


def test_the_key_holds_every_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """flash-linear-attention#881: a cache froze a switch of the environment."""
    for variable in ENVIRONMENT.values():
        before = environment_key()
        monkeypatch.setenv(variable, "x")
        assert environment_key() != before
