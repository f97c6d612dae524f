"""Arrays on several devices: one shard each, nothing gathered, and refusals of what would be wrong; on four simulated CPU devices."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
pytest.importorskip("torch", reason="CPU_SDPA's kernel is torch's")

import jax.numpy as jnp  # noqa: E402
from jax.sharding import AxisType, NamedSharding, PartitionSpec  # noqa: E402
from mesh_case import CU_K, CU_Q, HEADS, ROWS_K, ROWS_Q, assert_right, calls, collectives, mesh, problem  # noqa: E402

import jax_side  # noqa: E402
from jax_side import kernel_call  # noqa: E402
from mla_interop import MLAInputError, MLAUnsupportedError, prepare_metadata  # noqa: E402
from mla_interop.exchange import TensorSpec  # noqa: E402
from mla_interop.prefill import Options, bind, resolve  # noqa: E402

if len(jax.devices("cpu")) < 4:
    pytest.skip("JAX was started with fewer than 4 CPU devices", allow_module_level=True)

OVER_HEADS = PartitionSpec(None, "h", None)


def attention(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any) -> Any:
    return jax_side.mla_prefill(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, return_lse=True, backend="CPU_SDPA")


def placed(on: Any, spec: PartitionSpec, *arrays: Any) -> list[Any]:
    return [jax.device_put(x, NamedSharding(on, spec)) for x in arrays]


@pytest.mark.parametrize("axis_type", ["Auto", "Explicit"])
@pytest.mark.parametrize("host_lengths", [False, True])
def test_heads_run_one_shard_per_device_and_nothing_is_gathered(axis_type: str, host_lengths: bool) -> None:
    """jax#32098, jax#38551, marin#6470."""
    on, arrays = mesh(axis_type, h=4), problem()
    sharded = placed(on, OVER_HEADS, *arrays)
    lengths = [] if host_lengths else placed(on, PartitionSpec(), CU_Q, CU_K)
    run = jax.jit(lambda q, k, v, *cu: attention(q, k, v, *(cu or (CU_Q, CU_K))))
    for made in (run(*sharded, *lengths), attention(*sharded, *(lengths or (CU_Q, CU_K)))):
        assert_right(made, *arrays)
        assert made[0].sharding.shard_shape(made[0].shape) == (ROWS_Q, HEADS // 4, 128)
        assert made[1].sharding.shard_shape(made[1].shape) == (HEADS // 4, ROWS_Q)
    text = run.lower(*sharded, *lengths).compile().as_text()
    assert calls(text) == [f"f32[{ROWS_Q},{HEADS // 4},128]"] and not collectives(text)


def test_the_search_for_collectives_finds_them() -> None:
    """Tokens that are split are gathered by plain jit under automatic axes, where types say nothing."""
    on, arrays = mesh("Auto", h=4), problem(rows_q=16)
    q, k, v = (*placed(on, PartitionSpec("h"), arrays[0]), *placed(on, PartitionSpec(), *arrays[1:]))
    run = jax.jit(lambda *x: attention(*x, CU_Q, CU_K))
    assert_right(run(q, k, v), *arrays)
    text = run.lower(q, k, v).compile().as_text()
    assert "all-gather" in collectives(text) and calls(text) == [f"f32[16,{HEADS},128]"]


def test_on_one_device_nothing_of_the_rule_is_left() -> None:
    """The call itself is all there is, with the operands as they came."""
    arrays = [jnp.asarray(x) for x in (*problem(), CU_Q, CU_K)]
    text = jax.jit(attention).lower(*arrays).compile().as_text()
    assert len(calls(text)) == 1 and "CustomSPMDPartitioning" not in text
    body = text[text.index("ENTRY") :].splitlines()
    assert not [line for line in body if " = " in line and not any(word in line for word in ("parameter(", "custom-call(", "get-tuple-element(", "tuple("))]


def test_a_projection_before_and_after_keeps_heads_where_they_are() -> None:
    """A layer: the rule takes part in XLA's propagation, with weights alone placed."""
    on = mesh("Auto", h=4)
    x = jax.device_put(np.random.default_rng(0).standard_normal((ROWS_Q, 32)).astype(np.float32), NamedSharding(on, PartitionSpec()))
    weights = [np.random.default_rng(i).standard_normal((32, HEADS, d)).astype(np.float32) * 0.1 for i, d in enumerate((192, 192, 128))]
    split = placed(on, OVER_HEADS, *weights)
    cu = CU_Q

    def layer(x: Any, *weights: Any) -> Any:
        q, k, v = (jnp.einsum("tm,mhd->thd", x, w) for w in weights)
        return jax_side.mla_prefill(q, k, v, cu_seqlens_q=cu, return_lse=True, backend="CPU_SDPA")

    run = jax.jit(layer)
    text = run.lower(x, *split).compile().as_text()
    assert calls(text) == [f"f32[{ROWS_Q},{HEADS // 4},128]"] and "all-gather" not in collectives(text)
    q, k, v = (np.einsum("tm,mhd->thd", x, w) for w in weights)
    assert_right(run(x, *split), q, k, v, cu, cu)


def test_a_kernel_with_a_work_list_refuses_split_heads_in_words() -> None:
    """Its list is for all heads, and the partitioner cannot make another."""
    on, arrays = mesh("Auto", h=4), problem()
    specs = [TensorSpec(x.shape, None, "float32", "cpu") for x in arrays]
    call = resolve(*specs, Options(backend="CPU_SDPA", return_lse=True), 4, False)
    bound = bind(call, prepare_metadata(jnp.asarray(CU_Q), jnp.asarray(CU_K), num_tokens_q=ROWS_Q, num_tokens_k=ROWS_K), ROWS_K, exact=False)
    made = kernel_call.KernelCall.of(call, bound, ROWS_K)
    operands = (*placed(on, OVER_HEADS, *arrays), *placed(on, PartitionSpec(), CU_Q, CU_K, np.zeros(16, np.uint8)))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"MLAUnsupportedError: .* heads split over h: its work list is for all heads.*sharded_mla_prefill"):
        jax.jit(lambda *x: kernel_call.custom_call(made, *x))(*operands)


@pytest.mark.parametrize(
    ("specs", "text"),
    [
        ((PartitionSpec("h"), PartitionSpec(), PartitionSpec()), r"q: got the sharding .*'h', None, None.*; allowed: heads split \(dimension 1\), or nothing"),
        ((OVER_HEADS, PartitionSpec("h"), OVER_HEADS), "k: got the sharding .*context_parallel_mla_prefill"),
        ((PartitionSpec(None, None, "h"),) * 3, "q: got the sharding"),
        ((OVER_HEADS, PartitionSpec(), PartitionSpec()), "q, k, v: got the shardings .*; allowed: the same for all three"),
    ],
)
@pytest.mark.parametrize("jitted", [True, False])
def test_wrong_shardings_of_an_explicit_mesh_are_refused(specs: tuple[Any, ...], text: str, jitted: bool) -> None:
    """Tokens that are split while the lengths are not are wrong data, not a slow path."""
    on, arrays = mesh("Explicit", h=4), problem(rows_q=16)
    operands = [placed(on, spec, x)[0] for spec, x in zip(specs, arrays)]
    run: Callable[..., Any] = jax.jit(lambda *x: attention(*x, CU_Q, CU_K)) if jitted else lambda *x: attention(*x, CU_Q, CU_K)
    with pytest.raises(MLAInputError, match=text):
        run(*operands)


def test_explicit_axes_beside_automatic_ones() -> None:
    on = jax.make_mesh((2, 2), ("h", "x"), axis_types=(AxisType.Explicit, AxisType.Auto), devices=jax.devices("cpu")[:4])
    arrays = problem()
    assert_right(jax.jit(lambda *x: attention(*x, CU_Q, CU_K))(*placed(on, OVER_HEADS, *arrays)), *arrays)


def test_a_dense_batch_of_an_explicit_mesh_is_split_over_sequences_too() -> None:
    on = mesh("Explicit", d=2, h=2)
    q, k, v = (np.random.default_rng(d).standard_normal((4, n, 2, d)).astype(np.float32) for n, d in ((5, 192), (9, 192), (9, 128)))
    sharded = placed(on, PartitionSpec("d", None, "h", None), q, k, v)
    run = jax.jit(lambda *x: jax_side.mla_prefill(*x, return_lse=True, backend="CPU_SDPA"))
    out, lse = map(np.asarray, run(*sharded))
    for b in range(4):
        assert_right((out[b], lse[b]), q[b], k[b], v[b], np.array([0, 5]), np.array([0, 9]))
    text = run.lower(*sharded).compile().as_text()
    assert calls(text) == ["f32[10,1,128]"] and not collectives(text)
    with pytest.raises(MLAInputError, match=r"q: got the sharding .*; allowed: batch \(dimension 0\) and heads \(dimension 2\) split"):
        run(*placed(on, PartitionSpec(None, None, None, "h"), q, k, v))


# Sequences of each of two shards, one after the other; both kinds of rows without a key, and padding in both.
PER_SHARD_Q, PER_SHARD_K = np.array([0, 3, 3, 7, 0, 0, 8, 8], np.int32), np.array([0, 5, 6, 9, 0, 4, 4, 12], np.int32)


@pytest.mark.parametrize("axis_type", ["Auto", "Explicit"])
@pytest.mark.parametrize("lengths", ["host", "traced"])
@pytest.mark.parametrize("backend", ["CPU_SDPA", "REFERENCE"])
def test_sequences_and_heads_split(axis_type: str, lengths: str, backend: str) -> None:
    on, arrays = mesh(axis_type, d=2, h=2), problem(rows_q=16)
    call = jax_side.sharded_mla_prefill(on, head_axis="h", data_axis="d")
    cu = () if lengths == "host" else placed(on, PartitionSpec("d"), PER_SHARD_Q, PER_SHARD_K)

    @jax.jit
    def run(q: Any, k: Any, v: Any, *cu: Any) -> Any:
        cu_q, cu_k = cu or (PER_SHARD_Q, PER_SHARD_K)
        return call(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, return_lse=True, backend=backend, scale=0.1)

    sharded = placed(on, PartitionSpec("d", "h", None), *arrays)
    out, lse = map(np.asarray, run(*sharded, *cu))
    for shard in range(2):
        q, k, v = (x[shard * n : (shard + 1) * n] for x, n in zip(arrays, (8, 12, 12)))
        piece = slice(4 * shard, 4 * shard + 4)
        assert_right((out[8 * shard :][:8], lse[:, 8 * shard :][:, :8]), q, k, v, PER_SHARD_Q[piece], PER_SHARD_K[piece], scale=0.1)
    if backend == "CPU_SDPA":
        text = run.lower(*sharded, *cu).compile().as_text()
        assert calls(text) == [f"f32[8,{HEADS // 2},128]"] and not set(collectives(text)) - {"dynamic-slice"}


def test_lengths_per_shard_are_data() -> None:
    """New lengths inside a bucket do not trace again."""
    on, (q, k, v), traces = mesh("Auto", d=2, h=2), problem(rows_q=16), []
    call = jax_side.sharded_mla_prefill(on, head_axis="h", data_axis="d")

    @jax.jit
    def run(cu: Any) -> Any:
        traces.append(1)
        return call(q, k, v, cu_seqlens_q=cu, backend="CPU_SDPA", return_lse=True)

    for cu in ([0, 3, 7, 0, 8, 8], [0, 0, 8, 0, 1, 2]):
        out, lse = run(jnp.asarray(cu, jnp.int32))
        assert_right((out[8:], lse[:, 8:]), q[8:], k[12:][:12], v[12:][:12], np.array(cu[3:]), np.array(cu[3:]))
    assert len(traces) == 1


@pytest.mark.parametrize("how", ["metadata", "lengths", "none"])
def test_heads_alone(how: str) -> None:
    on, (q, k, v) = mesh("Auto", h=4), problem()
    call = jax_side.sharded_mla_prefill(on, head_axis="h")
    if how == "none":
        assert_right(jax.jit(lambda *x: call(*x, return_lse=True))(q, k, v), q, k, v, np.array([0, ROWS_Q]), np.array([0, ROWS_K]))
        return
    metadata = jax_side.prepare_metadata(CU_Q, CU_K, num_tokens_q=ROWS_Q, num_tokens_k=ROWS_K)
    lengths = {"metadata": metadata} if how == "metadata" else {"cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K}
    assert_right(jax.jit(lambda *x: call(*x, return_lse=True, **lengths))(q, k, v), q, k, v)
    assert_right(call(q, k, v, return_lse=True, **lengths), q, k, v)


def test_a_dense_batch_by_hand() -> None:
    on = mesh("Auto", d=4)
    q, k, v = (np.random.default_rng(d).standard_normal((4, n, 3, d)).astype(np.float32) for n, d in ((5, 192), (9, 192), (9, 128)))
    out, lse = jax.jit(lambda *x: jax_side.sharded_mla_prefill(on, data_axis="d")(*x, return_lse=True))(q, k, v)
    for b in range(4):
        assert_right((out[b], lse[b]), q[b], k[b], v[b], np.array([0, 5]), np.array([0, 9]))


@pytest.mark.parametrize(
    ("axes", "options", "text"),
    [
        ({"head_axis": "tensor"}, {}, "head_axis: got 'tensor'; allowed: axes of the mesh: d, h"),
        ({"head_axis": "h", "data_axis": "d"}, {}, r"cu_seqlens_q: got None with data_axis; allowed: one prefix sum per shard"),
        ({"data_axis": "d"}, {"cu_seqlens_q": [0, 3, 7, 16]}, r"cu_seqlens_q: got a first value of 7; allowed: 0"),  # a global one
        ({"data_axis": "d"}, {"cu_seqlens_q": [0, 3, 16]}, r"cu_seqlens_q: got shape \(3,\); allowed: one prefix sum for each of the 2 shards"),
        ({"data_axis": "d"}, {"cu_seqlens_q": [0, 9, 0, 8]}, "num_tokens_q: got 8 tokens; allowed: at least the last cumulative length, 9"),
        ({"data_axis": ("d", "h")}, {"cu_seqlens_q": [0, 1] * 4}, None),
        ({"head_axis": ("d", "h")}, {"rows_heads": 6}, r"heads: got 6; allowed: a multiple of the 4 shards of \('d', 'h'\). Pad it."),
        ({"data_axis": "d"}, {"metadata": True}, "metadata: got given with data_axis"),
    ],
)
def test_refusals_of_the_sharded_call(axes: dict[str, Any], options: dict[str, Any], text: str | None) -> None:
    on, (q, k, v) = mesh("Auto", d=2, h=2), problem(rows_q=16, heads=options.pop("rows_heads", 8))
    if options.get("metadata"):
        options = {"metadata": jax_side.prepare_metadata(CU_Q, CU_K)}

    def run() -> Any:
        return jax_side.sharded_mla_prefill(on, **axes)(q, k, v, backend="CPU_SDPA", **options)

    if text is None:
        assert run().shape == (16, 8, 128)
        return
    with pytest.raises(MLAInputError, match=text):
        run()


def test_unknown_options_are_a_type_error() -> None:
    on, arrays = mesh("Auto", h=4), problem()
    with pytest.raises(TypeError, match="unexpected keyword arguments sclae; allowed: cu_seqlens_q"):
        jax_side.sharded_mla_prefill(on, head_axis="h")(*arrays, sclae=1.0)


def test_transformations_of_a_sharded_call_are_refused_in_the_same_words() -> None:
    on, (q, k, v) = mesh("Auto", h=4), problem()
    call = jax_side.sharded_mla_prefill(on, head_axis="h")
    with pytest.raises(MLAUnsupportedError, match="is forward only"):
        jax.grad(lambda q: call(q, k, v, backend="CPU_SDPA").sum())(q)
    grads = jax.jit(jax.grad(lambda q: call(q, k, v, backend="REFERENCE").sum()))(q)
    whole = jax.jit(jax.grad(lambda q: jax_side.mla_prefill(q, k, v, backend="REFERENCE").sum()))(q)
    np.testing.assert_allclose(grads, whole, rtol=1e-4, atol=1e-5)
