"""Selection on machines that are not this one: packages and devices are stubbed, the reasoning is the real one."""

import re
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mla_interop import (
    MODELS,
    DeviceCapability,
    MLADimensions,
    MLAInputError,
    MLAPrefillSelectorConfig,
    MLAUnsupportedError,
    prepare_metadata,
    register_mla_prefill_backend,
)
from mla_interop.backends import registry
from mla_interop.backends.base import Kernel, MLAPrefillBackend
from mla_interop.backends.registry import ORDERS, MLAPrefillBackendEnum, backend_class, names, order_for
from mla_interop.config import ENVIRONMENT, environment_key, use_config
from mla_interop.installed import assume_installed
from mla_interop.selector import clear_cache, explain, get_mla_prefill_backend, select
from mla_interop.selector_config import DTYPES
from mla_interop.support import answer, markdown

R1 = MLADimensions(qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
# The documented orders; 11.0 has none of its own.
BLACKWELL = ("TRTLLM_RAGGED", "FLASHINFER", "CUDNN", "FLASH_ATTN", "TOKENSPEED_MLA")
HOPPER, OTHERS = ("FLASH_ATTN", "FLASHINFER", "CUDNN"), ("FLASH_ATTN", "FLASHINFER")
DESIGN = {"7.5": OTHERS, "8.0": OTHERS, "8.9": OTHERS, "9.0": HOPPER, "10.0": BLACKWELL, "10.3": BLACKWELL, "11.0": OTHERS, "12.0": OTHERS}
FIRST = {"7.5": "REFERENCE", "8.0": "FLASH_ATTN", "8.9": "FLASH_ATTN", "9.0": "FLASH_ATTN", "10.0": "TRTLLM_RAGGED", "10.3": "TRTLLM_RAGGED"}
FIRST |= {"11.0": "FLASHINFER", "12.0": "FLASH_ATTN"}
ARCHITECTURES = tuple(DESIGN)


def problem(capability: Any = "9.0", **changed: Any) -> MLAPrefillSelectorConfig:
    device = "cpu" if capability is None else "cuda"
    return MLAPrefillSelectorConfig(**{"dimensions": R1, "num_heads": 16, "device_type": device, "capability": capability, **changed})


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that load: nothing is compiled for a machine that is not here."""
    monkeypatch.setattr(Kernel, "launch", property(lambda kernel: lambda *arguments: None))


@pytest.mark.usefixtures("all_installed")
@pytest.mark.parametrize("capability", ARCHITECTURES)
def test_each_architecture_has_its_own_first_choice_and_order(capability: str) -> None:
    """flashinfer#5133: "auto" knew two kernels only, and ran Blackwell at a sixth of its speed."""
    table = explain(problem(capability))
    assert table.chosen == FIRST[capability]
    assert table.order == (*(name for name in DESIGN[capability] if name in names()), "REFERENCE")
    assert {row.backend for row in table.rows} == set(names()) and all(row.valid or row.reasons for row in table.rows)
    assert get_mla_prefill_backend(problem(capability)).get_name() == table.chosen


@pytest.mark.usefixtures("all_installed")
def test_a_cpu_takes_the_cpu_kernel_and_no_other() -> None:
    table = explain(problem(None))
    assert (table.chosen, table.order) == ("CPU_SDPA", ("CPU_SDPA", "REFERENCE"))
    assert {row.backend for row in table.rows if row.valid} == {"CPU_SDPA", "REFERENCE"}


@pytest.mark.usefixtures("none_installed")
@pytest.mark.parametrize("capability", [*ARCHITECTURES, None])
def test_with_nothing_installed_reference_is_left(capability: str | None) -> None:
    assert explain(problem(capability)).chosen == "REFERENCE"


@pytest.mark.usefixtures("all_installed")
def test_an_old_gpu_is_refused_by_every_kernel_at_selection() -> None:
    """transformers#28188: importable packages on a GPU that they do not support."""
    table = explain(problem("7.5"))
    assert table.chosen == "REFERENCE"
    assert all("7.5" in " ".join(row.reasons) for row in table.rows if row.backend not in ("CPU_SDPA", "REFERENCE"))


@pytest.mark.usefixtures("all_installed")
def test_a_backend_of_another_device_is_refused_with_both_capabilities() -> None:
    """gonka#1707: an explicit choice for another GPU must fail at once."""
    with pytest.raises(MLAUnsupportedError, match=r"device cuda \(runs on: cpu\)"):
        select(problem("9.0"), "CPU_SDPA")
    with pytest.raises(MLAUnsupportedError, match=r"device cpu \(runs on: cuda\)"):
        select(problem(None), "FLASH_ATTN")


@pytest.mark.usefixtures("all_installed", "runs")
def test_flash_attn_version_is_named_and_kept() -> None:
    for version, variants in ((4, ("fa4", "fa4api")), (3, ("fa3", "fa3vllm")), (2, ("fa2", "fa2torch"))):
        config = problem(flash_attn_version=version)
        kernels, refused = backend_class("FLASH_ATTN").kernels(config)
        assert tuple(kernel.name.split(".")[1] for kernel in kernels) == variants
        assert sum(f"flash_attn_version {version} was asked for" in reason for reason in refused) == 6 - len(variants)
        assert select(config, "FLASH_ATTN").kernel.name.split(".")[1] == variants[0]


@pytest.mark.usefixtures("all_installed", "runs")
def test_v_is_padded_for_fa2_alone() -> None:
    """TransformerEngine#2629 (Ampere needs it), Megatron-LM#6240 (Hopper's kernels do not)."""
    padded = {kernel.name.split(".")[1]: bool(kernel.copies) for kernel in backend_class("FLASH_ATTN").kernels(problem("9.0"))[0]}
    assert padded == {"fa4": False, "fa4api": False, "fa3": False, "fa3vllm": False, "fa2": True, "fa2torch": True}
    assert "v padded from 128 to 192" in str(explain(problem("8.0", flash_attn_version=2)))


@pytest.mark.usefixtures("all_installed", "runs")
def test_the_choice_follows_what_it_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm#29985, flash-linear-attention#881: a cached selector answered with the backend of before."""
    assert select(problem()).get_name() == "FLASH_ATTN"
    monkeypatch.setenv("MLA_INTEROP_BACKEND", "FLASHINFER")
    assert select(problem()).get_name() == "FLASHINFER"
    monkeypatch.setenv("MLA_INTEROP_BACKEND", "reference")
    assert select(problem()).get_name() == "REFERENCE"
    monkeypatch.delenv("MLA_INTEROP_BACKEND")
    assert select(problem()).get_name() == "FLASH_ATTN"
    monkeypatch.setenv("MLA_INTEROP_ORDER", "FLASHINFER,FLASH_ATTN")
    assert select(problem()).get_name() == "FLASHINFER"
    monkeypatch.setenv("MLA_INTEROP_FLASH_ATTN_VERSION", "2")
    assert select(problem(), "FLASH_ATTN").kernel.name.split(".")[1] == "fa2"
    with pytest.raises(MLAUnsupportedError, match=r"CPU_SDPA: could, but is not in the order that was set \(FLASHINFER, FLASH_ATTN\)"):
        select(problem(None))


@pytest.mark.usefixtures("all_installed", "runs")
def test_the_choice_follows_the_problem() -> None:
    chosen = {changed: select(problem(**dict([changed]))).get_name() for changed in (("capability", "10.0"), ("dtype", "float16"), ("traced", True))}
    assert chosen == {("capability", "10.0"): "TRTLLM_RAGGED", ("dtype", "float16"): "FLASH_ATTN", ("traced", True): "FLASH_ATTN"}
    assert select(problem("10.0", traced=True)).kernel.variant == "cutlass"
    assert explain(problem(), "FLASHINFER").chosen and not explain(problem(scale=-1.0), "FLASHINFER").chosen


@pytest.mark.usefixtures("all_installed", "runs")
def test_a_choice_is_kept_until_the_cache_is_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    first = select(problem())
    assert select(problem()) is first and select(problem(), ["FLASH_ATTN"]) is not first
    clear_cache()
    assert select(problem()) is not first


@pytest.mark.usefixtures("none_installed")
def test_an_explicit_choice_does_not_fall_back() -> None:
    """Megatron-LM#277."""
    with pytest.raises(MLAUnsupportedError) as refusal:
        select(problem(None), "CPU_SDPA")
    assert str(refusal.value).startswith("backend CPU_SDPA cannot serve cpu, bfloat16, 16 heads of 192/128, causal, lse:\n  CPU_SDPA: not installed (assumed)")
    assert "Could serve it: REFERENCE (fallback=True chooses automatically)." in str(refusal.value)
    with pytest.raises(MLAUnsupportedError):
        get_mla_prefill_backend(problem(None), "CPU_SDPA")


@pytest.mark.usefixtures("none_installed")
def test_fallback_warns_and_says_why() -> None:
    """torchtitan#1610: a fall to something slow must be visible."""
    with pytest.warns(UserWarning, match=r"backend CPU_SDPA cannot be used \(CPU_SDPA: not installed \(assumed\)\); using REFERENCE instead"):
        assert select(problem(None), "CPU_SDPA", fallback=True).get_name() == "REFERENCE"


def test_a_sequence_of_choices_takes_the_first_valid_one() -> None:
    assert select(problem(None), ("FLASH_ATTN", "reference")).get_name() == "REFERENCE"
    with pytest.raises(MLAUnsupportedError, match="backend FLASH_ATTN, FLASHINFER cannot serve"):
        select(problem(None), ("FLASH_ATTN", "FLASHINFER"))


@pytest.mark.usefixtures("none_installed")
def test_a_refusal_lists_every_backend_with_every_reason() -> None:
    with pytest.raises(MLAUnsupportedError) as refusal:
        select(problem("9.0", dtype="float8_e4m3fn"))
    text = str(refusal.value)
    assert text.startswith("no backend can serve cuda 9.0, float8_e4m3fn, 16 heads of 192/128, causal, lse:")
    assert all(f"\n  {name}: " in text for name in names())
    assert "dtype float8_e4m3fn (allowed: bfloat16, float16, float32, float64)" in text


@pytest.mark.usefixtures("none_installed")
def test_reference_on_a_gpu_warns_once() -> None:
    with pytest.warns(UserWarning, match="using REFERENCE, plain array code, which is slow"):
        select(problem("9.0"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert select(problem("9.0")).get_name() == "REFERENCE"
        assert select(problem("9.0"), "REFERENCE").get_name() == "REFERENCE"
        assert select(problem(None)).get_name() == "REFERENCE"


@pytest.mark.usefixtures("all_installed")
def test_an_unknown_gpu_is_no_reason_to_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's selector returned FlashAttention where the capability was unknown."""
    monkeypatch.setattr("mla_interop.selector_config.device_capability", lambda device, index=0: None)
    unknown = MLAPrefillSelectorConfig(dimensions=R1, num_heads=16)
    assert unknown.capability is None
    table = explain(unknown)
    assert table.chosen == "REFERENCE"
    unknown_to = {row.backend for row in table.rows if "compute capability unknown (state it in the configuration)" in row.reasons}
    assert unknown_to == set(names()) - {"CPU_SDPA", "REFERENCE"}
    with pytest.raises(MLAUnsupportedError, match="compute capability unknown.*\n?.*REFERENCE"):
        select(unknown, "FLASH_ATTN")


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"dtype": "bf16"}, "dtype: got 'bf16'; allowed: bfloat16"),
        ({"device_type": "tpu"}, "device_type: got 'tpu'; allowed: 'cpu' or 'cuda'"),
        ({"capability": "nine"}, "capability: got 'nine'; allowed: a pair such as"),
        ({"flash_attn_version": 5}, "flash_attn_version: got 5; allowed: 2, 3, 4 or None"),
    ],
)
def test_a_configuration_refuses_what_it_does_not_know(changed: dict[str, Any], text: str) -> None:
    with pytest.raises(MLAInputError) as refusal:
        problem(**changed)
    assert str(refusal.value).startswith(text)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"dimensions": (128, 64, 128)}, "dimensions: got (128, 64, 128); allowed: MLADimensions."),
        ({"dimensions": MLADimensions(qk_nope_head_dim=0, qk_rope_head_dim=64, v_head_dim=128)}, "dimensions: got (nope 0, rope 64, v 128)"),
        ({"dimensions": MLADimensions(qk_nope_head_dim=128, qk_rope_head_dim=-1, v_head_dim=128)}, "dimensions: got (nope 128, rope -1, v 128)"),
        ({"dimensions": MLADimensions(qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim="128")}, "dimensions: got"),  # pyright: ignore[reportArgumentType]
        ({"num_heads": -1}, "num_heads: got -1; allowed: an integer of at least 0."),
        ({"num_heads": None}, "num_heads: got None; allowed: an integer of at least 0."),
        ({"num_heads": "16"}, "num_heads: got '16'"),
        ({"num_sms": 0}, "num_sms: got 0; allowed: an integer of at least 1, or None."),
        ({"num_tokens": -5}, "num_tokens: got -5; allowed: an integer of at least 0, or None."),
        ({"num_tokens": True}, "num_tokens: got True"),
        ({"num_seqs": 1.5}, "num_seqs: got 1.5"),
        ({"is_causal": None}, "is_causal: got None; allowed: True or False."),
        ({"needs_lse": "no"}, "needs_lse: got 'no'; allowed: True or False."),
        ({"traced": 2}, "traced: got 2; allowed: True or False."),
        ({"scale": [0.1]}, "scale: got [0.1]; allowed: a number"),
    ],
)
def test_a_configuration_refuses_values_of_another_kind(changed: dict[str, Any], text: str) -> None:
    with pytest.raises(MLAInputError) as refusal:
        problem(**changed)
    assert str(refusal.value).startswith(text)


@pytest.mark.parametrize("capability", ["-1.0", (9.5, 0), (9, 10), (0, 0), (float("inf"), 0), "9", (9,), 9.0])
def test_a_capability_that_no_gpu_has_is_refused(capability: Any) -> None:
    """It would become part of kernel names, which are read back from programs in other processes."""
    with pytest.raises(MLAInputError, match="capability: got"):
        problem(capability)


def test_what_select_and_explain_are_given_is_checked() -> None:
    for wrong in (None, "deepseek-v3", R1):
        for ask in (select, explain, get_mla_prefill_backend):
            with pytest.raises(MLAInputError, match="config: got .*; allowed: an MLAPrefillSelectorConfig"):
                ask(wrong)  # pyright: ignore[reportArgumentType]
    with pytest.raises(MLAInputError, match="config: got .*; allowed: an MLAPrefillSelectorConfig, or None"):
        prepare_metadata([0, 3], config=R1)  # pyright: ignore[reportArgumentType]
    for backend in ({"REFERENCE"}, [[]], ["REFERENCE", ["x"]]):
        for ask in (select, explain, get_mla_prefill_backend):
            with pytest.raises(MLAInputError, match="backend: got .*; allowed: FLASH_ATTN"):
                ask(problem(None), backend)
    with pytest.raises(MLAInputError, match=r"fallback: got \[\]; allowed: True or False"):
        select(problem(None), "REFERENCE", [])  # pyright: ignore[reportArgumentType]


def test_configurations_are_hashable_and_equal_by_value() -> None:
    assert len({problem("9.0"), problem((9, 0)), problem(DeviceCapability(9, 0))}) == 1


def test_classes_answer_the_interface() -> None:
    """The names that users of the system this comes from know."""
    for member in MLAPrefillBackendEnum:
        cls = member.get_class()
        assert issubclass(cls, MLAPrefillBackend) and cls.get_name() == member.name
        assert cls.supports_dtype(cls.supported_dtypes[0]) and not cls.supports_dtype("int8") and cls.supports_mla_dimensions(R1)
        assert isinstance(cls.is_available(), bool) and cls.supports_compute_capability(None) == ("cpu" in cls.device_types)


def test_every_backend_is_in_an_order_and_reference_is_last() -> None:
    assert {name for order in ORDERS.values() for name in order} == set(names())
    assert all(order[-1] == "REFERENCE" for order in ORDERS.values())
    assert order_for("cuda", DeviceCapability(7, 0)) == order_for("cuda", None) == ORDERS["cuda"]


def test_documented_orders_are_the_codes() -> None:
    """vllm#43697: the documented order differed. Where the docs have a table of orders, it is this one."""
    docs = Path(__file__).parents[2] / "docs"
    rows = [match for path in docs.glob("*.md") for match in re.finditer(r"^\| *order of ([\w.]+) *\| *(.+?) *\|$", path.read_text(), re.M)]
    for match in rows:
        assert tuple(name.strip() for name in match[2].split(",")) == ORDERS[match[1]]
    assert len(rows) == len(ORDERS)


def test_the_documented_support_is_the_codes() -> None:
    """docs/backends.md holds every model, architecture, dtype and reason: run `mla-interop backends --markdown > docs/backends.md` after a change."""
    written = (Path(__file__).parents[2] / "docs" / "backends.md").read_text()
    assert written == markdown()


@pytest.mark.usefixtures("none_installed")
def test_the_documented_support_does_not_depend_on_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    before = markdown()
    for variable, value in zip(ENVIRONMENT.values(), ("REFERENCE", "2", "REFERENCE", "0", "order", "0"), strict=True):
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr("mla_interop.kernels.fa4.package_version", lambda name: "0.0.1")
    assert markdown() == before


@pytest.mark.usefixtures("all_installed")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("capability", [*ARCHITECTURES, None])
def test_the_choice_is_the_first_of_the_order_that_the_support_has(capability: str | None, model: str, dtype: str) -> None:
    """The selector and the table of support are two readings of the same declarations."""
    dimensions = MODELS[model].dimensions
    table = explain(problem(capability, dimensions=dimensions, dtype=dtype, scale=dimensions.qk_head_dim**-0.5))
    served = [name for name in table.order if answer(name, dimensions, capability or "cpu", dtype)[0]]
    assert table.chosen == (served[0] if served else None)


@pytest.mark.usefixtures("all_installed")
def test_a_python_kernel_says_what_it_stands_for_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slower by tens of microseconds a call, where the backend's name says nothing of it."""
    monkeypatch.setattr("mla_interop.kernels.fa4.unsupported_reasons", lambda *arguments: ["no luck"])
    with use_config({"policy": "order"}):
        table = explain(problem("9.0"))
    row = next(row for row in table.rows if row.backend == "FLASH_ATTN")
    assert (row.kind, row.variant, row.instead_of) == ("python", "fa4api", "fa4: no luck") and "instead of fa4: no luck" in str(table)
    assert not any(row.instead_of for row in table.rows if row.kind != "python"), "a compiled one is as good as another"


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """flash-attn 2 as a package of its own on the path, whose import runs the given code; without torch it is not tried."""
    pytest.importorskip("torch")

    def write(code: str) -> None:
        for name, text in (("flash_attn", code), ("flash_attn_2_cuda", "")):
            (tmp_path / name).mkdir()
            (tmp_path / name / "__init__.py").write_text(text)
        for name in [name for name in sys.modules if name.partition(".")[0] in ("flash_attn", "flash_attn_2_cuda")]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.syspath_prepend(str(tmp_path))

    return write


@pytest.mark.parametrize("error", ["ImportError", "OSError", "AttributeError", "RuntimeError", "SystemExit"])
def test_a_package_that_breaks_on_import_is_a_reason(package: Callable[[str], None], error: str) -> None:
    """oumi#2586, open-r1#684: the next kernel is used, and the failure is said once; where nothing is next, it is the refusal."""
    package(f"raise {error}('broken on purpose')")
    broken = f"(flash-attn is installed but cannot be used|importing flash_attn_2_cuda).* {error}: broken on purpose"
    with pytest.raises(MLAUnsupportedError, match=broken):
        select(problem("9.0"), "FLASH_ATTN.fa2")
    with pytest.warns(UserWarning, match=broken):
        assert select(problem("9.0"), ("FLASH_ATTN.fa2", "REFERENCE")).get_name() == "REFERENCE"


def test_an_import_that_hangs_is_cut_off(package: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    end = threading.Event()
    monkeypatch.setattr(sys, "mla_interop_test_end", end, raising=False)
    monkeypatch.setattr("mla_interop.kernels.torch_package.IMPORT_SECONDS", 0.3)
    package("import sys; sys.mla_interop_test_end.wait(60)")
    try:
        begin = time.monotonic()
        with pytest.raises(MLAUnsupportedError, match=r"importing flash_attn_2_cuda did not end within 0.3 s"):
            select(problem("9.0"), "FLASH_ATTN.fa2")
        assert time.monotonic() - begin < 20
    finally:
        end.set()


class Probe(MLAPrefillBackend):
    """A backend of a third party whose probe does what a test says."""

    name = "PROBE"
    device_types = ("cpu",)
    action: Any = None

    @classmethod
    def unavailable_reasons(cls) -> list[str]:
        raise NotImplementedError

    @classmethod
    def kernels(cls, config: MLAPrefillSelectorConfig) -> Any:
        return cls.action()


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> type[Probe]:
    monkeypatch.setattr(registry, "_registered", {})
    monkeypatch.setattr(Probe, "unavailable_reasons", classmethod(lambda cls: []))
    return register_mla_prefill_backend("PROBE", before="CPU_SDPA")(Probe)


@pytest.mark.parametrize("error", [ImportError, OSError, AttributeError, RuntimeError, SystemExit])
def test_a_probe_that_raises_is_a_reason_and_stops_no_other_backend(probe: Any, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]) -> None:
    def fail() -> None:
        raise error("broken on purpose")

    monkeypatch.setattr(probe, "action", staticmethod(fail))
    table = explain(problem(None))
    row = next(row for row in table.rows if row.backend == "PROBE")
    assert table.order[0] == "PROBE" and table.chosen not in ("PROBE", None)
    assert not row.valid and f"{error.__name__}: broken on purpose" in row.reasons[0]
    monkeypatch.setattr(probe, "unavailable_reasons", classmethod(lambda cls: fail()))
    row = next(row for row in explain(problem(None)).rows if row.backend == "PROBE")
    assert not row.valid and f"{error.__name__}: broken on purpose" in row.reasons[0]


def test_a_probe_that_hangs_is_cut_off_and_not_waited_for_twice(probe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    end = threading.Event()
    monkeypatch.setattr("mla_interop.selector.PROBE_SECONDS", 1.0)
    monkeypatch.setattr(probe, "action", staticmethod(lambda: end.wait(60) and ([], ["too late"])))
    try:
        with pytest.raises(MLAUnsupportedError, match="PROBE: the probe of PROBE did not end within 1 s and was left behind"):
            select(problem(None), "PROBE")
        begin = time.monotonic()
        assert explain(problem(None)).chosen != "PROBE" and time.monotonic() - begin < 0.9
    finally:
        end.set()


def test_what_is_assumed_is_part_of_the_key() -> None:
    before = environment_key()
    with assume_installed():
        assert environment_key() != before
    with assume_installed(False):
        assert environment_key() != before
        assert explain(problem(None)).chosen == "REFERENCE"
