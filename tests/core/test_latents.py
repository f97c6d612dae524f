"""Gathering latents from a paged cache and expanding K, in three namespaces, against loops in NumPy."""

import importlib
from typing import Any

import numpy as np
import pytest
from frontends import to_numpy

from mla_interop.errors import MLAInputError
from mla_interop.latents import expand_k, gather

ml_dtypes = pytest.importorskip("ml_dtypes")

DTYPES = ["bfloat16", "float16", "float32", "float8_e4m3fn"]


@pytest.fixture(params=["numpy", "torch", "jax"])
def give(request: pytest.FixtureRequest) -> Any:
    """NumPy values, also of ml_dtypes, to an array of one namespace."""
    if request.param == "numpy":
        return np.asarray
    if request.param == "jax":
        return pytest.importorskip("jax").numpy.asarray
    torch = pytest.importorskip("torch")

    def tensor(values: np.ndarray) -> Any:
        if values.dtype.name in ("bfloat16", "float8_e4m3fn"):
            return torch.from_numpy(values.view(f"int{8 * values.itemsize}")).view(getattr(torch, values.dtype.name))
        return torch.from_numpy(values)

    return tensor


def named(give: Any, dtype: str) -> Any:
    module = type(give(np.zeros(1, np.float32))).__module__
    return getattr(importlib.import_module("torch" if "torch" in module else "ml_dtypes" if hasattr(ml_dtypes, dtype) else "numpy"), dtype)


def wide(array: Any) -> np.ndarray:
    return to_numpy(array).astype(np.float32)


@pytest.mark.parametrize("block", [1, 16, 64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gather_by_block_table(give: Any, dtype: str, block: int, rng: np.random.Generator) -> None:
    """Each row is the block's row that the request's table names; negative rows are zeros; unused table entries are never followed."""
    lengths = (40, 0, 17)
    per_request = -(-max(lengths) // block)
    blocks = 3 * per_request + 2
    cache = (rng.standard_normal((blocks, block, 24)) * 2).astype(getattr(ml_dtypes, dtype, dtype))
    table = rng.permutation(blocks)[: 3 * per_request].reshape(3, per_request).astype(np.int32)
    requests = np.repeat(np.arange(3), lengths).astype(np.int32)
    rows = np.concatenate([np.arange(n) for n in lengths]).astype(np.int32)
    picked = rng.permutation(len(rows))[:30]
    requests, rows = requests[picked], rows[picked]
    rows[4] = rows[9] = -1
    result = "bfloat16" if dtype == "float8_e4m3fn" else dtype
    for scale in (None, 0.25, np.array(0.25, np.float32)):
        given = give(scale) if isinstance(scale, np.ndarray) else scale
        tables = {"block_table": give(table), "requests": give(requests)}
        got = gather(give(cache), give(rows), **tables, scale=given, dtype=named(give, result))
        slots = np.array([table[q, p // block] * block + p % block if p >= 0 else -1 for q, p in zip(requests, rows)], np.int32)
        by_slot = gather(give(cache), give(slots), scale=given, dtype=named(give, result))
        flat = cache.reshape(-1, 24).astype(np.float32) * (1 if scale is None else 0.25)
        expected = np.where(slots[:, None] >= 0, flat[slots], 0).astype(getattr(ml_dtypes, result, result)).astype(np.float32)
        assert str(got.dtype).endswith(result) and (wide(got) == expected).all() and (wide(by_slot) == expected).all()


def test_a_cache_with_strides_of_its_own(give: Any, rng: np.random.Generator) -> None:
    whole = rng.standard_normal((9, 8, 40)).astype(np.float32)
    whole[::2] = np.nan
    rows = np.array([3, 31, 8], np.int64)
    got = gather(give(whole)[1::2, :, 4:30], give(rows))
    assert (wide(got) == whole[1::2, :, 4:30].reshape(-1, 26)[rows]).all()


def test_absent_rows_are_zero_whatever_is_in_the_cache(give: Any) -> None:
    cache = np.full((2, 4, 3), np.nan, np.float32)
    assert (wide(gather(give(cache), give(np.array([-1, -5], np.int32)), scale=2.0)) == 0).all()


@pytest.mark.parametrize("dims", [(5, 3, 128, 64, 128), (4, 2, 24, 0, 8), (0, 3, 16, 8, 16)], ids=str)
def test_expand_k(give: Any, dims: tuple[int, ...], rng: np.random.Generator) -> None:
    rows, heads, nope, rope, v_dim = dims
    kv_up = rng.standard_normal((rows, heads, nope + v_dim)).astype(ml_dtypes.bfloat16)
    latent = rng.standard_normal((rows, 7 + rope)).astype(ml_dtypes.bfloat16)
    expected = np.concatenate([kv_up[..., :nope], np.repeat(latent[:, None, 7:], heads, 1)], -1).astype(np.float32)
    got = expand_k(give(kv_up), give(latent)[:, 7:], nope)
    assert str(got.dtype).endswith("bfloat16") and got.shape == expected.shape and (wide(got) == expected).all()
    if rope:
        token_minor = give(np.ascontiguousarray(kv_up.swapaxes(0, 1))).swapaxes(0, 1)
        assert (wide(expand_k(token_minor, give(latent)[:, 7:], nope)) == expected).all()


def test_into_memory_of_the_caller(give: Any, rng: np.random.Generator) -> None:
    cache, rows = rng.standard_normal((3, 4, 6)).astype(np.float32), np.array([7, 0, 11], np.int32)
    kv_up, k_pe = rng.standard_normal((3, 2, 9)).astype(np.float32), rng.standard_normal((3, 2)).astype(np.float32)
    buffers = [give(np.full(shape, np.nan, np.float32)) for shape in ((3, 6), (3, 2, 7))]
    calls = (lambda out: gather(give(cache), give(rows), out=out), lambda out: expand_k(give(kv_up), give(k_pe), 5, out=out))
    for call, out in zip(calls, buffers):
        if "jax" in type(out).__module__:
            with pytest.raises(MLAInputError, match="^out: got a JAX array"):
                call(out)
            continue
        assert call(out) is out and (wide(out) == wide(call(None))).all()
        with pytest.raises(MLAInputError, match="^out: got shape"):
            call(out[:-1])


def test_what_does_not_belong_together_is_refused(give: Any) -> None:
    cache, rows = give(np.zeros((2, 4, 6), np.float32)), give(np.zeros(3, np.int32))
    table, pairs = give(np.zeros((1, 2), np.int32)), give(np.zeros((3, 1), np.int32))
    refused: list[tuple[str, Any]] = [
        ("cache", lambda: gather(cache[0], rows)),
        ("rows", lambda: gather(cache, pairs)),
        ("block_table, requests", lambda: gather(cache, rows, block_table=table)),
        ("requests", lambda: gather(cache, rows, block_table=table, requests=rows[:2])),
        ("block_table", lambda: gather(cache, rows, block_table=rows, requests=rows)),
        ("dtype", lambda: gather(cache, rows, dtype=named(give, "float8_e4m3fn"))),
        ("kv_up", lambda: expand_k(cache, cache[0], 7)),
        ("kv_up", lambda: expand_k(cache[0], cache[0], 2)),
        ("k_pe", lambda: expand_k(cache, cache, 2)),
        ("k_pe", lambda: expand_k(cache, cache[0], 2)),
    ]
    for argument, call in refused:
        with pytest.raises(MLAInputError, match=f"^{argument}: got"):
            call()


def test_inside_jit() -> None:
    """A pure function of its arrays: row indices are data."""
    jax = pytest.importorskip("jax")
    cache = jax.numpy.arange(48.0).reshape(2, 4, 6)
    traced = jax.jit(lambda c, r, u: expand_k(u, gather(c, r, scale=2.0)[:, 4:], 3))
    got = traced(cache, jax.numpy.asarray([5, -1]), jax.numpy.ones((2, 3, 4)))
    assert got.shape == (2, 3, 5) and np.asarray(got)[0, 1].tolist() == [1, 1, 1, 68, 70] and np.asarray(got)[1, 2].tolist() == [1, 1, 1, 0, 0]
