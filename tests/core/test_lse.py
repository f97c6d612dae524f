"""LSE conventions and merging, in the three namespaces that the one implementation serves."""

import importlib
import math
from typing import Any

import numpy as np
import oracle
import pytest
from cases import YARN_SCALE, offsets

from mla_interop.errors import MLAInputError
from mla_interop.lse import merge, normalize

NAMESPACES = ["numpy", "torch", "jax"]


@pytest.fixture(params=NAMESPACES)
def give(request: pytest.FixtureRequest) -> Any:
    """NumPy values to an array of one namespace."""
    if request.param == "numpy":
        return np.asarray
    if request.param == "torch":
        return importlib.import_module("torch").from_numpy if pytest.importorskip("torch") else None
    return importlib.import_module("jax.numpy").asarray if pytest.importorskip("jax") else None


def is_jax(give: Any) -> bool:
    return "jax" in type(give(np.zeros(1, np.float32))).__module__


def f32(values: Any) -> np.ndarray:
    return np.array(values, np.float32)


def state(rng: np.random.Generator, tokens: int = 5, heads: int = 3, v_dim: int = 4) -> tuple[np.ndarray, np.ndarray]:
    return f32(rng.standard_normal((tokens, heads, v_dim))), f32(3 * rng.standard_normal((heads, tokens)))


def softmax_merge(*states: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """What merging means, in float64."""
    lses = np.stack([lse for _, lse in states]).astype(np.float64)
    outs = np.stack([out for out, _ in states]).astype(np.float64)
    weights = np.exp(lses - lses.max(axis=0))
    total = weights.sum(axis=0)
    return np.einsum("snt,stnv->tnv", weights / total, outs), np.log(total) + lses.max(axis=0)


def test_base_and_layout_are_converted_by_declaration(give: Any) -> None:
    """flashinfer#2113 (base 2), sglang#9363 (layout, which N == T hides)."""
    natural = f32(np.arange(16).reshape(4, 4) - 7)
    for base, layout in (("e", "NT"), ("2", "NT"), ("e", "TN"), ("2", "TN")):
        native = natural / math.log(2) if base == "2" else natural
        native = np.ascontiguousarray(native.T if layout == "TN" else native).astype(np.float32)
        np.testing.assert_allclose(np.asarray(normalize(give(native), base, layout)), natural, rtol=1e-6)


def test_plus_infinity_means_no_key(give: Any) -> None:
    """vllm#15492: FlashAttention-2 marks rows without a key by +inf, FlashAttention-3 by -inf."""
    assert np.asarray(normalize(give(f32([[math.inf, 1.5, -math.inf, 0.0]])))).tolist() == [[-math.inf, 1.5, -math.inf, 0.0]]


def test_normalised_is_float32_and_the_operand_is_unchanged(give: Any) -> None:
    native = give(np.array([[math.inf, 1.0]], np.float16))
    assert str(normalize(native).dtype).endswith("float32") and float(native[0, 0]) == math.inf


def test_merge_is_the_softmax_over_both(give: Any, rng: np.random.Generator) -> None:
    a, b = state(rng), state(rng)
    out, lse = merge(*(give(x) for x in (*a, *b)))
    expected, expected_lse = softmax_merge(a, b)
    np.testing.assert_allclose(np.asarray(out), expected, rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(np.asarray(lse), expected_lse, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -3e38, 5.0])
@pytest.mark.parametrize("mark", [-math.inf, math.inf])
def test_an_empty_side_gives_the_other_bit_for_bit(give: Any, rng: np.random.Generator, garbage: float, mark: float) -> None:
    """vllm#15492, flashinfer#4975: LSE says empty, out is NaN, and 0 * NaN is NaN."""
    out, lse = state(rng)
    empty = np.full_like(out, garbage), np.full_like(lse, mark)
    for operands in ((*empty, out, lse), (out, lse, *empty)):
        merged, merged_lse = merge(*map(give, operands))
        assert np.asarray(merged).tobytes() == out.tobytes() and np.asarray(merged_lse).tobytes() == lse.tobytes()


def test_empty_on_both_sides_is_empty(give: Any) -> None:
    """vllm#27491: -inf minus -inf is NaN."""
    nothing = np.full((2, 1, 4), math.nan, np.float32), f32([[-math.inf, math.inf]])
    out, lse = merge(*map(give, (*nothing, *nothing)))
    assert not np.asarray(out).any() and np.isneginf(np.asarray(lse)).all()


def test_three_chunks_of_which_a_sequence_has_keys_in_the_last_alone(give: Any, rng: np.random.Generator) -> None:
    """vllm#27491: sequence A (row 0) has keys in chunk 3 only, sequence B (row 1) in all."""
    chunks = [state(rng, tokens=2, heads=1) for _ in range(3)]
    for out, lse in chunks[:2]:
        out[0], lse[:, 0] = math.nan, -math.inf
    merged = merge(*merge(*map(give, (*chunks[0], *chunks[1]))), *map(give, chunks[2]))
    assert np.asarray(merged[0])[0].tobytes() == chunks[2][0][0].tobytes()
    expected, _ = softmax_merge(*[(out[1:], lse[:, 1:]) for out, lse in chunks])
    np.testing.assert_allclose(np.asarray(merged[0])[1:], expected, rtol=2e-5, atol=1e-6)


def test_a_finite_lse_of_an_empty_row_has_to_be_masked_before(give: Any, rng: np.random.Generator) -> None:
    """vllm#49294: merge cannot know; ``tests/contract/test_stubs.py`` shows that the adapter, which knows the lengths, does it."""
    out, lse = state(rng)
    merged, _ = merge(*map(give, (out, lse, np.full_like(out, 9.0), np.zeros_like(lse))))
    assert not np.allclose(np.asarray(merged), out)


def test_merge_is_associative_and_commutative(give: Any, rng: np.random.Generator) -> None:
    a, b, c = (tuple(map(give, state(rng))) for _ in range(3))
    left, right, turned = merge(*merge(*a, *b), *c), merge(*a, *merge(*b, *c)), merge(*c, *merge(*b, *a))
    for other in (right, turned):
        for x, y in zip(left, other):
            np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=1e-5, atol=1e-6)


def test_many_chunks_do_not_add_up_errors(give: Any, rng: np.random.Generator) -> None:
    """vllm#26042: the error must not grow with the number of chunks."""
    states = [state(rng) for _ in range(64)]
    total = tuple(map(give, states[0]))
    for out, lse in states[1:]:
        total = merge(*total, give(out), give(lse))
    expected, expected_lse = softmax_merge(*states)
    np.testing.assert_allclose(np.asarray(total[0]), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(np.asarray(total[1]), expected_lse, rtol=0, atol=1e-5)


@pytest.mark.parametrize("difference", [0.0, 50.0, 500.0, 1e30])
def test_sides_of_very_different_weight(give: Any, difference: float) -> None:
    out_a, out_b = np.ones((1, 1, 2), np.float32), np.full((1, 1, 2), 3, np.float32)
    out, lse = merge(*map(give, (out_a, f32([[difference]]), out_b, f32([[-difference]]))))
    assert np.asarray(out).ravel().tolist() == ([2.0, 2.0] if difference == 0 else [1.0, 1.0])
    assert float(np.asarray(lse)[0, 0]) == pytest.approx(difference + (math.log(2) if difference == 0 else 0.0))


@pytest.mark.parametrize("side", ["a", "b", "both"])
def test_strided_operands_are_read_by_their_own_strides(give: Any, rng: np.random.Generator, side: str) -> None:
    """local-inference-lab/vllm#17: one side a [..., :128] view of a wider buffer, read with the other side's strides."""
    states = {"a": state(rng, v_dim=128), "b": state(rng, v_dim=128)}
    compact = merge(*map(give, (*states["a"], *states["b"])))
    views = []
    for name, (out, lse) in states.items():
        wide = np.full((*out.shape[:2], 192), np.nan, np.float32)
        wide[..., :128] = out
        token_major = np.ascontiguousarray(lse.T)
        chosen = side in (name, "both")
        views += [give(wide)[..., :128], give(token_major).T] if chosen else [give(out), give(lse)]
    strided = merge(*views)
    assert all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in zip(compact, strided))


def test_operands_may_be_the_same_array_and_are_not_written(give: Any, rng: np.random.Generator) -> None:
    out, lse = state(rng)
    before = out.tobytes(), lse.tobytes()
    given = give(out), give(lse)
    merged, merged_lse = merge(*given, *given)
    np.testing.assert_allclose(np.asarray(merged), out, rtol=1e-6)
    np.testing.assert_allclose(np.asarray(merged_lse), lse + math.log(2), rtol=1e-5, atol=1e-6)
    assert (out.tobytes(), lse.tobytes()) == before


def test_the_result_has_the_dtype_of_out(give: Any, rng: np.random.Generator) -> None:
    a, b = state(rng), state(rng)
    for other in (np.float16, np.float32):
        out, lse = merge(give(a[0].astype(np.float16)), give(a[1]), give(b[0].astype(other)), give(b[1]))
        _check_float16(out, lse, a, b)


def _check_float16(out: Any, lse: Any, a: Any, b: Any) -> None:
    assert str(out.dtype).endswith("float16") and str(lse.dtype).endswith("float32")
    np.testing.assert_allclose(np.asarray(out), softmax_merge(a, b)[0], rtol=0, atol=5e-3)


@pytest.mark.parametrize("split", [(4096, 16), (256, 16), (16, 256), (16, 16)], ids=str)
def test_lopsided_splits_show_a_wrong_base(split: tuple[int, int], rng: np.random.Generator) -> None:
    """sglang#40903: two base-2 LSEs merged as natural ones. 4096 + 4096 keys hide it; these do not, and the right base is right."""
    keys, dim = sum(split), 48
    q, k, v = rng.standard_normal((4, 1, dim)), rng.standard_normal((keys, 1, dim)), rng.standard_normal((keys, 1, 32))
    cut = split[0]
    parts = [oracle.attention(q, k[x], v[x], offsets([4]), offsets([len(k[x])]), YARN_SCALE, False) for x in (slice(0, cut), slice(cut, None))]
    whole, whole_lse = oracle.attention(q, k, v, offsets([4]), offsets([keys]), YARN_SCALE, False)
    parts = [(f32(out), f32(lse)) for out, lse in parts]
    out, lse = merge(*parts[0], *parts[1])
    np.testing.assert_allclose(out, whole, rtol=0, atol=1e-6)
    np.testing.assert_allclose(lse, whole_lse, rtol=0, atol=1e-5)
    wrong, _ = merge(parts[0][0], parts[0][1] / math.log(2), parts[1][0], parts[1][1] / math.log(2))
    if split[0] != split[1]:
        assert np.abs(wrong - whole).max() > 1e-3


def wrong_shapes(out: np.ndarray, lse: np.ndarray) -> dict[str, tuple[Any, ...]]:
    return {
        "out_a": (out[0], lse, out, lse),
        "out_b": (out, lse, out[:-1], lse),
        "lse_a": (out, lse.T, out, lse),
        "lse_b": (out, lse, out, lse[:-1]),
    }


@pytest.mark.parametrize("argument", ["out_a", "out_b", "lse_a", "lse_b"])
def test_shapes_that_do_not_belong_together_are_refused(give: Any, rng: np.random.Generator, argument: str) -> None:
    """sglang#9363: a token-major lse fits by broadcasting where N is 1 or T."""
    with pytest.raises(MLAInputError, match=f"^{argument}: "):
        merge(*map(give, wrong_shapes(*state(rng))[argument]))


@pytest.mark.parametrize("target", ["a", "b", "new", "lse of a, out of b"])
def test_in_place_gives_what_out_of_place_gives(give: Any, rng: np.random.Generator, target: str) -> None:
    """local-inference-lab/vllm#468: the accumulator is an operand. One row is empty on either side, one on both, all with NaN in out."""
    a, b = state(rng), state(rng)
    for side, row in ((a, 0), (b, 1), (a, 2), (b, 2)):
        side[0][row], side[1][:, row] = math.nan, (math.inf, -math.inf)[row % 2]
    if is_jax(give):
        with pytest.raises(MLAInputError, match="JAX array, which cannot be written"):
            merge(*map(give, (*a, *b)), out=give(a[0]))
        return
    expected = [np.asarray(x).tobytes() for x in merge(*map(give, (*a, *b)))]
    operands = [give(x.copy()) for x in (*a, *b)]
    fresh = give(np.full_like(a[0], math.nan)), give(np.full_like(a[1], math.nan))
    out, lse = {"a": operands[:2], "b": operands[2:], "new": fresh, "lse of a, out of b": (operands[2], operands[1])}[target]
    got, got_lse = merge(*operands, out=out, lse=lse)
    assert got is out and got_lse is lse
    assert [np.asarray(out).tobytes(), np.asarray(lse).tobytes()] == expected


def test_in_place_over_a_range_of_rows_with_unequal_strides(give: Any, rng: np.random.Generator) -> None:
    """A chunk's first request is merged into its rows of the accumulator, which is a view of wider memory."""
    if is_jax(give):
        pytest.skip("JAX arrays have no views, and are not written")
    (out, lse), part = state(rng, tokens=7, v_dim=4), state(rng, tokens=3, v_dim=4)
    wide, token_major = np.full((7, 3, 9), 5, np.float32), np.ascontiguousarray(lse.T)
    wide[..., 2:6] = out
    wide, token_major = give(wide), give(token_major)
    rows = wide[2:5, :, 2:6], token_major[2:5].T
    merge(*rows, *map(give, part), out=rows[0], lse=rows[1])
    expected, expected_lse = merge(out[2:5], lse[:, 2:5], *part)
    out[2:5], lse[:, 2:5] = expected, expected_lse
    np.testing.assert_allclose(np.asarray(wide)[..., 2:6], out, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(np.asarray(token_major).T, lse, rtol=1e-6, atol=1e-6)
    assert (np.asarray(wide)[..., :2] == 5).all() and (np.asarray(wide)[..., 6:] == 5).all()


def test_an_array_to_write_to_must_fit(rng: np.random.Generator) -> None:
    a, b = state(rng), state(rng)
    for name in ("out", "lse"):
        with pytest.raises(MLAInputError, match=f"^{name}: got shape"):
            merge(*a, *b, **{name: np.empty((2, 2), np.float32)})


def test_the_accumulator_may_be_wider_than_the_parts(give: Any, rng: np.random.Generator) -> None:
    """float32 over bfloat16 parts, and float64, bit for bit where a side is empty."""
    (out, lse), other = state(rng), state(rng)
    wide = out.astype(np.float64) + 1e-12
    if is_jax(give):
        wide = out
    empty = np.full_like(lse, -math.inf)
    assert np.asarray(merge(give(wide), give(lse), give(other[0]), give(empty))[0]).tobytes() == wide.tobytes()
    half = out.astype(np.float16), other[0].astype(np.float16)
    if not is_jax(give):
        target = give(np.empty(out.shape, np.float32))
        merge(give(half[0]), give(lse), give(half[1]), give(other[1]), out=target)
        exact, _ = softmax_merge((half[0], lse), (half[1], other[1]))
        np.testing.assert_allclose(np.asarray(target), exact, rtol=1e-6, atol=1e-6)


def test_a_nan_of_lse_shows(give: Any, rng: np.random.Generator) -> None:
    """A failed kernel must not be dropped by a maximum that ignores NaN."""
    for side in (1, 3):
        operands = [x.copy() for x in (*state(rng), *state(rng))]
        operands[side][1, 2] = math.nan
        out, lse = map(np.asarray, merge(*map(give, operands)))
        assert np.isnan(lse[1, 2]) and np.isnan(out[2, 1]).all() and np.isnan(out).sum() == out.shape[2]


def test_operands_that_are_no_arrays_or_of_two_frameworks(give: Any) -> None:
    out, lse = (give(x) for x in state(np.random.default_rng(2)))
    with pytest.raises(MLAInputError, match="out_b: got NoneType; allowed: an array"):
        merge(out, lse, None, lse)
    with pytest.raises(MLAInputError, match="lse_a: got list; allowed: an array"):
        merge(out, [1.0], out, lse)
    other = pytest.importorskip("torch").zeros(out.shape) if give is np.asarray else np.zeros(out.shape, np.float32)
    with pytest.raises(MLAInputError, match="out_a, lse_a, out_b, lse_b: got .*; allowed: arrays of one framework"):
        merge(out, lse, other, lse)


@pytest.mark.parametrize("name", ["out_a", "lse_a", "out_b", "lse_b", "out", "lse"])
def test_what_cannot_be_merged_is_refused_in_words(name: str) -> None:
    """Integers took part in the arithmetic, and an integer array to write to cut the result."""
    torch = pytest.importorskip("torch")
    good = {"out_a": torch.ones(4, 3, 8), "lse_a": torch.zeros(3, 4), "out_b": torch.ones(4, 3, 8), "lse_b": torch.zeros(3, 4)}
    one = good["out_a" if name.startswith("out") else "lse_a"]
    wrong = {
        "dtype torch.int32; allowed: bfloat16, float16, float32 or float64": one.int(),
        "dtype torch.bool; allowed: bfloat16": one.bool(),
        "dtype torch.complex64; allowed: bfloat16": one.to(torch.complex64),
        "layout torch.sparse_coo; allowed: a strided tensor": one.to_sparse(),
        "device .*; allowed: out_a's device, ": one.to("meta"),
        "list; allowed: an array": [1.0],
    }
    for text, value in wrong.items():
        where = r"\w+" if "device" in text else name  # if out_a is elsewhere, so is everything else
        with pytest.raises(MLAInputError, match=f"^{where}: got {text}"):
            merge(**{**good, name: value})


def test_a_gradient_is_kept() -> None:
    torch = pytest.importorskip("torch")
    out = torch.ones(4, 3, 8, requires_grad=True)
    merge(out, torch.zeros(3, 4), torch.ones(4, 3, 8), torch.zeros(3, 4))[0].sum().backward()
    torch.testing.assert_close(out.grad, torch.full((4, 3, 8), 0.5))


@pytest.mark.gpu
def test_a_gradient_is_kept_on_a_gpu() -> None:
    """The fused kernel has none, and gave a result without one."""
    torch = pytest.importorskip("torch")
    out, lse = torch.ones(4, 3, 8, device="cuda", requires_grad=True), torch.zeros(3, 4, device="cuda")
    merge(out, lse, torch.ones(4, 3, 8, device="cuda"), lse)[0].sum().backward()
    torch.testing.assert_close(out.grad, torch.full((4, 3, 8), 0.5, device="cuda"))
