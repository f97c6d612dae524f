"""Programs that leave the process they were made in: export, ahead-of-time compilation, serialised executables, and stated targets."""

from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
pytest.importorskip("torch", reason="CPU_SDPA's kernel is torch's")

import jax.export  # noqa: E402, F811
import jax.numpy as jnp  # noqa: E402
from jax.experimental import serialize_executable  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402
from mesh_case import CU_K, CU_Q, HEADS, ROWS_K, ROWS_Q, assert_right, calls, mesh, problem  # noqa: E402

import jax_side  # noqa: E402
from mla_interop import MLAInputError, MLAUnsupportedError, capability  # noqa: E402
from mla_interop.backends.base import Kernel  # noqa: E402
from mla_interop.installed import assume_installed  # noqa: E402
from mla_interop.selector import kernel_named  # noqa: E402


def attention(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, **options: Any) -> Any:
    return jax_side.mla_prefill(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, return_lse=True, **options)


def shapes(dtype: Any = np.float32) -> list[Any]:
    arrays = [jax.ShapeDtypeStruct(x.shape, dtype) for x in problem()]
    return [*arrays, *[jax.ShapeDtypeStruct(CU_Q.shape, np.int32)] * 2]


@pytest.mark.parametrize("backend", ["CPU_SDPA", "REFERENCE"])
@pytest.mark.parametrize("serialized", [False, True])
def test_export_round_trip(backend: str, serialized: bool) -> None:
    run = jax.jit(lambda *x: attention(*x, backend=backend))
    exported = jax.export.export(run, platforms=["cpu"], disabled_checks=jax_side.EXPORT_CHECKS)(*shapes())
    if serialized:
        pytest.importorskip("flatbuffers", reason="jax.export serializes with flatbuffers")
        exported = jax.export.deserialize(exported.serialize())
    assert_right(exported.call(*problem(), CU_Q, CU_K), *problem())
    assert_right(jax.jit(lambda *x: exported.call(*x))(*problem(), CU_Q, CU_K), *problem())


def test_the_checks_are_needed_and_are_ours_alone() -> None:
    run = jax.jit(lambda *x: attention(*x, backend="CPU_SDPA"))
    with pytest.raises(ValueError, match="mla_interop.prefill.v1.CPU_SDPA"):
        jax.export.export(run, platforms=["cpu"])(*shapes())
    assert all("mla_interop.prefill.v1." in str(check) for check in jax_side.EXPORT_CHECKS)


def test_a_sharded_program_is_exported_from_shard_map() -> None:
    if len(jax.devices("cpu")) < 4:
        pytest.skip("JAX was started with fewer than 4 CPU devices")
    on = mesh("Auto", h=4)
    call = jax_side.sharded_mla_prefill(on, head_axis="h")
    split, whole = NamedSharding(on, PartitionSpec(None, "h")), NamedSharding(on, PartitionSpec())
    run = jax.jit(lambda q, k, v, a, b: call(q, k, v, cu_seqlens_q=a, cu_seqlens_k=b, return_lse=True), in_shardings=(split,) * 3 + (whole,) * 2)
    exported = jax.export.export(run, platforms=["cpu"], disabled_checks=jax_side.EXPORT_CHECKS)(*shapes())
    operands = [jax.device_put(x, split if x.ndim == 3 else whole) for x in (*problem(), CU_Q, CU_K)]
    assert exported.nr_devices == 4
    assert_right(jax.jit(exported.call, in_shardings=(split,) * 3 + (whole,) * 2)(*operands), *problem())


def test_ahead_of_time_compilation_and_a_reloaded_executable() -> None:
    compiled = jax.jit(lambda *x: attention(*x, backend="CPU_SDPA")).lower(*shapes()).compile()
    operands = [jnp.asarray(x) for x in (*problem(), CU_Q, CU_K)]
    assert_right(compiled(*operands), *problem())
    assert compiled.memory_analysis() is not None
    loaded = serialize_executable.deserialize_and_load(*serialize_executable.serialize(compiled), execution_devices=[jax.devices("cpu")[0]])
    assert calls(loaded.as_text()) == [f"f32[{ROWS_Q},{HEADS},128]"]
    assert_right(loaded(*operands), *problem())


# What each GPU's program calls, where every package is installed.
TARGETS = {
    "a100": "FLASH_ATTN.fa4.sm_80",
    "h200": "FLASH_ATTN.fa4.sm_90",
    "B200": "sm_100",
    "rtx-5090": "FLASH_ATTN.fa4.sm_120",
}


@pytest.fixture
def nothing_is_asked_or_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*args: Any) -> Any:
        raise AssertionError("a stated target asks no GPU, and loads no kernel")

    monkeypatch.setattr(capability, "_read_properties", forbidden)
    monkeypatch.setattr(Kernel, "launch", property(forbidden))
    monkeypatch.setattr(Kernel, "register", forbidden)


@pytest.mark.usefixtures("nothing_is_asked_or_loaded")
@pytest.mark.parametrize("gpu", TARGETS)
def test_export_for_a_stated_gpu(gpu: str) -> None:
    run = jax.jit(attention)
    with jax_side.target(gpu) as properties, assume_installed():
        shape = jax.eval_shape(run, *shapes(jnp.bfloat16))
        exported = jax.export.export(run, platforms=["cuda"], disabled_checks=jax_side.EXPORT_CHECKS)(*shapes(jnp.bfloat16))
    assert properties == capability.KNOWN_GPUS[gpu.lower()] and exported.platforms == ("cuda",)
    assert [(x.shape, x.dtype) for x in exported.out_avals] == [(x.shape, x.dtype) for x in shape]
    text = exported.mlir_module()
    (name,) = [word for word in text.replace('"', " ").split() if word.startswith("mla_interop.kernel.")]
    assert TARGETS[gpu] in name and text.count("custom_call @mla_interop.prefill.v1.") == 1
    pytest.importorskip("flatbuffers", reason="jax.export serializes with flatbuffers")
    again = jax.export.deserialize(exported.serialize())
    with assume_installed():  # another process finds the kernel by this name
        assert kernel_named(name.removeprefix("mla_interop.kernel.")).global_name == name
    with pytest.raises(ValueError, match="(?i)platform"):
        again.call(*(jnp.zeros(x.shape, x.dtype) for x in shapes(jnp.bfloat16)))


@pytest.mark.usefixtures("nothing_is_asked_or_loaded")
@pytest.mark.parametrize(("scale", "any_scale"), [(None, False), (0.1, False), (0.0, True), (-0.07, True), (1e-42, True)])
def test_a_program_names_the_kernel_that_serves_its_scale(scale: float | None, any_scale: bool) -> None:
    """FlashAttention-4 has another library for small scales: a process that finds its kernel by name must find that one."""
    with jax_side.target("h200"), assume_installed():
        run = jax.jit(lambda *x: attention(*x, backend="FLASH_ATTN.fa4", scale=scale))
        text = run.trace(*shapes(jnp.bfloat16)).lower(lowering_platforms=("cuda",)).as_text()
    (name,) = [word for word in text.replace('"', " ").split() if word.startswith("mla_interop.kernel.")]
    assert name.endswith(".anyscale") == any_scale
    with assume_installed():
        assert kernel_named(name.removeprefix("mla_interop.kernel.")).global_name == name


@pytest.mark.usefixtures("nothing_is_asked_or_loaded")
def test_host_lengths_of_a_stated_target() -> None:
    """Lengths that are part of the program: tails are cut and filled by what the host knows, for the GPU as for the CPU."""
    with jax_side.target("h200"), assume_installed():
        lowered = jax.jit(lambda *x: attention(*x, CU_Q, CU_K, backend="FLASH_ATTN")).trace(*shapes(jnp.bfloat16)[:3]).lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    assert f"num_k = {CU_K[-1]} : i64" in text and "finish = 1 : i64" in text


def test_a_stated_target_is_another_program_than_this_machines() -> None:
    """jax.jit knows nothing of our context unless it is told."""
    run = jax.jit(attention)
    here = run.lower(*shapes(jnp.bfloat16)).as_text()
    with jax_side.target("h200"), assume_installed():
        there = run.trace(*shapes(jnp.bfloat16)).lower(lowering_platforms=("cuda",)).as_text()
    assert "prefill.v1.CPU_SDPA" in here and "prefill.v1.FLASH_ATTN" in there
    assert run.lower(*shapes(jnp.bfloat16)).as_text() == here


def test_what_a_stated_target_cannot_have() -> None:
    with (
        pytest.raises(MLAInputError, match="target: got 'h300'; allowed: a100, h100, h200, b200, b300, rtx-5090, or a DeviceProperties"),
        jax_side.target("h300"),
    ):
        pass
    assert capability.stated_target() is None
    run = jax.jit(lambda *x: attention(*x, backend="CUDNN"))
    with jax_side.target("h200"), assume_installed(), pytest.raises(MLAUnsupportedError, match="CUDNN: graph: a target that is only stated"):
        run.lower(*shapes(jnp.bfloat16))
    mine = capability.DeviceProperties("one of mine", capability.DeviceCapability(7, 5), 40)
    run = jax.jit(lambda *x: attention(*x, backend="FLASH_ATTN"))
    with jax_side.target(mine), assume_installed(), pytest.raises(MLAUnsupportedError, match="compute capability 7.5"):
        run.lower(*shapes(jnp.bfloat16))


def test_calls_with_values_do_not_follow_a_stated_target() -> None:
    with jax_side.target("h200"):
        assert_right(attention(*map(jnp.asarray, problem()), CU_Q, CU_K), *problem())
    assert ROWS_K > CU_K[-1]
