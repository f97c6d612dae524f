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


def test_what_is_close_is_measured_in_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    from mla_interop.bench import run

    monkeypatch.setattr(run, "PAIR_ROUNDS", 1)
    names = [("mla_interop", "A.a"), ("kernel object", "A.a"), ("kernel object", "B.b"), ("mla_interop + lse", "A.a"), ("peer", "")]
    rows = [{"problem": "1x2x3", "dtype": "float32", "framework": "torch", "name": name, "kernel": kernel} for name, kernel in names]
    runs = {number: (nothing, 1) for number in range(len(rows))}
    (made,) = run._pairs(rows, runs)
    assert made["names"] == ["mla_interop", "kernel object"] and made["kernel"] == "A.a" and made["ratio"] == made["us"][0] / made["us"][1]
    jax = [row | {"framework": "jax"} for row in rows] + [{**rows[0], "framework": "jax", "name": "fa4-jax", "kernel": ""}]
    assert list(run._pairs(jax, {number: (nothing, 1) for number in range(len(jax))})) == [], "only of the kernel that the peer has too"
    jax[0]["kernel"] = "FLASH_ATTN.fa4"
    (made,) = run._pairs(jax, {number: (nothing, 1) for number in range(len(jax))})
    assert made["names"] == ["mla_interop", "fa4-jax"]
