"""Stub kernels that misbehave as real ones did: the core must normalise what they give, or refuse it."""

import math
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402
import stub_kernels as stubs  # noqa: E402
from cases import BY_NAME, Case  # noqa: E402
from frontends import FRONTENDS, assert_right, run_numpy, run_torch, to_torch  # noqa: E402

import mla_interop  # noqa: E402
import torch_side  # noqa: E402
from mla_interop.backends.registry import MLAPrefillBackendEnum  # noqa: E402
from mla_interop.kernels import torch_call  # noqa: E402

EMPTY = [BY_NAME["every-kind"], BY_NAME["tail-of-every-kind"], BY_NAME["k-empty-first"], BY_NAME["all-k-empty"]]
GARBAGE = [(math.nan, math.nan), (math.nan, -math.inf), (7.0, math.inf), (7.0, 0.0), (-3e4, 12.5)]
Install = Callable[..., None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Put a stub backend into the registry in FLASHINFER's place: by the one function that turns a name into a class."""

    def put(*kernels: Any, by_config: Callable[[Any], Any] | None = None) -> None:
        cls = stubs.make_backend(by_config or (lambda config: kernels))
        original = MLAPrefillBackendEnum.get_class
        monkeypatch.setattr(MLAPrefillBackendEnum, "get_class", lambda member: cls if member.name == "FLASHINFER" else original(member))
        monkeypatch.setenv("MLA_INTEROP_ORDER", "FLASHINFER,CPU_SDPA,REFERENCE")
        _forget()

    yield put
    monkeypatch.undo()
    _forget()


def _forget() -> None:
    mla_interop.clear_cache()


def _call(case: Case, attention: Any, **adapted: Any) -> tuple[Any, Any]:
    """The adapter alone, in the kernel ABI, with NaN where results go."""
    problem = case.problem()
    launch = torch_call.adapt(attention, **{"is_causal": case.is_causal, "pad_v": False, **adapted})
    out, lse = torch.full(problem.out.shape, math.nan, dtype=torch.bfloat16), torch.full(problem.lse.shape, math.nan)
    q, k, v, cu_q, cu_k = (to_torch(x) for x in (problem.q, problem.k, problem.v, problem.cu_q, problem.cu_k))
    launch(q, k, v, cu_q, cu_k, None, None, out, lse, case.dims[0] ** -0.5, 64, 64, 3)
    return out, lse


@pytest.mark.parametrize("garbage", GARBAGE, ids=str)
@pytest.mark.parametrize("case", EMPTY, ids=str)
def test_rows_without_a_key_do_not_keep_garbage(case: Case, garbage: tuple[float, float]) -> None:
    """vllm#15492, #49294, #26397, flashinfer#4975, #2409: decided from the lengths, not from what the kernel wrote."""
    assert_right(case, *_call(case, stubs.empty_rows(*garbage)))


@pytest.mark.parametrize(
    ("attention", "declared"),
    [
        (stubs.BASE_2, {"lse_base": "2"}),
        (stubs.TOKEN_MAJOR, {"lse_layout": "TN"}),
        (stubs.BASE_2_TOKEN_MAJOR, {"lse_base": "2", "lse_layout": "TN"}),
    ],
    ids=["base-2", "token-major", "both"],
)
@pytest.mark.parametrize("name", ["heads-equal-tokens", "every-kind"])
def test_declared_lse_conventions_are_normalised(attention: Any, declared: dict[str, str], name: str) -> None:
    """flashinfer#2113, sglang#9363: also where N == T, so that no shape shows which is which."""
    assert_right(BY_NAME[name], *_call(BY_NAME[name], attention, **declared))


@pytest.mark.parametrize(
    ("attention", "declared"), [(stubs.BASE_2, {}), (stubs.TOKEN_MAJOR, {}), (stubs.attention, {"lse_base": "2"}), (stubs.attention, {"lse_layout": "TN"})]
)
def test_a_wrong_declaration_is_found_by_the_contract(attention: Any, declared: dict[str, str]) -> None:
    """The judge of these tests sees each convention that is not what was declared."""
    with pytest.raises(AssertionError, match="lse"):
        assert_right(BY_NAME["heads-equal-tokens"], *_call(BY_NAME["heads-equal-tokens"], attention, **declared))


@pytest.mark.parametrize("name", stubs.WRONG_RETURNS)
@pytest.mark.parametrize("case", [BY_NAME["16-heads"], BY_NAME["three-heads-three-tokens"]], ids=str)
def test_other_returns_than_out_and_lse_are_refused(case: Case, name: str) -> None:
    """diffusers#13999: a tensor of two or three rows unpacks without an error."""
    if (case.name, name) == ("three-heads-three-tokens", "lse-token-major-undeclared"):
        pytest.skip("N == T: no shape shows it; that is why the layout is declared")
    with pytest.raises(mla_interop.MLAUnsupportedError, match="the kernel's package returned"):
        _call(case, stubs.WRONG_RETURNS[name])


def test_v_reaches_a_kernel_unpadded_unless_it_asked(install: Install) -> None:
    """Megatron-LM#6240: V was padded for kernels that did not need it. vllm#42642: where it is padded, out is cut in the adapter."""
    widths = []

    def recording(*arguments: Any) -> Any:
        widths.append((arguments[0].shape[2], arguments[2].shape[2]))
        return stubs.attention(*arguments)

    case = BY_NAME["16-heads"]
    for pad_v in (False, True):
        assert_right(case, *_call(case, recording, pad_v=pad_v))
    assert widths == [(192, 128), (192, 192)]


@pytest.mark.parametrize("strided", ["qkv", "qk"])
def test_a_kernel_that_ignores_strides_gets_a_copy_if_it_says_so(install: Install, strided: str) -> None:
    """tokenspeed-mla 0.1.8: a strided V read as contiguous. Declared (``strided``), the frontend copies; undeclared, the contract finds it."""
    case = BY_NAME["16-heads"]
    install(stubs.stub_kernel("strides", lambda: torch_call.adapt(stubs.ignores_strides, is_causal=True, pad_v=False), strided=frozenset(strided)))
    out, lse = run_torch(case.problem(), "cpu", backend="FLASHINFER", return_lse=True)
    if strided == "qk":
        assert_right(case, out, lse)
        table = str(mla_interop.explain(_config(), "FLASHINFER"))
        assert "v made contiguous if strided" in table
    else:
        with pytest.raises(AssertionError, match="out: relative error"):
            assert_right(case, out, lse)


@pytest.mark.parametrize("frontend", FRONTENDS)
@pytest.mark.parametrize("case", [BY_NAME[name] for name in ("every-kind", "tail-of-every-kind", "tail-133", "all-k-empty")], ids=str)
def test_garbage_in_empty_rows_through_every_way_in(install: Install, frontend: str, case: Case) -> None:
    """The frontends must ask for the finish that the kernel needs (``finish`` bits), with host lengths and with traced ones."""
    variant = f"garbage-{frontend}-{case.name}"
    install(stubs.stub_kernel(variant, lambda: _over_dlpack_for(frontend, torch_call.adapt(stubs.empty_rows(math.nan, math.inf), is_causal=True, pad_v=False))))
    assert_right(case, *FRONTENDS[frontend](case.problem(), "cpu", backend="FLASHINFER", return_lse=True))


def _over_dlpack_for(frontend: str, launch: Any) -> Any:
    return torch_call.over_dlpack(launch) if frontend == "numpy" else launch


def test_scale_arrives_as_given(install: Install) -> None:
    """sglang#3785: a scale that was dropped on the way; flashinfer#1023: values lost in a positional tail."""
    seen = []

    def recording(*arguments: Any) -> Any:
        seen.append(arguments[7])
        return stubs.attention(*arguments)

    install(stubs.stub_kernel("scale", lambda: torch_call.adapt(recording, is_causal=True, pad_v=False)))
    problem = BY_NAME["16-heads"].problem()
    for scale in (0.0, -0.0109, 1.0, 0.0109):
        run_torch(problem, "cpu", backend="FLASHINFER", scale=scale)
    assert seen == [scale for scale in (0.0, -0.0109, 1.0, 0.0109) for _ in range(2)]


@pytest.mark.parametrize(
    "error", [ImportError, OSError, AttributeError, TypeError, RuntimeError, NotImplementedError, AssertionError], ids=lambda e: e.__name__
)
def test_any_exception_of_a_package_becomes_a_reason(install: Install, monkeypatch: pytest.MonkeyPatch, error: type[Exception]) -> None:
    """oumi#2586, FastVideo#1558, open-r1#684: guards that caught ImportError alone. Automatic choice goes on; an explicit one raises, with the cause."""
    from mla_interop.kernels.torch_package import TorchPackage

    def broken() -> Any:
        raise error("undefined symbol: _ZN3c10")

    package = TorchPackage(variant="fa9", module="torch", distribution="stub-attn", open=broken, capabilities=("9.x",))
    install(stubs.stub_kernel("broken", lambda: package.load(True)))
    case = BY_NAME["16-heads"]
    with pytest.warns(UserWarning, match=rf"FLASHINFER \(broken\): .*{error.__name__}: undefined symbol.*; using CPU_SDPA.torch"):
        assert_right(case, *run_torch(case.problem(), "cpu", return_lse=True))
    with pytest.raises(
        mla_interop.MLAUnsupportedError, match=rf"FLASHINFER \(broken\): stub-attn is installed but cannot be used: {error.__name__}: undefined"
    ):
        run_torch(case.problem(), "cpu", backend="FLASHINFER")


def test_a_failed_build_falls_through_to_the_next_kernel_then_the_next_backend(install: Install) -> None:
    """flashinfer#4410, cudnn-frontend#897: the support check said yes, the build failed. The reason is kept, the tool's words in it."""
    good = stubs.stub_kernel("good", lambda: torch_call.adapt(stubs.attention, is_causal=True, pad_v=False))
    install(stubs.stub_kernel("bad", stubs.failed_build("ninja: error: out of memory")), good)
    with pytest.warns(UserWarning, match=r"FLASHINFER \(bad\): ninja: error: out of memory; using FLASHINFER.good"):
        assert mla_interop.select(_config()).kernel.name.split(".")[1] == "good"
    install(stubs.stub_kernel("bad", stubs.failed_build("ninja: error: out of memory")))
    with pytest.warns(UserWarning, match=r"FLASHINFER \(bad\): ninja: error: out of memory; using CPU_SDPA.torch"):
        assert mla_interop.select(_config()).get_name() == "CPU_SDPA"
    with pytest.raises(mla_interop.MLAUnsupportedError, match=r"FLASHINFER \(bad\): ninja: error: out of memory"):
        mla_interop.select(_config(), "FLASHINFER")
    with pytest.warns(UserWarning, match="ninja: error: out of memory"):
        assert mla_interop.select(_config(), "FLASHINFER", fallback=True).get_name() == "CPU_SDPA"


def test_an_explicit_choice_that_cannot_be_built_raises_with_its_cause(install: Install) -> None:
    """Megatron-LM#277: an explicit request fails, and does not fall back."""
    install(stubs.stub_kernel("bad", stubs.failed_build("cannot open shared object file")))
    with pytest.raises(mla_interop.MLAUnsupportedError) as refusal:
        run_torch(BY_NAME["16-heads"].problem(), "cpu", backend="FLASHINFER")
    assert isinstance(refusal.value.__cause__, mla_interop.MLABuildError)


@pytest.mark.parametrize("error", [RuntimeError, ValueError, NotImplementedError], ids=lambda e: e.__name__)
def test_a_kernel_that_fails_when_it_runs_is_not_replaced_silently(install: Install, error: type[Exception]) -> None:
    """cudnn-frontend#633: a failure at run time is not "unsupported"; automatic choice must not hide it."""

    def failing(*arguments: Any) -> Any:
        raise error("CUDA error: an illegal memory access was encountered")

    install(stubs.stub_kernel("runs-badly", lambda: torch_call.adapt(failing, is_causal=True, pad_v=False)))
    with pytest.raises(error, match="illegal memory access"):
        run_torch(BY_NAME["16-heads"].problem(), "cpu")


def test_nothing_is_launched_where_there_is_nothing_to_do(install: Install) -> None:
    """flash-attention#2470: a kernel that stops the process on empty keys must never be reached."""

    def deadly(*arguments: Any) -> Any:
        raise AssertionError("launched")

    install(stubs.stub_kernel("deadly", lambda: torch_call.adapt(deadly, is_causal=True, pad_v=False)))
    for name in ("all-k-empty", "all-q-empty", "tail-only"):
        case = BY_NAME[name]
        assert_right(case, *run_torch(case.problem(), "cpu", backend="FLASHINFER", return_lse=True))
        assert_right(case, *run_numpy(case.problem(), "cpu", backend="FLASHINFER", return_lse=True))
    q, k, v = torch.zeros(0, 3, 192), torch.zeros(4, 3, 192), torch.zeros(4, 3, 128)
    assert torch_side.mla_prefill(q, k, v, backend="FLASHINFER").shape == (0, 3, 128)
    assert torch_side.mla_prefill(q[:, :0], k[:, :0], v[:, :0], backend="FLASHINFER").shape == (0, 0, 128)


def test_a_stub_merges_like_any_other(install: Install) -> None:
    """vllm#52796: one pass and context + new tokens agree, through a kernel that leaves +inf in rows without a context."""
    launches = {mask: torch_call.adapt(stubs.empty_rows(math.nan, math.inf), is_causal=mask, pad_v=False) for mask in (True, False)}
    made = {mask: stubs.stub_kernel(f"merge-{mask}", lambda mask=mask: launches[mask]) for mask in (True, False)}
    install(by_config=lambda config: [made[config.is_causal]])
    case, context = BY_NAME["every-kind"], (0, 0, 0, 23, 0, 0)
    problem = case.problem()
    q, k, v = (to_torch(x) for x in (problem.q, problem.k, problem.v))
    rows = np.concatenate([np.arange(start, start + length) for start, length in zip(problem.cu_k[:-1], context)])
    others = np.setdiff1d(np.arange(len(problem.k)), rows)
    cu_context = np.concatenate([[0], np.cumsum(context)])
    calls = [(rows, cu_context, False), (others, problem.cu_k - cu_context, True)]
    results = [
        torch_side.mla_prefill(q, k[x], v[x], cu_seqlens_q=problem.cu_q, cu_seqlens_k=cu, is_causal=mask, backend="FLASHINFER", return_lse=True)
        for x, cu, mask in calls
    ]
    out, lse = mla_interop.merge(*results[0], *results[1])
    assert_right(case, out, lse)


def _config() -> mla_interop.MLAPrefillSelectorConfig:
    dimensions = mla_interop.MLADimensions(qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    return mla_interop.MLAPrefillSelectorConfig(dimensions=dimensions, num_heads=16, device_type="cpu")
