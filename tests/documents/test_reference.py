"""Every public name is in the reference, and its docstring says what a caller has to know."""

import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

import pages
import pytest

PACKAGES = {"mla_interop": "mla_interop", "torch_side": "torch_side", "jax_side": "jax_side", "mla_interop.explore": "explore"}
# Not errors of a call: exceptions themselves, and what only asks.
RAISES_NOTHING = {"clear_cache", "context_bucket", "is_deepseek_r1_mla_compatible", "workspace_bytes"}


def module(package: str) -> Any:
    pytest.importorskip({"torch_side": "torch", "jax_side": "jax"}.get(package, "numpy"))
    return importlib.import_module(package)


def functions(package: str) -> Iterator[tuple[str, Any]]:
    found = module(package)
    for name in found.__all__:
        value = getattr(found, name)
        if inspect.isfunction(value):
            yield name, value


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_is_in_the_reference(package: str) -> None:
    listed = re.findall(r"^::: (\S+)$", (pages.ROOT / "docs" / "reference" / f"{PACKAGES[package]}.md").read_text(), flags=re.MULTILINE)
    assert sorted(listed) == sorted(f"{package}.{name}" for name in module(package).__all__)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_argument_and_error_of_a_public_function_is_described(package: str) -> None:
    for name, function in functions(package):
        text = inspect.getdoc(function) or ""
        described = re.split(r"^(?:Returns|Raises):$", text.partition("\nArgs:\n")[2], flags=re.MULTILINE)[0]
        for parameter in inspect.signature(function).parameters:
            assert re.search(rf"^ +(?:[\w*, ]+, )?\**{parameter}(?:, [\w, ]+)?:", described, flags=re.MULTILINE), f"{package}.{name}: {parameter}"
        assert "\nRaises:\n" in text or name in RAISES_NOTHING, f"{package}.{name}"


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_class_describes_its_fields_and_methods(package: str) -> None:
    found = module(package)
    for name in found.__all__:
        value = getattr(found, name)
        if not inspect.isclass(value):
            continue
        text = inspect.getdoc(value) or ""
        assert len(text) > 30, f"{package}.{name}"
        for field in getattr(value, "__dataclass_fields__", {}):
            assert field.startswith("_") or re.search(rf"\b{field}\b", text), f"{package}.{name}.{field}"
        for method, function in vars(value).items():
            if (
                not method.startswith("_")
                and inspect.isfunction(getattr(function, "__func__", function))
                and method not in getattr(value, "__dataclass_fields__", {})
            ):
                assert inspect.getdoc(getattr(function, "__func__", function)), f"{package}.{name}.{method}"


def test_functions_that_return_attention_say_shapes_dtypes_and_the_unit_of_lse() -> None:
    for package in ("mla_interop", "torch_side", "jax_side"):
        for name, function in functions(package):
            if "return_lse" in inspect.signature(function).parameters or name == "merge":
                text = inspect.getdoc(function) or ""
                assert all(word in text for word in ("[T, N, ", "[N, T]", "float32")), f"{package}.{name}"
                assert "natural log" in text or "mla_prefill" in text, f"{package}.{name}"
