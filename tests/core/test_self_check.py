"""The self-check names what a backend does wrong, and by what factor; backends that are broken on purpose."""

import dataclasses
import json
import math
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import oracle
import pytest

torch = pytest.importorskip("torch")

import mla_interop  # noqa: E402
from mla_interop import (  # noqa: E402
    Kernel,
    MLAPrefillBackend,
    MLAPrefillSelectorConfig,
    MLAUnsupportedError,
    numeric_check,  # noqa: E402
    register_mla_prefill_backend,
    self_check,
)
from mla_interop.backends import registry  # noqa: E402
from mla_interop.kernels.torch_call import adapt  # noqa: E402

PROPERTIES = ["out", "LSE base", "LSE layout", "strides", "causal alignment", "scale", "empty rows"]
PROBLEM = MLAPrefillSelectorConfig(dimensions=mla_interop.MLADimensions.from_head_dims(192, 128), num_heads=2, device_type="cpu", dtype="float32")


def right(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int, scale: float, is_causal: bool) -> tuple[Any, Any]:
    out, lse = oracle.attention(*(x.float().numpy() for x in (q, k, v)), cu_q.numpy(), cu_k.numpy(), scale, is_causal)
    return torch.from_numpy(out).to(q.dtype), torch.from_numpy(lse.astype(np.float32))


def changed(change: Callable[..., Any]) -> Callable[..., Any]:
    """The right kernel with its results changed."""
    return lambda *arguments: change(*right(*arguments))


def with_arguments(change: Callable[..., Any]) -> Callable[..., Any]:
    """The right kernel with its arguments changed first."""
    return lambda *arguments: right(*change(*arguments))


def top_left(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int, scale: float, is_causal: bool) -> Any:
    """Cuts the keys of each sequence to its queries: then bottom-right is top-left."""
    if not is_causal:
        return right(q, k, v, cu_q, cu_k, max_q, max_k, scale, is_causal)
    keep = [index for start, end, rows in zip(cu_k[:-1], cu_k[1:], cu_q.diff()) for index in range(int(start), min(int(end), int(start + rows)))]
    lengths = torch.minimum(cu_k.diff(), cu_q.diff())
    return right(q, k[keep], v[keep], cu_q, torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int(), max_q, max_k, scale, is_causal)


def packed_v(q: Any, k: Any, v: Any, *others: Any) -> Any:
    return right(q, k, torch.as_strided(v, v.shape, (v.shape[1] * v.shape[2], v.shape[2], 1), v.storage_offset()), *others)


def leaves_rows(out_value: float, lse_value: float) -> Callable[..., Any]:
    def change(out: Any, lse: Any) -> Any:
        empty = torch.isneginf(lse)
        return out.masked_fill(empty.T[..., None], out_value), lse.masked_fill(empty, lse_value)

    return changed(change)


# What is broken, which properties must be named, and the words that must be among them. The last column: what the adapter is told.
BROKEN: dict[str, tuple[Callable[..., Any], set[str], str, dict[str, Any]]] = {
    "base 2": (changed(lambda out, lse: (out, lse / math.log(2))), {"LSE base"}, "off by a factor of 1.4427 (1/ln 2: base 2", {}),
    "twice natural": (changed(lambda out, lse: (out, lse * math.log(2))), {"LSE base"}, "off by a factor of 0.6931 (ln 2", {}),
    "token-major": (changed(lambda out, lse: (out, lse.T.reshape(lse.shape))), {"LSE layout"}, "token-major [T, N]", {}),
    "both": (changed(lambda out, lse: (out, lse.T.reshape(lse.shape) / math.log(2))), {"LSE base", "LSE layout"}, "1.4427", {}),
    "lse of something else": (changed(lambda out, lse: (out, lse + 1)), {"LSE base", "LSE layout"}, "off by up to 1", {}),
    "out times three": (changed(lambda out, lse: (3 * out, lse)), set(PROPERTIES) - {"LSE base", "LSE layout"}, "factor 3.0000", {}),
    "out times 1/ln 2": (changed(lambda out, lse: (out / math.log(2), lse)), set(PROPERTIES) - {"LSE base", "LSE layout"}, "factor 1.4427 (1/ln 2", {}),
    "packed v": (packed_v, {"strides"}, "v is read as if it were contiguous", {}),
    "top-left": (top_left, {"causal alignment", "empty rows"}, "the causal mask is aligned top-left", {}),
    "no mask": (with_arguments(lambda *a: (*a[:8], False)), {"causal alignment", "empty rows"}, "there is no mask", {}),
    "default scale": (with_arguments(lambda *a: (*a[:7], 192**-0.5, a[8])), {"scale"}, "the given scale is ignored", {}),
    "ln 2 in the scale": (
        with_arguments(lambda *a: (*a[:7], a[7] * math.log(2), a[8])),
        set(PROPERTIES),
        "the given scale is multiplied with ln 2",
        {},
    ),
    "garbage in empty rows": (leaves_rows(7.0, 0.5), {"empty rows"}, "out holds 7, where 0 is right; lse holds 0.5, where -inf is right", {"trusted": True}),
    "nan in empty rows": (leaves_rows(math.nan, -math.inf), {"empty rows"}, "out holds nan, where 0 is right", {"trusted": True}),
}


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Put a kernel into the registry as a backend of a third party; ``trusted``: it says that it handles rows without a key itself."""
    monkeypatch.setattr(registry, "_registered", {})

    def put(attention: Callable[..., Any], trusted: bool = False, name: str = "THIRD", **place: Any) -> None:
        def kernels(cls: Any, config: Any) -> Any:
            make = lambda: adapt(attention, is_causal=config.is_causal, pad_v=False)  # noqa: E731
            kernel = Kernel(name=config.kernel_name(name, "fake"), kind="python", make=make, strided=frozenset("qkv"), native_empty_rows=trusted)
            return [kernel], []

        methods = {"unavailable_reasons": classmethod(lambda cls: []), "kernels": classmethod(kernels)}
        declared = {"name": name, "device_types": ("cpu",), "supported_dtypes": ("float32", "bfloat16")}
        register_mla_prefill_backend(name, **place)(type(f"Fake{len(registry._registered)}", (MLAPrefillBackend,), {**declared, **methods}))

    return put


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_right_kernel_passes(install: Callable[..., None], dtype: str) -> None:
    install(right)
    found = self_check("third", dtype=dtype)
    assert found.ok and [finding.what for finding in found.findings] == PROPERTIES and str(found) == f"THIRD.fake on cpu, {dtype}: ok"


@pytest.mark.parametrize("fault", BROKEN)
def test_each_fault_is_named(install: Callable[..., None], fault: str) -> None:
    attention, properties, words, settings = BROKEN[fault]
    install(attention, **settings)
    found = self_check("THIRD", "cpu", dtype="float32")
    assert {finding.what for finding in found.findings if not finding.ok} == properties, str(found)
    assert words in str(found) and "DEVIATES" in str(found)
    assert json.loads(json.dumps(found.to_dict()))["ok"] is False


def test_a_kernel_that_raises_is_a_finding(install: Callable[..., None]) -> None:
    def fails(*arguments: Any) -> Any:
        raise RuntimeError("the block table is upside down")

    install(fails)
    assert self_check("THIRD").failures == "call: RuntimeError: the block table is upside down"


@pytest.mark.parametrize("name", ["CPU_SDPA", "REFERENCE", "reference.xp"])
def test_our_own_backends_pass_on_the_cpu(name: str) -> None:
    assert self_check(name, "cpu").ok


def test_what_cannot_be_checked(install: Callable[..., None]) -> None:
    with pytest.raises(MLAUnsupportedError, match=r"FLASH_ATTN cannot be checked here: cpu, bfloat16: device cpu \(runs on: cuda\)"):
        self_check("FLASH_ATTN", "cpu")
    with pytest.raises(mla_interop.MLAInputError, match="device: got 'tpu'; allowed: 'cpu', 'cuda' or None"):
        self_check("REFERENCE", "tpu")


def test_selection_can_require_it(install: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    install(BROKEN["base 2"][0], before="CPU_SDPA")
    assert mla_interop.select(PROBLEM).get_name() == "THIRD"
    monkeypatch.setenv("MLA_INTEROP_SELF_CHECK", "1")
    with pytest.warns(UserWarning, match=r"THIRD \(fake\): its self-check failed: LSE base: off by a factor of 1.4427 .*; using \w+\.") as said:
        assert mla_interop.select(PROBLEM).get_name() != "THIRD"
    assert len(said) == 1
    with pytest.raises(MLAUnsupportedError, match="its self-check failed: LSE base"):
        mla_interop.select(PROBLEM, "THIRD")
    monkeypatch.setenv("MLA_INTEROP_SELF_CHECK", "0")
    assert mla_interop.select(PROBLEM).get_name() == "THIRD"


def test_the_kernel_for_any_scale_is_checked_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is another library than the one for ordinary scales, which passes."""
    monkeypatch.setattr(registry, "_registered", {})

    def kernels(cls: Any, config: Any) -> Any:
        any_scale = config.scale is not None and config.scale < 0
        attention = BROKEN["base 2"][0] if any_scale else right
        make = lambda: adapt(attention, is_causal=config.is_causal, pad_v=False)  # noqa: E731
        name = config.kernel_name("THIRD", "fake", any_scale)
        return [Kernel(name=name, kind="python", make=make, strided=frozenset("qkv"), native_empty_rows=False)], []

    methods = {"unavailable_reasons": classmethod(lambda cls: []), "kernels": classmethod(kernels)}
    declared = {"name": "THIRD", "device_types": ("cpu",), "supported_dtypes": ("float32",)}
    register_mla_prefill_backend("THIRD")(type("Third", (MLAPrefillBackend,), {**declared, **methods}))
    monkeypatch.setenv("MLA_INTEROP_SELF_CHECK", "1")
    assert not mla_interop.select(PROBLEM, "THIRD").kernel.any_scale
    with pytest.raises(MLAUnsupportedError, match="its self-check failed: LSE base: off by a factor of 1.4427"):
        mla_interop.select(dataclasses.replace(PROBLEM, scale=-0.1), "THIRD")


def test_a_name_that_is_registered_anew_is_checked_anew(install: Callable[..., None]) -> None:
    install(BROKEN["base 2"][0])
    assert not self_check("THIRD").ok
    install(right, override=True)
    assert self_check("THIRD").ok


def test_it_is_part_of_a_jitted_call_without_being_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through JAX, as where torch is not loaded, while a program is traced."""
    jax = pytest.importorskip("jax")
    jax_side = pytest.importorskip("jax_side")
    monkeypatch.setattr(sys.modules["mla_interop.numeric_check"], "_framework", lambda: "jax")
    monkeypatch.setenv("MLA_INTEROP_SELF_CHECK", "1")
    arrays = [jax.numpy.ones((5, 2, width)) for width in (192, 192, 128)]
    call = jax.jit(lambda q, k, v: jax_side.mla_prefill(q, k, v, cu_seqlens_q=[0, 3, 5], backend="REFERENCE"))
    assert call(*arrays).shape == (5, 2, 128)
    mla_interop.clear_cache()
    program = jax.make_jaxpr(lambda x: 2 * x if self_check("REFERENCE", "cpu", dtype="float32").ok else x)(1.0)
    assert [str(equation.primitive) for equation in program.eqns] == ["mul"]


def test_plain_numpy_serves_where_no_framework_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["mla_interop.numeric_check"], "_framework", lambda: "numpy")
    assert self_check("REFERENCE", "cpu", dtype="float32").ok


@pytest.mark.parametrize(("loaded", "installed", "framework"), [("jax", "torch", "jax"), ("torch jax", "", "torch"), ("", "jax", "jax"), ("", "", "numpy")])
def test_what_is_loaded_is_checked_through(monkeypatch: pytest.MonkeyPatch, loaded: str, installed: str, framework: str) -> None:
    """A process of JAX does not import torch for a check."""
    module = sys.modules["mla_interop.numeric_check"]
    spec = SimpleNamespace(find_spec=lambda name: name if name in installed else None)
    monkeypatch.setattr(module, "sys", SimpleNamespace(modules={name: module for name in loaded.split()}))
    monkeypatch.setattr(module, "importlib", SimpleNamespace(util=spec))
    assert module._framework() == framework


@pytest.mark.gpu
def test_every_backend_of_this_gpu_passes() -> None:
    from mla_interop.doctor import self_checks

    found = [check for check in self_checks() if check.device == "cuda"]
    assert found and all(check.ok for check in found), "\n".join(map(str, found))


def test_one_backend_at_a_time_and_only_on_devices_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several names the first was checked; and a device that is not there "deviated"."""
    with pytest.raises(mla_interop.MLAInputError, match="backend: got .*; allowed: one name, or one enum member"):
        mla_interop.self_check(["REFERENCE", "CPU_SDPA"])
    monkeypatch.setattr(numeric_check, "device_capability", lambda *device: None)
    with pytest.raises(mla_interop.MLAUnsupportedError, match="REFERENCE cannot be checked here: no CUDA device"):
        mla_interop.self_check("REFERENCE", "cuda")
