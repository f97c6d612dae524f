"""What the benchmark measures beside kernels, on a machine that lacks something: the rest is measured all the same."""

import sys

import pytest

torch = pytest.importorskip("torch")

from mla_interop.bench import calls, ceiling  # noqa: E402


def nothing(n: int) -> None:
    pass


def broken(n: int) -> None:
    raise RuntimeError("no compiler")


def test_a_framework_that_is_not_there_and_a_call_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jax", None)
    monkeypatch.setattr(calls, "_torch", lambda *_: {"one": nothing, "two": broken})
    one, two = calls.call_costs("cpu", "float32")
    assert one["name"] == "one, 2x8x1" and one["us"] >= 0 and two == {"name": "two, 2x8x1", "failed": "RuntimeError: no compiler"}


def test_a_matrix_product_has_its_operations_counted() -> None:
    found = ceiling.matrix_product("cpu", "float32", 64)
    assert found["size"] == 64 and found["tflops"] == pytest.approx(2 * 64**3 / (found["us"] * 1e-6) * 1e-12)
