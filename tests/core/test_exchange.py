"""What an array is, in words that every framework shares; and devices."""

from typing import Any

import numpy as np
import pytest

from mla_interop import DeviceCapability, MLAInputError
from mla_interop.capability import KNOWN_GPUS, device_capability
from mla_interop.exchange import TensorSpec, framework_of, host_values, is_tracer, read_back


class Exporter:
    """Something with DLPack's two methods, on a device of choice."""

    def __init__(self, device: tuple[int, int]) -> None:
        self.device = device

    def __dlpack__(self, **options: Any) -> Any:
        raise AssertionError("exported")

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device


@pytest.mark.parametrize("value", [(9, 0), [9, 0], "9.0", DeviceCapability(9, 0), ("9", "0")], ids=repr)
def test_capabilities_in_every_form(value: Any) -> None:
    assert DeviceCapability.parse(value) == DeviceCapability(9, 0) and str(DeviceCapability.parse(value)) == "9.0"


@pytest.mark.parametrize("value", ["9", "9.0.1", "sm_90", (9,), 9, None, 9.0, "", (None, 0)], ids=repr)
def test_what_is_no_capability(value: Any) -> None:
    with pytest.raises(MLAInputError, match="capability: got .*; allowed: a pair such as"):
        DeviceCapability.parse(value)


def test_capabilities_are_ordered_as_numbers() -> None:
    assert DeviceCapability.parse("10.0") > DeviceCapability.parse("9.0") > DeviceCapability.parse("8.9")


def test_a_cpu_has_no_capability_and_known_gpus_have_sizes() -> None:
    assert device_capability("cpu") is None
    assert all(gpu.num_sms > 0 and gpu.capability >= (8, 0) for gpu in KNOWN_GPUS.values())


def test_frameworks_are_told_apart_without_importing_them() -> None:
    assert framework_of(np.zeros(1)) == "numpy"
    assert [framework_of(x) for x in ([1], 1, None, "x", object(), np.float32(1))] == [""] * 6 or framework_of(np.float32(1)) == ""
    assert framework_of(Exporter((1, 0))) == "dlpack"


def test_torch_and_jax_arrays() -> None:
    torch, jnp = pytest.importorskip("torch"), pytest.importorskip("jax.numpy")
    assert (framework_of(torch.zeros(1)), framework_of(torch.nn.Parameter(torch.zeros(1))), framework_of(jnp.zeros(1))) == ("torch", "torch", "jax")
    assert not is_tracer(jnp.zeros(1)) and not is_tracer(np.zeros(1))


def test_host_values_come_from_the_host_alone() -> None:
    for given in ([0, 5], (0, 5), range(0, 10, 5), np.array([0, 5])):
        values = host_values(given)
        assert values is not None and values.tolist() == [0, 5]
    assert host_values(Exporter((2, 0))) is None and host_values(object()) is None and host_values(None) is None


def test_host_values_of_torch_and_jax() -> None:
    """dlpack: torch refuses to export what requires grad, JAX exports read-only memory (jax#40789)."""
    torch, jax = pytest.importorskip("torch"), pytest.importorskip("jax")
    for given in (torch.tensor([0.0, 5.0], requires_grad=True), torch.tensor([0, 5]), jax.numpy.array([0, 5])):
        values = host_values(given)
        assert values is not None and values.tolist() == [0, 5]
        assert read_back(given).tolist() == [0, 5]
    seen = []
    jax.jit(lambda x: seen.append((is_tracer(x), host_values(x))) or x)(jax.numpy.array([0, 5]))
    assert seen == [(True, None)]


def test_specs_name_their_device() -> None:
    spec = TensorSpec((3,), None, "float32", "cuda", 1)
    assert spec.device == "cuda:1" and spec._replace(device_type="cpu").device == "cpu" and len({spec, spec._replace()}) == 1
