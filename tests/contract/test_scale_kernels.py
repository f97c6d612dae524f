"""A backend with one kernel for ordinary scales and another for the rest: calls that differ in scale alone never get each other's, by any way in."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import oracle
import pytest

torch = pytest.importorskip("torch")

import stub_kernels  # noqa: E402

import mla_interop  # noqa: E402
import torch_side  # noqa: E402
from mla_interop.backends.base import Kernel, MLAPrefillBackend  # noqa: E402
from mla_interop.backends.flash_attn import FlashAttnBackend  # noqa: E402
from mla_interop.backends.registry import register_mla_prefill_backend, unregister_mla_prefill_backend  # noqa: E402
from mla_interop.installed import assume_installed  # noqa: E402
from mla_interop.kernels import fa4, torch_call  # noqa: E402

NAME, HEADS = "TWO_KERNELS", 3
CU_Q, CU_K = np.array([0, 5, 5, 11], np.int32), np.array([0, 9, 12, 20], np.int32)
SCALES = (0.11, 0.0, None, -0.07, 0.11, 1e-42, 0.0)  # each kind again after the other


def only_for(any_scale: bool) -> stub_kernels.Attention:
    """The right answer, from a kernel that must not see the other one's scales."""

    def stub(*arguments: Any) -> Any:
        assert (arguments[7] < fa4.SMALLEST_SCALE) == any_scale, f"scale {arguments[7]} came to the other kernel"
        return stub_kernels.attention(*arguments)

    return stub


class TwoKernels(MLAPrefillBackend):
    """As FLASH_ATTN, for a device that is here."""

    name = NAME
    device_types = ("cpu",)

    @classmethod
    def unavailable_reasons(cls) -> list[str]:
        return []

    @classmethod
    def kernels(cls, config: Any) -> tuple[list[Kernel], list[str]]:
        any_scale = config.scale is not None and config.scale < fa4.SMALLEST_SCALE

        def make() -> Callable[..., None]:
            return torch_call.adapt(only_for(any_scale), is_causal=config.is_causal, pad_v=False)

        name = config.kernel_name(NAME, "stub", any_scale)
        return [Kernel(name=name, kind="python", make=make, strided=frozenset("qkv"), native_empty_rows=False)], []


@pytest.fixture(autouse=True)
def backend() -> Iterator[None]:
    register_mla_prefill_backend(NAME)(TwoKernels)
    yield
    unregister_mla_prefill_backend(NAME)


def arrays() -> list[np.ndarray]:
    random = np.random.default_rng(5)
    return [random.standard_normal((rows, HEADS, width)).astype(np.float32) for rows, width in ((11, 192), (20, 192), (20, 128))]


def assert_right(made: Any, scale: float | None) -> None:
    q, k, v = (torch.from_numpy(x).to(torch.bfloat16).float().numpy() for x in arrays())
    right, right_lse = oracle.attention(q, k, v, CU_Q, CU_K, 192**-0.5 if scale is None else scale, True)
    out, lse = (np.asarray(x.float() if isinstance(x, torch.Tensor) else x).astype(np.float64) for x in made)
    assert np.linalg.norm(out - right) < 1e-2 * np.linalg.norm(right)
    seen = np.isfinite(right_lse)
    assert np.array_equal(np.isneginf(lse), ~seen) and np.abs(lse[seen] - right_lse[seen]).max() < 1e-3


@pytest.mark.parametrize("way", ["lengths", "metadata", "on the device", "neutral", "compiled"])
def test_torch(way: str) -> None:
    tensors = [torch.from_numpy(x).to(torch.bfloat16) for x in arrays()]
    metadata = torch_side.prepare_metadata(CU_Q, CU_K, device="cpu", num_tokens_q=11, num_tokens_k=20)
    of_host = {"cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K}
    lengths = {"lengths": of_host, "neutral": of_host, "on the device": {name: torch.from_numpy(x) for name, x in of_host.items()}}
    call: Any = mla_interop.mla_prefill if way == "neutral" else torch_side.mla_prefill

    def run(scale: float | None) -> Any:
        return call(*tensors, **lengths.get(way, {"metadata": metadata}), scale=scale, return_lse=True, backend=NAME)

    attend = torch.compile(run, backend="eager", fullgraph=True) if way == "compiled" else run
    for scale in SCALES:
        assert_right(attend(scale), scale)


@pytest.mark.parametrize("way", ["jit", "callback", "outside jit", "neutral"])
def test_jax(way: str) -> None:
    jax = pytest.importorskip("jax")
    import jax_side

    inputs = [jax.numpy.asarray(x).astype("bfloat16") for x in arrays()]
    metadata = jax_side.prepare_metadata(CU_Q, CU_K, num_tokens_q=11, num_tokens_k=20)
    call: Any = mla_interop.mla_prefill if way == "neutral" else jax_side.mla_prefill

    def run(scale: float | None, metadata: Any) -> Any:
        route = {"route": "callback"} if way == "callback" else {}
        return call(*inputs, metadata=metadata, scale=scale, return_lse=True, backend=NAME, **route)

    attend = jax.jit(run, static_argnums=0) if way in ("jit", "callback") else run
    for scale in SCALES:
        out, lse = attend(scale, metadata)
        assert_right((out.astype("float32"), lse), scale)


@pytest.mark.parametrize("needs_lse", [True, False])
def test_flash_attn_hands_out_the_library_for_a_scale(needs_lse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest ordinary scale and the next smaller number, and what is loaded and built for them; a scale that is not known is an ordinary one."""
    monkeypatch.setattr(fa4, "load", lambda *variant: variant)
    monkeypatch.setattr(fa4, "build", lambda *variant: variant)
    below = float(np.nextafter(fa4.SMALLEST_SCALE, 0))
    names = set()
    with assume_installed():
        for scale, any_scale in ((None, False), (192**-0.5, False), (fa4.SMALLEST_SCALE, False), (below, True), (0.0, True), (-1.0, True)):
            config = mla_interop.MLAPrefillSelectorConfig(
                dimensions=mla_interop.MLADimensions.from_head_dims(192, 128), num_heads=2, capability="9.0", needs_lse=needs_lse, scale=scale
            )
            kernel = FlashAttnBackend.kernels(config)[0][0]
            variant = ("sm_90a", "bfloat16", 192, 128, True, needs_lse, any_scale)
            assert kernel.variant == "fa4" and kernel.any_scale == any_scale
            assert kernel.launch == variant and [part() for part in kernel.parts] == [variant]
            names.add((kernel.name, any_scale))
    assert len(names) == 2
