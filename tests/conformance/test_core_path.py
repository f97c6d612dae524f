"""TRTLLM_RAGGED's kernel through the core and both frontends, on the CPU by way of a stub of FlashInfer: its work list, 8-bit inputs, 16-bit outputs."""

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402
import oracle  # noqa: E402
import stub_packages  # noqa: E402

import mla_interop  # noqa: E402
import torch_side  # noqa: E402
from mla_interop.backends.base import Kernel, MLAPrefillBackend  # noqa: E402
from mla_interop.backends.registry import register_mla_prefill_backend, unregister_mla_prefill_backend  # noqa: E402
from mla_interop.kernels import needs  # noqa: E402
from mla_interop.kernels.blackwell_packages import TRTLLM_RAGGED  # noqa: E402

NAME, HEADS, SCALE = "TRTLLM_ON_CPU", 3, 0.11
CU_Q, CU_K = np.array([0, 5, 5, 9, 42, 48], np.int32), np.array([0, 9, 12, 12, 52, 54], np.int32)  # one without queries, one without keys
OTHER_Q, OTHER_K = np.array([0, 7, 7, 18, 30, 48], np.int32), np.array([0, 2, 7, 7, 41, 54], np.int32)  # other lengths, as many empty ones


class OnCPU(MLAPrefillBackend):
    """The same declaration, for a device that is here."""

    name = NAME
    device_types = ("cpu",)
    supported_dtypes = tuple(TRTLLM_RAGGED.dtypes)

    @classmethod
    def unavailable_reasons(cls) -> list[str]:
        return []

    @classmethod
    def kernels(cls, config: Any) -> tuple[list[Kernel], list[str]]:
        reasons = needs.reasons(TRTLLM_RAGGED.needs, config.traced)
        return ([], reasons) if reasons else ([TRTLLM_RAGGED.kernel(NAME, config)], [])


@pytest.fixture(autouse=True)
def backend(monkeypatch: pytest.MonkeyPatch) -> Any:
    stub_packages.install(monkeypatch, "flashinfer-python", "0.7.4")
    register_mla_prefill_backend(NAME)(OnCPU)
    yield
    unregister_mla_prefill_backend(NAME)
    needs._workspaces.clear()


def arrays(dtype: str) -> list[Any]:
    random = np.random.default_rng(3)
    wide = [random.standard_normal((rows, HEADS, 64 + width)).astype(np.float32) for rows, width in ((48, 192), (54, 192), (54, 128))]
    return [torch.from_numpy(each).to(getattr(torch, dtype))[..., 64:] for each in wide]


def assert_right(q: Any, k: Any, v: Any, out: Any, lse: Any, is_causal: bool, cu_q: np.ndarray = CU_Q, cu_k: np.ndarray = CU_K) -> None:
    lse = np.asarray(lse)
    right, right_lse = oracle.attention(*(x.float().numpy() for x in (q, k, v)), cu_q, cu_k, SCALE, is_causal)
    assert np.linalg.norm(np.asarray(out).astype(np.float64) - right) < 4e-3 * np.linalg.norm(right)
    assert np.array_equal(np.isneginf(lse), np.isneginf(right_lse))
    seen = np.isfinite(right_lse)
    assert np.abs(lse[seen] - right_lse[seen]).max() < 1e-4


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "bfloat16"])
def test_torch(dtype: str, is_causal: bool) -> None:
    q, k, v = arrays(dtype)
    given = {"cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K, "scale": SCALE, "is_causal": is_causal, "return_lse": True, "backend": NAME}
    out, lse = torch_side.mla_prefill(q, k, v, **given)
    assert out.dtype == torch.bfloat16
    assert_right(q, k, v, out.float(), lse, is_causal)
    into = torch.full(out.shape, math.nan, dtype=torch.bfloat16)
    assert torch_side.mla_prefill(q, k, v, out=into, **given)[0] is into and torch.equal(into, out)


def test_an_output_buffer_must_have_the_kernels_dtype() -> None:
    q, k, v = arrays("float8_e4m3fn")
    with pytest.raises(mla_interop.MLAInputError, match=r"out: got .*float8_e4m3fn.*allowed: .*bfloat16"):
        torch_side.mla_prefill(q, k, v, cu_seqlens_q=CU_Q, cu_seqlens_k=CU_K, backend=NAME, out=q.new_empty(48, HEADS, 128))


@pytest.mark.parametrize("dense", [False, True])
def test_a_call_without_keys_has_the_kernels_dtype_too(dense: bool) -> None:
    q, k, v = (x[None] if dense else x for x in arrays("float8_e4m3fn"))
    k, v = (x[:, :0] if dense else x[:0] for x in (k, v))
    out, lse = torch_side.mla_prefill(q, k, v, backend=NAME, return_lse=True)
    assert out.dtype == torch.bfloat16 and not out.any() and bool(lse.isneginf().all())


def test_metadata_that_was_prepared_serves_every_layer() -> None:
    """One work list for both masks; another number of heads needs another."""
    q, k, v = arrays("bfloat16")
    config = mla_interop.MLAPrefillSelectorConfig(dimensions=mla_interop.MLADimensions.from_head_dims(192, 128), num_heads=HEADS, device_type="cpu")
    metadata = torch_side.prepare_metadata(CU_Q, CU_K, device="cpu", config=config, backend=NAME)
    assert metadata.bounds.backend == NAME
    for is_causal in (True, False, True):
        out, lse = torch_side.mla_prefill(q, k, v, metadata=metadata, scale=SCALE, is_causal=is_causal, return_lse=True)
        assert_right(q, k, v, out.float(), lse, is_causal)


def test_lengths_that_the_host_does_not_know_are_refused() -> None:
    config = mla_interop.MLAPrefillSelectorConfig(
        dimensions=mla_interop.MLADimensions.from_head_dims(192, 128), num_heads=HEADS, device_type="cpu", traced=True
    )
    with pytest.raises(mla_interop.MLAUnsupportedError, match="lengths known to the device only"):
        mla_interop.select(config, NAME)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "bfloat16"])
def test_jax(dtype: str) -> None:
    """Inside jit, with metadata as an argument: other lengths with as many empty sequences do not compile again."""
    jax = pytest.importorskip("jax")
    import jax_side

    tensors = arrays(dtype)
    inputs = [jax.numpy.asarray(x.float().numpy()).astype(dtype) for x in tensors]
    config = mla_interop.MLAPrefillSelectorConfig(
        dtype=dtype, dimensions=mla_interop.MLADimensions.from_head_dims(192, 128), num_heads=HEADS, device_type="cpu"
    )
    traces = []

    @jax.jit
    def attend(q: Any, k: Any, v: Any, metadata: Any) -> Any:
        traces.append(1)
        return jax_side.mla_prefill(q, k, v, metadata=metadata, scale=SCALE, return_lse=True)

    for cu_q, cu_k in ((CU_Q, CU_K), (OTHER_Q, OTHER_K)):
        metadata = jax_side.prepare_metadata(cu_q, cu_k, config=config, backend=NAME, num_tokens_q=48, num_tokens_k=54)
        out, lse = attend(*inputs, metadata)
        assert out.dtype == jax.numpy.bfloat16
        assert_right(*tensors, out.astype("float32"), lse, True, cu_q, cu_k)
    assert len(traces) == 1
    out, lse = jax_side.mla_prefill(*inputs, cu_seqlens_q=CU_Q, cu_seqlens_k=CU_K, scale=SCALE, return_lse=True, backend=NAME)
    assert_right(*tensors, out.astype("float32"), lse, True)
