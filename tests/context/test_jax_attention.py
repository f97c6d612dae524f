"""What only ``jax_side`` has: metadata as a pytree, and programs that new lengths do not compile anew."""

from typing import Any

import numpy as np
import pytest
from latents_case import DIMS, LatentCase, assert_near

from mla_interop import MLAInputError

jax = pytest.importorskip("jax")
jax_side = pytest.importorskip("jax_side")

NAMES = ("q", "kv_c", "k_pe", "weight", "cache")


def prepare(case: LatentCase, **settings: Any) -> Any:
    return jax_side.prepare_context_metadata(case.query_lens, case.context_lens, case.arrays["table"], **{"block_size": 16, "workspace_rows": 64, **settings})


def test_new_lengths_inside_a_bucket_do_not_compile_anew() -> None:
    traces = []

    @jax.jit
    def call(q: Any, kv_c: Any, k_pe: Any, weight: Any, cache: Any, metadata: Any) -> Any:
        traces.append(1)
        return jax_side.mla_attention(q, kv_c, k_pe, weight, metadata=metadata, cache=cache, scale=0.21, return_lse=True)

    for query_lens, context_lens in (((5, 3, 9), (70, 0, 100)), ((2, 9, 5), (0, 95, 40)), ((6, 6, 4), (0, 0, 1))):
        case = LatentCase(query_lens, context_lens, tail=17 - sum(query_lens))
        cache = np.full((20, 16, 56), np.nan, np.float32)
        cache[: len(case.arrays["cache"])] = case.arrays["cache"]
        arrays = {**case.arrays, "cache": cache}
        metadata = prepare(case, num_tokens=17, num_context_rows=192)
        assert_near(call(*(arrays[name] for name in NAMES), metadata), case.expected())
    assert len(traces) == 1


def test_a_function_as_projection_and_core_metadata() -> None:
    import mla_interop

    case = LatentCase((5, 3), (70, 20))
    a = case.arrays
    metadata = mla_interop.prepare_context_metadata(case.query_lens, case.context_lens, a["table"], block_size=16, workspace_rows=32, num_context_rows=96)

    def call(weight: Any, metadata: Any) -> Any:
        options = {"metadata": metadata, "cache": a["cache"], "scale": case.scale, "return_lse": True, "dimensions": DIMS}
        return jax_side.mla_attention(a["q"], a["kv_c"], a["k_pe"], lambda x: x @ weight, **options)

    assert_near(call(a["weight"], metadata), case.expected())
    assert_near(jax.jit(call)(a["weight"], metadata), case.expected())


def test_a_block_table_on_the_device_is_used_there() -> None:
    case = LatentCase((5, 3), (70, 20))
    for settings in ({"num_context_rows": None}, {}):
        on_host, on_device = (
            jax_side.prepare_context_metadata(case.query_lens, case.context_lens, table, block_size=16, workspace_rows=32, **settings)
            for table in (case.arrays["table"], jax.numpy.asarray(case.arrays["table"]))
        )
        np.testing.assert_array_equal(on_host.rows, on_device.rows)


def test_what_does_not_fit_is_refused_at_trace_time() -> None:
    case = LatentCase((5, 3), (70, 20))
    a = case.arrays
    with pytest.raises(MLAInputError, match="cache: got None"):
        jax.jit(lambda q, m: jax_side.mla_attention(q, a["kv_c"], a["k_pe"], a["weight"], metadata=m))(a["q"], prepare(case))
    with pytest.raises(MLAInputError, match="q: got list"):
        jax_side.mla_attention([1], a["kv_c"], a["k_pe"], a["weight"], metadata=prepare(case))
    with pytest.raises(MLAInputError, match="cache_scale: got 2.0"):
        jax_side.mla_attention(*(a[n] for n in NAMES[:4]), metadata=prepare(case), cache=a["cache"], cache_scale=2.0)


@pytest.mark.parametrize(
    ("kv_b", "text"),
    [
        (np.ones(7, np.float32), "kv_b: got a weight of (7,); allowed: [L, N * (P + V)]"),
        (lambda x: None, "kv_b: got a function that returns NoneType; allowed: [S, N * (P + V)] with S = "),
        (lambda x: (x,), "kv_b: got a function that returns tuple; allowed: [S, N * (P + V)] with S = "),
        (lambda x: x[:, :7], "kv_b: got a function that returns (8, 7); allowed: [S, N * (P + V)] with S = 8"),
        (lambda x: x[:3], "kv_b: got a function that returns (3, 40); allowed: [S, N * (P + V)] with S = 8"),
    ],
)
def test_an_up_projection_that_is_none_is_refused(kv_b: Any, text: str) -> None:
    case = LatentCase((5, 3), (70, 20))
    a = case.arrays
    with pytest.raises(MLAInputError) as refusal:
        jax_side.mla_attention(a["q"], a["kv_c"], a["k_pe"], kv_b, metadata=prepare(case), cache=a["cache"], dimensions=DIMS)
    assert str(refusal.value).startswith(text)


@pytest.mark.parametrize("name", ["cache", "kv_c", "slot_mapping"])
@pytest.mark.parametrize("wrong", [None, "x", [1], object()], ids=lambda wrong: type(wrong).__name__)
def test_what_is_no_array_is_not_written(name: str, wrong: Any) -> None:
    good = {"cache": np.zeros((3, 4, 6), np.float32), "kv_c": np.ones((2, 4), np.float32), "k_pe": np.ones((2, 2), np.float32), "slot_mapping": np.arange(2)}
    with pytest.raises(MLAInputError, match=f"{name}: got {type(wrong).__name__}; allowed: a jax.Array or a NumPy array"):
        jax_side.write_latent_cache(**{**good, name: wrong})
