"""A program that one process exported runs in another one, which gets the kernels by their names."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import numpy as np
import oracle
import pytest

jax = pytest.importorskip("jax")
pytest.importorskip("torch", reason="CPU_SDPA's kernel is torch's")
pytest.importorskip("flatbuffers", reason="jax.export serializes with flatbuffers")

import jax.export  # noqa: E402, F811
import jax.numpy as jnp  # noqa: E402

import jax_side  # noqa: E402
import mla_interop  # noqa: E402
from jax_side.ffi import EXPORT_CHECKS  # noqa: E402
from mla_interop.selector import kernel_named  # noqa: E402
from mla_interop.selector_config import MLAPrefillSelectorConfig  # noqa: E402

CHILD = """
import sys
import jax, jax.export, numpy as np
from jax_side import ffi
ffi.register_all()
data = np.load(sys.argv[1] + "/inputs.npz")
exported = jax.export.deserialize(bytearray(open(sys.argv[1] + "/program", "rb").read()))
out, lse = exported.call(*(data[name] for name in ("q", "k", "v", "cu_q", "cu_k")))
np.savez(sys.argv[1] + "/outputs.npz", out=out, lse=lse)
"""
CU_Q, CU_K = np.array([0, 3, 3, 11], np.int32), np.array([0, 7, 9, 20], np.int32)


def run_child(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", CHILD, str(folder)], capture_output=True, text=True, timeout=240)


def export(folder: Path, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Write a program and its inputs; return the inputs."""
    shapes = {"q": (11, 3, 192), "k": (20, 3, 192), "v": (20, 3, 128)}
    arrays = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()} | {"cu_q": CU_Q, "cu_k": CU_K}

    def attention(q, k, v, cu_q, cu_k):  # noqa: ANN001, ANN202
        return jax_side.mla_prefill(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, backend="CPU_SDPA", scale=0.3, return_lse=True)

    exported = jax.export.export(jax.jit(attention), platforms=["cpu"], disabled_checks=EXPORT_CHECKS)(*map(jnp.asarray, arrays.values()))
    (folder / "program").write_bytes(exported.serialize())
    np.savez(folder / "inputs.npz", **arrays)
    return arrays


def test_an_exported_program_runs_in_a_fresh_process(tmp_path: Path, rng: np.random.Generator) -> None:
    arrays = export(tmp_path, rng)
    done = run_child(tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    made = np.load(tmp_path / "outputs.npz")
    out, lse = oracle.attention(arrays["q"], arrays["k"], arrays["v"], CU_Q, CU_K, 0.3, True)
    assert np.linalg.norm(made["out"] - out) <= 1e-5 * np.linalg.norm(out)
    finite = np.isfinite(lse)
    assert np.abs(made["lse"][finite] - lse[finite]).max() < 1e-4 and np.isneginf(made["lse"][~finite]).all()


def test_a_machine_without_the_kernel_says_why(tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    export(tmp_path, rng)
    # torch is blocked in the child, so that its machine cannot have CPU_SDPA.
    monkeypatch.setattr(sys.modules[__name__], "CHILD", "import sys; sys.modules['torch'] = None\n" + CHILD)
    done = run_child(tmp_path)
    assert done.returncode != 0
    assert "kernel mla_interop.kernel.CPU_SDPA.torch.cpu.float32.192x128.causal.lse: " in done.stderr
    assert "cannot be had on this machine: python package torch: got none" in done.stderr


@pytest.mark.parametrize("settings", [{}, {"dtype": "float16", "is_causal": False, "needs_lse": False}])
@pytest.mark.parametrize("capability", [None, "8.0", "9.0", "10.3", "12.0"])
def test_names_say_all_that_a_kernel_is_made_from(capability: str | None, settings: dict[str, object]) -> None:
    dimensions, device = mla_interop.MLADimensions.from_head_dims(192, 128), "cuda" if capability else "cpu"
    config = MLAPrefillSelectorConfig(**{"dimensions": dimensions, "num_heads": 1, "device_type": device, "capability": capability, **settings})
    assert MLAPrefillSelectorConfig.of_kernel_name(config.kernel_name("FLASH_ATTN", "fa4")) == config
    name = config.kernel_name("FLASH_ATTN", "fa4", any_scale=True)
    again = MLAPrefillSelectorConfig.of_kernel_name(name)
    assert name.endswith(".anyscale") and again.kernel_name("FLASH_ATTN", "fa4", any_scale=True) == name
    assert again.scale == 0.0 and dataclasses.replace(again, scale=None) == config


@pytest.mark.parametrize(
    "name",
    [
        "",
        "REFERENCE",
        "mla_interop.kernel.CPU_SDPA.torch.cpu.float32.192x128.causal.lse",
        "CPU_SDPA.torch.tpu.float32.1x1.full.lse",
        "CPU_SDPA.torch.cpu.float32.192x128.causal.lse.somescale",
    ],
)
def test_what_is_no_name_of_a_kernel(name: str) -> None:
    with pytest.raises(mla_interop.MLAInputError, match="kernel: got .*; allowed: BACKEND.variant.arch.dtype.DxV.mask.lse"):
        kernel_named(name)


def test_a_kernel_that_cannot_be_had() -> None:
    kernel = kernel_named("CPU_SDPA.torch.cpu.bfloat16.192x128.full.nolse")
    assert kernel.name == "CPU_SDPA.torch.cpu.bfloat16.192x128.full.nolse" and kernel.launch is not None
    with pytest.raises(mla_interop.MLAUnavailableError, match="cannot be had on this machine: there are CPU_SDPA.torch.cpu.float32"):
        kernel_named("CPU_SDPA.mkl.cpu.float32.192x128.full.nolse")
    with pytest.raises(mla_interop.MLAUnavailableError, match="cannot be had on this machine: there are CPU_SDPA.torch.cpu.bfloat16"):
        kernel_named("CPU_SDPA.torch.cpu.bfloat16.192x128.full.nolse.anyscale")  # it has one kernel for all scales
    with pytest.raises(mla_interop.MLAUnavailableError, match="cannot be had on this machine: head dims"):
        kernel_named("CPU_SDPA.torch.cpu.float32.64x128.full.nolse")
    with pytest.raises(mla_interop.MLAInputError, match="kernel: got 'NOBODY'; allowed: FLASH_ATTN"):
        kernel_named("NOBODY.torch.cpu.float32.64x128.full.nolse")
