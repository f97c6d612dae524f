"""Backends of third parties: added, put in another's place, taken back, refused; and the guide that shows how."""

import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from types import ModuleType
from typing import Any

import pytest

from mla_interop import (
    Kernel,
    MLADimensions,
    MLAInputError,
    MLAPrefillBackend,
    MLAPrefillBackendEnum,
    MLAPrefillSelectorConfig,
    MLAUnsupportedError,
    explain,
    register_mla_prefill_backend,
    select,
    unregister_mla_prefill_backend,
)
from mla_interop.backends import registry
from mla_interop.backends.registry import backend_class, names, order_for, parse_names
from mla_interop.capability import DeviceCapability

PROBLEM = MLAPrefillSelectorConfig(dimensions=MLADimensions.from_head_dims(192, 128), num_heads=3, device_type="cpu", dtype="float32")


def backend(name: str = "THIRD", **declared: Any) -> type[MLAPrefillBackend]:
    """A complete backend class."""

    def kernels(cls: Any, config: Any) -> Any:
        return [Kernel(name=config.kernel_name(name, "one"), kind="python", make=lambda: lambda *arguments: None)], []

    methods = {"unavailable_reasons": classmethod(lambda cls: []), "kernels": classmethod(kernels)}
    return type(
        f"Backend{len(declared)}", (MLAPrefillBackend,), {"name": name, "device_types": ("cpu",), "supported_dtypes": ("float32",), **methods, **declared}
    )


@pytest.fixture(autouse=True)
def untouched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No registration outlives its test."""
    monkeypatch.setattr(registry, "_registered", {})
    yield
    registry._entry_points.cache_clear()
    registry._load_entry_point.cache_clear()


def test_a_backend_is_added_and_removed() -> None:
    cls = backend()
    assert register_mla_prefill_backend("THIRD")(cls) is cls
    assert names()[-1] == "THIRD" and backend_class("THIRD.one") is cls and parse_names("backend", "third.ONE") == ("THIRD.one",)
    assert select(PROBLEM, "third").kernel.variant == "one"
    assert explain(PROBLEM).order == ("CPU_SDPA", "REFERENCE") and "THIRD" in {row.backend for row in explain(PROBLEM).rows}
    unregister_mla_prefill_backend("THIRD")
    with pytest.raises(MLAInputError, match="backend: got 'third'; allowed: FLASH_ATTN"):
        select(PROBLEM, "third")


def test_before_puts_it_into_the_orders_and_a_choice_made_earlier_is_forgotten() -> None:
    assert select(PROBLEM, ["CPU_SDPA", "REFERENCE"]).get_name() != "THIRD"
    first = explain(PROBLEM).chosen
    register_mla_prefill_backend("THIRD", before="cpu_sdpa")(backend())
    assert select(PROBLEM).get_name() == "THIRD" and order_for("cpu", None) == ("THIRD", "CPU_SDPA", "REFERENCE")
    assert "THIRD" not in order_for("cuda", DeviceCapability(9, 0))
    unregister_mla_prefill_backend("THIRD")
    assert explain(PROBLEM).chosen == first


def test_an_override_takes_the_place_and_gives_it_back() -> None:
    original = MLAPrefillBackendEnum.CPU_SDPA.get_class()
    one, two = backend("CPU_SDPA"), backend("CPU_SDPA", max_major=9)
    with pytest.raises(MLAInputError, match="name: got 'CPU_SDPA'; allowed: a name that is not in use. override=True"):
        register_mla_prefill_backend("CPU_SDPA")(one)
    assert "CPU_SDPA" not in registry._registered
    register_mla_prefill_backend("CPU_SDPA", override=True)(one)
    register_mla_prefill_backend("CPU_SDPA", override=True)(two)
    assert MLAPrefillBackendEnum.CPU_SDPA.get_class() is backend_class("CPU_SDPA") is two
    assert select(PROBLEM).kernel.variant == "one" and names().count("CPU_SDPA") == 1
    unregister_mla_prefill_backend("CPU_SDPA")
    assert backend_class("CPU_SDPA") is one
    unregister_mla_prefill_backend("CPU_SDPA")
    assert MLAPrefillBackendEnum.CPU_SDPA.get_class() is backend_class("CPU_SDPA") is original
    with pytest.raises(MLAInputError, match="name: got 'CPU_SDPA'; allowed: none, since nothing was registered"):
        unregister_mla_prefill_backend("CPU_SDPA")


def test_a_module_that_is_imported_again_registers_again() -> None:
    register_mla_prefill_backend("THIRD")(backend())
    again = backend()
    register_mla_prefill_backend("THIRD")(again)
    assert backend_class("THIRD") is again
    unregister_mla_prefill_backend("THIRD")
    assert "THIRD" not in names()


@pytest.mark.parametrize(
    ("name", "cls", "texts"),
    [
        ("THIRD", type("Empty", (MLAPrefillBackend,), {}), ("no method kernels; no method unavailable_reasons", "declares name None, not 'THIRD'")),
        ("THIRD", backend("OTHER"), ("declares name 'OTHER', not 'THIRD'",)),
        ("THIRD", backend(device_types=("tpu",)), ("declares device_types ('tpu',) (allowed: 'cpu', 'cuda')",)),
        ("THIRD", backend(device_types=()), ("declares device_types ()",)),
        ("THIRD", backend(device_types=3), ("declares device_types 3",)),
        ("THIRD", backend(supported_dtypes=(3,)), ("declares supported_dtypes (3,)",)),
        ("THIRD", backend(supported_head_dims=(192, 128)), ("declares supported_head_dims (192, 128) (allowed: a tuple of pairs, (D, V))",)),
        (3, backend(), ("name 3 (allowed: upper-case letters, digits and _)",)),
        (None, backend(), ("name None (allowed: upper-case letters, digits and _)",)),
        ("THIRD", backend(supported_dtypes="float32"), ("declares supported_dtypes 'float32' (allowed: a tuple",)),
        ("THIRD", backend(min_capability=(8, 0)), ("declares min_capability (8, 0) (allowed: a DeviceCapability)",)),
        ("THIRD", backend(kernels=lambda cls, config: ([], [])), ("kernels is no class method",)),
        ("THIRD", backend(unavailable_reasons=staticmethod(lambda: [])), ("unavailable_reasons is no class method",)),
        ("third", backend("third"), ("name 'third' (allowed: upper-case letters, digits and _)",)),
        ("THI.RD", backend("THI.RD"), ("name 'THI.RD' (allowed: upper-case",)),
        ("THIRD", object, ("no subclass of MLAPrefillBackend",)),
        ("THIRD", 7, ("no subclass of MLAPrefillBackend",)),
    ],
)
def test_what_is_no_backend_is_refused_with_all_that_it_lacks(name: Any, cls: Any, texts: tuple[str, ...]) -> None:
    with pytest.raises(MLAInputError, match="cannot be registered as a backend: ") as refusal:
        register_mla_prefill_backend(name)(cls)
    assert all(text in str(refusal.value) for text in texts)
    assert name not in names()


@pytest.mark.parametrize("place", ["CPU_SDPA.torch", ("CPU_SDPA", "REFERENCE")])
def test_a_place_is_before_one_backend(place: Any) -> None:
    """Before a kernel it stood nowhere, and of several places all but the first were forgotten."""
    with pytest.raises(MLAInputError, match="before: got .*; allowed: one backend, and not one of its kernels"):
        register_mla_prefill_backend("THIRD", before=place)(backend())
    assert "THIRD" not in names()


@pytest.mark.parametrize("error", [ImportError("x"), OSError("x"), AttributeError("x"), RuntimeError("x")], ids=lambda error: type(error).__name__)
def test_a_kernel_that_cannot_be_loaded_leaves_the_problem_to_the_next(error: Exception) -> None:
    def make() -> Any:
        raise error

    broken = classmethod(lambda cls, config: ([Kernel(name=config.kernel_name("THIRD", "one"), kind="array", make=make)], []))
    register_mla_prefill_backend("THIRD", before="CPU_SDPA")(backend(kernels=broken))
    said = rf"kernel THIRD\.one\.\S+ cannot be loaded: {type(error).__name__}: x"
    with pytest.warns(UserWarning, match=said):
        assert select(PROBLEM).get_name() != "THIRD"
    with pytest.raises(MLAUnsupportedError, match=said) as refusal:
        select(PROBLEM, "THIRD")
    assert refusal.value.__cause__ is not None and refusal.value.__cause__.__cause__ is error


@pytest.mark.parametrize(
    ("said", "reasons"), [(None, None), (7, None), ("too old", ("too old",)), ([KeyError("cuda")], ("'cuda'",)), (("a", "b"), ("a", "b"))], ids=str
)
def test_what_a_class_says_amiss_stops_no_other(said: Any, reasons: Any) -> None:
    register_mla_prefill_backend("THIRD", before="CPU_SDPA")(backend(validate_configuration=classmethod(lambda cls, config: said)))
    table = explain(PROBLEM)
    (row,) = (row for row in table.rows if row.backend == "THIRD")
    assert not row.valid and table.chosen not in (None, "THIRD")
    assert row.reasons == reasons or reasons is None and row.reasons[0].startswith("its probe failed: TypeError: ")


def test_an_unknown_place_is_refused() -> None:
    with pytest.raises(MLAInputError, match="before: got 'CPU'; allowed: FLASH_ATTN"):
        register_mla_prefill_backend("THIRD", before="CPU")(backend())
    assert "THIRD" not in names()


def entry_points(monkeypatch: pytest.MonkeyPatch, **values: str) -> None:
    made = [EntryPoint(name, value, registry.ENTRY_POINTS) for name, value in values.items()]
    monkeypatch.setattr(registry.metadata, "entry_points", lambda group: made if group == registry.ENTRY_POINTS else [])
    registry._entry_points.cache_clear()
    registry._load_entry_point.cache_clear()


def module(monkeypatch: pytest.MonkeyPatch, **content: Any) -> None:
    made = ModuleType("third_party")
    vars(made).update(content)
    monkeypatch.setitem(sys.modules, "third_party", made)


def test_an_entry_point_adds_a_backend_that_is_imported_when_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    entry_points(monkeypatch, THIRD="third_party:Backend")
    assert "THIRD" in names() and "third_party" not in sys.modules
    module(monkeypatch, Backend=backend())
    assert select(PROBLEM, "THIRD").kernel.variant == "one" and explain(PROBLEM).chosen != "THIRD"
    register_mla_prefill_backend("THIRD", override=True)(backend("THIRD", max_major=9))
    assert backend_class("THIRD").max_major == 9
    unregister_mla_prefill_backend("THIRD")
    assert backend_class("THIRD").max_major is None


@pytest.mark.parametrize("content", [{}, {"Backend": object}, {"Backend": backend("OTHER")}])
def test_a_broken_entry_point_is_a_reason_and_breaks_nothing(monkeypatch: pytest.MonkeyPatch, content: dict[str, Any]) -> None:
    entry_points(monkeypatch, THIRD="third_party:Backend")
    module(monkeypatch, **content)
    assert explain(PROBLEM).chosen in ("CPU_SDPA", "REFERENCE")
    with pytest.raises(MLAUnsupportedError, match=r"THIRD: entry point THIRD = third_party:Backend (cannot be loaded|is not a backend)"):
        select(PROBLEM, "THIRD")


def test_an_entry_point_never_takes_a_built_in_name_silently(monkeypatch: pytest.MonkeyPatch) -> None:
    entry_points(monkeypatch, REFERENCE="third_party:Backend", lower="third_party:Backend")
    with pytest.warns(UserWarning, match=r"entry point (REFERENCE|lower) = third_party:Backend .* is left out") as said:
        assert set(names()) == set(MLAPrefillBackendEnum.__members__)
    assert len(said) == 2
