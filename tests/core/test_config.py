"""Settings: their precedence, their refusals, and the environment's part."""

import itertools
import threading
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import mla_interop
from mla_interop import MLAInputError, MLAPrefillConfig, current_config, set_config, use_config
from mla_interop.config import ENVIRONMENT, environment_key

SELECTOR = mla_interop.MLAPrefillSelectorConfig(
    dimensions=mla_interop.MLADimensions(qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128), num_heads=16, device_type="cpu", dtype="float64"
)


def test_the_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in zip(ENVIRONMENT.values(), ("reference", "3", "REFERENCE, CPU_SDPA", "False", "Measured", "1"), strict=True):
        monkeypatch.setenv(variable, value)
    assert MLAPrefillConfig.from_environment() == MLAPrefillConfig("reference", 3, ("REFERENCE", "CPU_SDPA"), False, "measured", True)


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
        ("MLA_INTEROP_FLASH_ATTN_VERSION", "²", "MLA_INTEROP_FLASH_ATTN_VERSION: got '²'; allowed: 2, 3 or 4."),
        ("MLA_INTEROP_FLASH_ATTN_VERSION", "-3", "MLA_INTEROP_FLASH_ATTN_VERSION: got '-3'; allowed: 2, 3 or 4."),
        ("MLA_INTEROP_FLASH_ATTN_VERSION", "5", "flash_attn_version: got 5; allowed: 2, 3, 4 or None."),
        ("MLA_INTEROP_ALLOW_REFERENCE", "maybe", "MLA_INTEROP_ALLOW_REFERENCE: got 'maybe'; allowed: 0 or 1."),
        ("MLA_INTEROP_POLICY", "fastest", "policy: got 'fastest'; allowed: 'order', 'measured' or None."),
        ("MLA_INTEROP_SELF_CHECK", "2", "MLA_INTEROP_SELF_CHECK: got '2'; allowed: 0 or 1."),
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
    with pytest.raises(
        MLAInputError, match="config: got 'backends', 'verbose'; allowed: allow_reference, backend, flash_attn_version, order, policy, self_check"
    ):
        MLAPrefillConfig.from_mapping({"backends": "REFERENCE", "verbose": 1})
    with pytest.raises(MLAInputError, match="config: got 'a', 1; allowed: allow_reference"):
        MLAPrefillConfig.from_mapping({1: 2, "a": 3})  # pyright: ignore[reportArgumentType]
    for values in (None, "REFERENCE", [("backend", "REFERENCE")]):
        with pytest.raises(MLAInputError, match="config: got .*; allowed: a mapping of settings"):
            MLAPrefillConfig.from_mapping(values)  # pyright: ignore[reportArgumentType]


def test_the_key_holds_every_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """flash-linear-attention#881: a cache froze a switch of the environment."""
    for variable in ENVIRONMENT.values():
        before = environment_key()
        monkeypatch.setenv(variable, "x")
        assert environment_key() != before


@pytest.fixture
def process() -> Any:
    """Takes back what a test sets for the process."""
    yield set_config
    set_config(None)


SOURCES = ("keyword", "inner", "outer", "process", "environment")


@pytest.mark.parametrize("nearest", range(len(SOURCES)))
def test_one_precedence(monkeypatch: pytest.MonkeyPatch, process: Any, nearest: int) -> None:
    """Each source is set to a name of its own, the nearest ones left out one by one: the first that is set decides."""
    chosen = dict(zip(SOURCES, ("FLASHINFER", "FLASH_ATTN", "CPU_SDPA", "FLASH_ATTN.fa3", "REFERENCE"), strict=True))
    given = {name: MLAPrefillConfig(backend=chosen[name] if SOURCES.index(name) >= nearest else None) for name in SOURCES}
    monkeypatch.setenv("MLA_INTEROP_BACKEND", chosen["environment"])
    process(given["process"])
    with use_config(given["outer"]), use_config(given["inner"]):
        assert mla_interop.explain(SELECTOR, given["keyword"].backend).explicit == (chosen[SOURCES[nearest]],)


def test_each_setting_by_itself(monkeypatch: pytest.MonkeyPatch, process: Any) -> None:
    monkeypatch.setenv("MLA_INTEROP_ALLOW_REFERENCE", "0")
    monkeypatch.setenv("MLA_INTEROP_FLASH_ATTN_VERSION", "2")
    process({"flash_attn_version": 3, "policy": "order"})
    with use_config({"order": ["REFERENCE", "CPU_SDPA"]}) as made:
        assert made == MLAPrefillConfig(order=("REFERENCE", "CPU_SDPA"))
        assert current_config() == MLAPrefillConfig(None, 3, ("REFERENCE", "CPU_SDPA"), False, "order", None)
    assert current_config().order is None


def test_a_context_is_one_threads_and_the_process_is_everyones(process: Any) -> None:
    seen = []
    process(MLAPrefillConfig(policy="order"))
    with use_config(MLAPrefillConfig(flash_attn_version=4)):
        thread = threading.Thread(target=lambda: seen.append(current_config()))
        thread.start()
        thread.join()
        assert current_config() == MLAPrefillConfig(policy="order", flash_attn_version=4)
    assert seen == [MLAPrefillConfig(policy="order")]


def test_a_context_is_left_after_an_error() -> None:
    with pytest.raises(KeyError), use_config(MLAPrefillConfig(backend="REFERENCE")):
        raise KeyError
    assert current_config() == MLAPrefillConfig()


@pytest.mark.parametrize("config", [7, "REFERENCE", ["REFERENCE"]])
def test_what_is_no_config(config: Any) -> None:
    with pytest.raises(MLAInputError, match="config: got .*; allowed: an MLAPrefillConfig, or a mapping"):
        set_config(config)


def test_a_wrong_name_is_refused_where_it_is_set() -> None:
    with pytest.raises(MLAInputError, match="backend: got 'FLASHATTN'; allowed: FLASH_ATTN"), use_config({"backend": "FLASHATTN"}):
        pass
    with pytest.raises(MLAInputError, match="order: got 'fa'; allowed: FLASH_ATTN"):
        set_config(MLAPrefillConfig(order=("fa",)))
    assert current_config() == MLAPrefillConfig()


@pytest.mark.parametrize("changed", [{"allow_reference": 1}, {"self_check": "yes"}, {"policy": "best"}])
def test_settings_of_the_wrong_kind(changed: Any) -> None:
    with pytest.raises(MLAInputError, match=f"{next(iter(changed))}: got "):
        MLAPrefillConfig.from_mapping(changed)


@pytest.mark.parametrize("frontend", ["numpy", "torch", "jax"])
def test_a_choice_is_not_kept_beyond_its_context(frontend: str) -> None:
    """The same metadata, the same tensors: only the configuration differs, and with it the backend that has to answer."""
    arrays = [np.ones((5, 3, width), np.float32) for width in (192, 192, 128)]
    if frontend == "numpy":
        door: Any = mla_interop
    else:
        pytest.importorskip(frontend)
        door = pytest.importorskip(f"{frontend}_side")
        convert = {"torch": lambda x: __import__("torch").from_numpy(x), "jax": lambda x: __import__("jax").numpy.asarray(x)}[frontend]
        arrays = [convert(x) for x in arrays]
    metadata = mla_interop.prepare_metadata([0, 2, 5])
    door.mla_prefill(*arrays, metadata=metadata, backend=None)
    with use_config(MLAPrefillConfig(backend="FLASH_ATTN")), pytest.raises(mla_interop.MLAUnsupportedError, match="backend FLASH_ATTN cannot serve"):
        door.mla_prefill(*arrays, metadata=metadata)
    with use_config(MLAPrefillConfig(backend="FLASH_ATTN")):
        door.mla_prefill(*arrays, metadata=metadata, backend="REFERENCE")
    door.mla_prefill(*arrays, metadata=metadata)


def test_the_key_holds_the_configuration(process: Any) -> None:
    before = environment_key()
    with use_config({"policy": "order"}):
        assert environment_key() != before
    process({"policy": "order"})
    assert environment_key() != before


BACKENDS = (None, "CUDNN", "TRTLLM_RAGGED", "FLASHINFER", "FLASH_ATTN", "TOKENSPEED_MLA")
FLAGS = ("use_cudnn_prefill", "use_trtllm_ragged_deepseek_prefill", "disable_flashinfer_prefill")
COMBINATIONS = list(itertools.product(BACKENDS, *[(None, False, True)] * 3))


def expected(backend: str | None, cudnn: bool, trtllm: bool, no_flashinfer: bool) -> str | None:
    """The rules in other words: what is asked for by name must be one thing; disabling FlashInfer only excludes that, and alone means FlashAttention."""
    wanted = {name for name, asked in ((backend, backend), ("CUDNN", cudnn), ("TRTLLM_RAGGED", trtllm)) if asked}
    if len(wanted) > 1 or no_flashinfer and "FLASHINFER" in wanted:
        return "error"
    return wanted.pop() if wanted else "FLASH_ATTN" if no_flashinfer else None


@pytest.mark.parametrize("form", ["mapping", "object"])
@pytest.mark.parametrize(("backend", "cudnn", "trtllm", "no_flashinfer"), COMBINATIONS)
def test_every_combination_of_the_old_flags(form: str, backend: Any, cudnn: Any, trtllm: Any, no_flashinfer: Any) -> None:
    """vllm#32623: beside mla_prefill_backend the flags were ignored without a word."""
    values = dict(zip(("mla_prefill_backend", *FLAGS), (backend, cudnn, trtllm, no_flashinfer)))
    given = values if form == "mapping" else SimpleNamespace(**values)
    set_flags = [flag for flag in FLAGS if values[flag]]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if expected(backend, cudnn, trtllm, no_flashinfer) == "error":
            with pytest.raises(MLAInputError, match="mla_prefill_backend"):
                MLAPrefillConfig.from_vllm(given)
            return
        made = MLAPrefillConfig.from_vllm(given)
    assert made == MLAPrefillConfig(backend=expected(backend, cudnn, trtllm, no_flashinfer))
    assert [(each.category, str(each.message).split()[0]) for each in said] == [(DeprecationWarning, flag) for flag in set_flags]
    assert all(each.filename == __file__ for each in said)


def test_what_else_vllms_config_holds_is_left_alone() -> None:
    member = SimpleNamespace(name="FLASHINFER", value="vllm.v1...")
    given = SimpleNamespace(backend="FLASHMLA", mla_prefill_backend=member, flash_attn_version=3, use_prefill_query_quantization=True)
    assert MLAPrefillConfig.from_vllm(given) == MLAPrefillConfig("FLASHINFER", 3)
    assert MLAPrefillConfig.from_vllm({"mla_prefill_backend": "flash_attn", "disable_flashinfer_prefill": False}) == MLAPrefillConfig("FLASH_ATTN")
    assert MLAPrefillConfig.from_vllm({}) == MLAPrefillConfig.from_vllm(SimpleNamespace(mla_prefill_backend=None)) == MLAPrefillConfig()


@pytest.mark.parametrize("given", [None, "FLASHINFER", SimpleNamespace(attention_config=SimpleNamespace(mla_prefill_backend="CUDNN"))], ids=str)
def test_what_has_no_field_of_vllms_config_is_not_taken_for_one_that_sets_nothing(given: Any) -> None:
    with pytest.raises(MLAInputError, match="attention_config: got .*; allowed: an AttentionConfig"):
        MLAPrefillConfig.from_vllm(given)


@pytest.mark.parametrize("backend", [3, ["CUDNN"], ("FLASHINFER",)])
def test_vllms_backend_is_one_name(backend: Any) -> None:
    with pytest.raises(MLAInputError, match="mla_prefill_backend: got .*; allowed: a name, an enum member, or None"):
        MLAPrefillConfig.from_vllm({"mla_prefill_backend": backend, "disable_flashinfer_prefill": True})


def test_a_disabled_backend_is_not_asked_for_by_one_of_its_kernels() -> None:
    with pytest.warns(DeprecationWarning), pytest.raises(MLAInputError, match="disable_flashinfer_prefill: got True"):
        MLAPrefillConfig.from_vllm({"mla_prefill_backend": "flashinfer.fa3", "disable_flashinfer_prefill": True})


@pytest.mark.parametrize("setting", ["backend", "order"])
def test_sequences_in_sequences_can_be_a_part_of_keys(setting: str) -> None:
    with use_config({setting: [["reference", "CPU_SDPA"], "FLASH_ATTN"]}) as made:
        assert getattr(made, setting) == ("REFERENCE", "CPU_SDPA", "FLASH_ATTN")
        assert mla_interop.select(SELECTOR).get_name() == "REFERENCE"


@pytest.mark.parametrize("flag", FLAGS)
def test_a_flag_that_is_no_bool(flag: str) -> None:
    with pytest.raises(MLAInputError, match=f"{flag}: got 'false'; allowed: True, False or None"):
        MLAPrefillConfig.from_vllm({flag: "false"})
