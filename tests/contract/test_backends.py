"""The contract (docs, section "contract") for every backend, through every way in, generated from what the backends declare.

What a backend declares that it cannot serve must be refused when it is named: that is asserted, not skipped.
"""

import numpy as np
import pytest
from cases import BY_NAME, CASES, ESSENTIAL, Case
from frontends import FRONTENDS, TRACED, assert_right, declared_reasons, errors, needs

import mla_interop
from mla_interop.backends import registry

SLOW = pytest.mark.slow
EVERYWHERE = ("torch", "numpy")
ON_CPU = [name for name in registry.names() if "cpu" in registry.backend_class(name).device_types]


def check(backend: str, frontend: str, case: Case, device: str, return_lse: bool = True) -> tuple[float, float] | None:
    """One backend, one way in, one case: right within the contract's tolerances, or refused because it was declared so."""
    problem, reasons = case.problem(), declared_reasons(backend, case, device, frontend in TRACED, return_lse)
    options = {"backend": backend, "is_causal": case.is_causal, "scale": case.scale, "return_lse": return_lse}
    if reasons:
        with pytest.raises(mla_interop.MLAUnsupportedError) as refusal:
            FRONTENDS[frontend](problem, device, **options)
        assert backend in str(refusal.value) and all(reason in str(refusal.value) for reason in reasons)
        return None
    out, lse = FRONTENDS[frontend](problem, device, **options)
    assert (lse is None) == (not return_lse)
    return assert_right(case, out, lse)


def _marked(cases: list[Case]) -> list[object]:
    return [pytest.param(case, id=str(case), marks=SLOW if case.heads == 128 else ()) for case in cases]


@pytest.mark.parametrize("case", _marked(CASES))
@pytest.mark.parametrize("frontend", EVERYWHERE)
@pytest.mark.parametrize("backend", ON_CPU)
def test_every_case(backend: str, frontend: str, case: Case) -> None:
    check(backend, frontend, case, "cpu")


@pytest.mark.parametrize("case", _marked([case for case in CASES if case not in ESSENTIAL]))
def test_every_case_in_a_jitted_program(case: Case) -> None:
    """The default CPU kernel behind XLA, lengths traced; REFERENCE, which XLA compiles anew for each case, has the essential ones."""
    check("CPU_SDPA", "jit", case, "cpu")


@pytest.mark.parametrize("case", _marked(ESSENTIAL))
@pytest.mark.parametrize(("backend", "frontend"), [(b, f) for b in registry.names() for f in FRONTENDS if b not in ON_CPU or f not in EVERYWHERE])
def test_essential_cases_every_way_in(backend: str, frontend: str, case: Case) -> None:
    check(backend, frontend, case, "cpu")


@pytest.mark.parametrize("frontend", FRONTENDS)
@pytest.mark.parametrize("backend", ON_CPU)
def test_out_is_the_same_without_lse(backend: str, frontend: str) -> None:
    check(backend, frontend, BY_NAME["every-kind"], "cpu", return_lse=False)


@pytest.mark.parametrize("backend", ON_CPU)
def test_each_sequence_is_as_if_alone(backend: str) -> None:
    """A wrapped read is finite and plausible (flash-linear-attention#1080): compare sequence by sequence."""
    needs(backend)
    problem = BY_NAME["many-sequences"].problem()
    together, lse = mla_interop.mla_prefill(
        problem.q, problem.k, problem.v, cu_seqlens_q=problem.cu_q, cu_seqlens_k=problem.cu_k, backend=backend, return_lse=True
    )
    for q0, q1, k0, k1 in zip(problem.cu_q[:-1], problem.cu_q[1:], problem.cu_k[:-1], problem.cu_k[1:]):
        alone, alone_lse = mla_interop.mla_prefill(problem.q[q0:q1], problem.k[k0:k1], problem.v[k0:k1], backend=backend, return_lse=True)
        np.testing.assert_allclose(together[q0:q1].astype(np.float32), alone.astype(np.float32), rtol=1e-2, atol=1e-2)
        np.testing.assert_allclose(lse[:, q0:q1], alone_lse, rtol=0, atol=1e-4)


def test_the_judge_finds_a_wrong_lse_and_a_wrong_empty_row() -> None:
    """A judge that cannot fail proves nothing."""
    case = BY_NAME["k-empty-last"]
    problem = case.problem()
    right, right_lse = problem.out.astype(np.float32), problem.lse.astype(np.float32)
    assert_right(case, right, right_lse)
    with pytest.raises(AssertionError, match="lse: absolute error"):
        assert_right(case, right, np.where(np.isfinite(right_lse), right_lse + 2e-3, right_lse).astype(np.float32))
    with pytest.raises(AssertionError, match="must be 0"):
        errors(problem, np.where(np.isneginf(problem.lse).T[..., None], np.nan, right), right_lse)
    with pytest.raises(AssertionError, match="must be -inf"):
        errors(problem, right, np.where(np.isneginf(right_lse), np.inf, right_lse).astype(np.float32))
    with pytest.raises(AssertionError, match="out: relative error"):
        assert_right(case, right * 1.01, right_lse)
