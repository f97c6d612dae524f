"""What an import brings along, seen in a fresh process: nothing that its user did not ask for."""

import importlib.util
import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

FRAMEWORKS = {"torch", "jax", "jaxlib", "transformers", "matplotlib", "typer", "rich"}
KERNEL_PACKAGES = {"flash_attn", "flash_attn_interface", "flashinfer", "cutlass", "quack", "triton", "vllm", "cuda", "jax_tvm_ffi"}
LARGEST_COST = 0.060
REPORT = "; import json, sys; print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"


def modules_after(statement: str) -> set[str]:
    """Top-level modules of a fresh interpreter after a statement."""
    done = subprocess.run([sys.executable, "-c", statement + REPORT], capture_output=True, text=True, check=True, timeout=240)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_the_core_imports_no_framework_and_no_kernel_package() -> None:
    """jax#18989, vllm#44252: an import must start no runtime and make no CUDA context."""
    loaded = modules_after("import mla_interop")
    assert "mla_interop" in loaded and not loaded & (FRAMEWORKS | KERNEL_PACKAGES)


def processor_seconds(statement: str) -> float:
    """Of a fresh interpreter: the least of several, which what else the machine does disturbs less than wall time."""
    seconds = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", statement], check=True, timeout=240)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(seconds)


def test_the_import_costs_less_than_a_blink() -> None:
    """Over bare Python; and a tenth of a second would be seen."""
    bare = processor_seconds("pass")
    assert processor_seconds("import mla_interop") - bare < LARGEST_COST
    busy = "import mla_interop, time; end = time.process_time() + 0.1\nwhile time.process_time() < end: pass"
    assert processor_seconds(busy) - bare > LARGEST_COST


def test_every_module_of_the_core_can_be_imported_without_them() -> None:
    walk = (
        "import importlib, pkgutil, mla_interop.backends; "
        "modules = 'config selector selection_table sequences prefill neutral lse exchange'.split(); "
        "[importlib.import_module('mla_interop.' + m) for m in modules]; "
        "[importlib.import_module('mla_interop.backends.' + m.name) for m in pkgutil.iter_modules(mla_interop.backends.__path__)]"
    )
    assert not modules_after(walk) & (FRAMEWORKS | KERNEL_PACKAGES)


def test_explaining_a_choice_imports_neither() -> None:
    statement = (
        "import mla_interop as m; d = m.MLADimensions(qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128); "
        "[str(m.explain(m.MLAPrefillSelectorConfig(dimensions=d, num_heads=16, device_type=t, capability=c))) for t, c in (('cpu', None), ('cuda', (9, 0)))]"
    )
    assert not modules_after(statement) & (FRAMEWORKS | KERNEL_PACKAGES)


@pytest.mark.parametrize("package", ["json", "torch"])
def test_the_check_can_fail(package: str) -> None:
    """The check sees what is imported: a package of the standard library, and the framework it is there for."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    assert package in modules_after(f"import mla_interop, {package}")


def test_torch_side_does_not_import_jax() -> None:
    pytest.importorskip("torch")
    loaded = modules_after("import torch_side")
    assert "torch" in loaded and not loaded & {"jax", "jaxlib", "jax_tvm_ffi", "flashinfer", "flash_attn", "cutlass"}


def test_jax_side_does_not_import_torch() -> None:
    pytest.importorskip("jax")
    loaded = modules_after("import jax_side")
    assert "jax" in loaded and not loaded & {"torch", "flashinfer", "flash_attn", "cutlass", "triton"}


@pytest.mark.parametrize("error", ["ImportError", "AttributeError", "OSError", "TypeError", "RuntimeError"])
def test_broken_packages_on_the_path_break_neither_the_import_nor_the_table(tmp_path: Path, error: str) -> None:
    """oumi#2586, open-r1#684: packages that raise on import, with every type of exception; flash_attn there, flash_attn.cute unusable."""
    for name in ("flash_attn", "flashinfer", "flash_attn_interface", "triton", "vllm", "_vllm_fa3_C", "flash_attn_2_cuda"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise {error}('broken on purpose')")
    statement = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import mla_interop as m; "
        "d = m.MLADimensions(qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128); "
        "t = m.explain(m.MLAPrefillSelectorConfig(dimensions=d, num_heads=16, capability=(9, 0))); "
        "assert {row.backend for row in t.rows} == set(m.backends.registry.names())"
    )
    assert "mla_interop" in modules_after(statement)


def test_jax_side_survives_a_reload() -> None:
    """A notebook reloads; JAX refuses a second registration of a pytree or a target under one name."""
    pytest.importorskip("jax")
    statement = (
        "import importlib, jax_side, jax_side.functional, jax_side.ffi, jax.numpy as jnp; "
        "a = (jnp.ones((4, 2, 192)), jnp.ones((4, 2, 192)), jnp.ones((4, 2, 128))); m = jax_side.prepare_metadata([0, 1, 4]); "
        "first = jax_side.mla_prefill(*a, metadata=m, backend='REFERENCE'); "
        "[importlib.reload(x) for x in (jax_side.ffi, jax_side.functional, jax_side)]; "
        "assert (jax_side.mla_prefill(*a, metadata=m, backend='REFERENCE') == first).all(); "
        "assert len(importlib.import_module('jax').tree.leaves(jax_side.prepare_metadata([0, 1, 4]))) == 1"
    )
    modules_after(statement)
