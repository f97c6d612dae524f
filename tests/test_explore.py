"""The exploration API: its numbers against plain NumPy, from three frameworks; its tables and pictures; what it refuses."""

import importlib.util
import json
import subprocess
import sys
from typing import Any

import numpy as np
import oracle
import pytest
from frontends import to_jax, to_torch

from mla_interop import MLAPrefillSelectorConfig, MLAUnsupportedError, explore
from mla_interop.dimensions import MODELS
from mla_interop.errors import MLAInputError, MLAUnavailableError
from mla_interop.explore import attention, batch, exact, speed, table

CU_Q, CU_K = np.array([0, 5, 5, 9, 40], np.int32), np.array([0, 12, 15, 15, 62], np.int32)
HEADS = 3
CONVERT = {"numpy": lambda x: x, "torch": to_torch, "jax": to_jax}


def problem(dtype: type = np.float32) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(3)
    return tuple(random.standard_normal((tokens, HEADS, width)).astype(dtype) for tokens, width in ((40, 24), (62, 24), (62, 16)))  # pyright: ignore


def given(framework: str) -> tuple:
    if framework != "numpy":
        pytest.importorskip(framework)
    return tuple(CONVERT[framework](x) for x in problem())


@pytest.fixture
def figure_class() -> type:
    return pytest.importorskip("matplotlib.figure").Figure


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("scale", [None, 0.0, -0.4])
def test_float64_is_the_oracles(is_causal: bool, scale: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "_BLOCK_SCORES", 100)  # several blocks, the last one shorter
    q, k, v = problem()
    out, lse = exact.attention(batch.make_batch(q, k, v, CU_Q, CU_K, scale, is_causal))
    right, right_lse = oracle.attention(q, k, v, CU_Q, CU_K, scale, is_causal)
    np.testing.assert_allclose(out, right, atol=1e-12)
    np.testing.assert_allclose(lse, right_lse, atol=1e-12)


@pytest.mark.parametrize("framework", CONVERT)
def test_compare(framework: str) -> None:
    q, k, v = given(framework)
    right, right_lse = oracle.attention(*problem(), CU_Q, CU_K)
    off, off_lse = right.copy(), right_lse.copy()
    off[17, 2] += 0.5
    off_lse[1, 20] -= 0.25
    results = {"exact": (right, right_lse), "off": (off, off_lse), "no lse": (right.astype(np.float32), None)}
    found = explore.compare(q, k, v, cu_seqlens_q=CU_Q, cu_seqlens_k=CU_K, backends="reference", results=results)
    rows = {row["result"]: row for row in found.rows}
    assert [*rows] == ["REFERENCE", "exact", "off", "no lse"] and found.labels == ["float64", *rows]
    assert 0 < rows["REFERENCE"]["out error"] < 1e-6 and rows["REFERENCE"]["lse error"] < 1e-5 and rows["REFERENCE"]["bad rows"] == 0
    assert rows["exact"]["out error"] < 1e-14
    expected = np.linalg.norm(off - right) / np.linalg.norm(right)
    assert rows["off"]["out error"] == pytest.approx(expected) and rows["off"]["lse error"] == pytest.approx(0.25)
    assert rows["off"]["at"] == "sequence 3, position 8, head 2" and rows["no lse"]["lse error"] is None
    assert rows["no lse"]["x rounding"] == pytest.approx(1.0, rel=1e-6)
    usual = np.sqrt((right**2).sum(-1).mean())
    assert found.errors["off"][17, 2] == pytest.approx(0.5 * 16**0.5 / usual) and (found.errors["off"] > 1e-6).sum() == 1
    assert found.lse_errors["off"][1, 20] == pytest.approx(-0.25)
    assert found.worst(1) == [{"result": "off", "sequence": 3, "position": 8, "head": 2, "error": found.errors["off"][17, 2], "lse error": pytest.approx(0)}]
    assert found.agreement[0, 3] == pytest.approx(expected) and not np.diagonal(found.agreement).any()
    assert [row["off"] > 1e-3 for row in found.heads()] == [False, False, True]


def test_compare_finds_rows_that_are_not_as_promised() -> None:
    q, k, v = problem()
    out, lse = oracle.attention(q, k, v, CU_Q, CU_K)
    out[7, 0], lse[1, 8], out[20, 1], lse[2, 30] = 1.0, 3.0, np.nan, np.nan  # two rows without a key, two with
    found = explore.compare(q, k, v, cu_seqlens_q=CU_Q, cu_seqlens_k=CU_K, backends=(), results={"bad": (out, lse)})
    assert found.rows[0]["bad rows"] == 4 and np.isinf(found.errors["bad"][20, 1]) and np.isinf(found.lse_errors["bad"][2, 30])
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["rows"][0]["out error"] == "inf"


@pytest.mark.parametrize(("factor", "text"), [(1 / np.log(2), "base 2"), (np.log(2), "converted to natural log twice"), (1.1, "")])
def test_compare_names_the_base_of_an_lse(factor: float, text: str) -> None:
    q, k, v = problem()
    out, lse = oracle.attention(q, k, v, CU_Q, CU_K)
    found = explore.compare(q, k, v, cu_seqlens_q=CU_Q, cu_seqlens_k=CU_K, backends=(), results={"off": (out, lse * factor)})
    assert text in found.rows[0]["note"] and bool(text) == bool(found.rows[0]["note"])


def test_compare_through_two_frameworks() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("jax")
    import ml_dtypes

    q, k, v = (to_torch(x.astype(ml_dtypes.bfloat16)) for x in problem())
    found = explore.compare(q, k, v, cu_seqlens_q=CU_Q, cu_seqlens_k=CU_K, backends=["CPU_SDPA"], frameworks=("torch", "jax", "numpy"))
    assert found.labels == ["float64", "CPU_SDPA (torch)", "CPU_SDPA (jax)", "CPU_SDPA (numpy)"]
    assert not found.agreement[1:, 1:].any() and all(0.9 < row["x rounding"] < 2 for row in found.rows)


def test_compare_takes_a_dense_batch_and_a_backend_as_baseline() -> None:
    random = np.random.default_rng(0)
    q, k, v = (random.standard_normal((2, tokens, HEADS, width)).astype(np.float32) for tokens, width in ((4, 24), (7, 24), (7, 16)))
    found = explore.compare(q, k, v, backends=("REFERENCE",), results={"twice": explore_twice(q, k, v)}, baseline="REFERENCE")
    assert found.labels == ["REFERENCE", "twice"] and found.rows[0]["out error"] == pytest.approx(1.0) and found.rows[0]["x rounding"] is None


def explore_twice(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    packed = [x.reshape(-1, *x.shape[2:]) for x in (q, k, v)]
    out, lse = oracle.attention(*packed, np.array([0, 4, 8]), np.array([0, 7, 14]))  # pyright: ignore
    return 2 * out, lse


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"baseline": "FA9"}, "baseline: got 'FA9'"),
        ({"backends": "FA9"}, "FA9"),
        ({"results": {"a": np.zeros(3)}}, r"results\['a'\]: got ndarray"),
        ({"results": {"a": (np.zeros((40, 3, 16)), np.zeros((40, 3)))}}, r"lse: got shape \(40, 3\); allowed: \(3, 40\).*layout='TN'"),
        ({"results": {"float64": (np.zeros((40, 3, 16)), None)}}, "label 'float64'"),
        ({"frameworks": ("mxnet",)}, "frameworks: got 'mxnet'"),
        ({"cu_seqlens_q": [0, 5, 5, 9, 41]}, "num_tokens_q"),
        ({"cu_seqlens_q": None}, "cu_seqlens_q: got None"),
    ],
)
def test_compare_refuses(options: dict, says: str) -> None:
    q, k, v = problem()
    with pytest.raises(MLAInputError, match=says):
        explore.compare(q, k, v, **{"cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K, "backends": "REFERENCE", **options})


def test_compare_refuses_what_cannot_be_run(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = problem()
    with pytest.raises(MLAUnsupportedError, match="device cpu"):
        explore.compare(q, k, v, cu_seqlens_q=CU_Q, cu_seqlens_k=CU_K, backends="FLASH_ATTN")
    with pytest.raises(MLAUnsupportedError, match="nothing to compare"):
        explore.compare(q, k, v, cu_seqlens_q=CU_Q, cu_seqlens_k=CU_K, backends=())
    monkeypatch.setattr(exact, "MAX_FLOPS", 1e3)
    with pytest.raises(MLAInputError, match="baseline='REFERENCE'"):
        explore.compare(q, k, v, cu_seqlens_q=CU_Q, cu_seqlens_k=CU_K)


@pytest.mark.parametrize("size", [256, 5])
@pytest.mark.parametrize("framework", CONVERT)
def test_attention_map(framework: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "_BLOCK_SCORES", 300)
    q, k, _ = given(framework)
    found = explore.attention_map(q, k, heads=[2, 0], sequence=3, size=size, cu_seqlens_q=CU_Q, cu_seqlens_k=CU_K)
    queries, keys = (x.astype(np.float64)[start:, 2] for x, start in zip(problem(), (9, 15)))
    scores = queries @ keys.T * 24**-0.5
    scores[np.arange(47)[None] > np.arange(31)[:, None] + 16] = -np.inf
    weights = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    row = found.rows[0]
    assert row["head"] == 2 and row["on itself"] == pytest.approx(weights[np.arange(31), np.arange(31) + 16].mean())
    assert row["on the first key"] == pytest.approx(weights[:, 0].mean())
    assert row["distance"] == pytest.approx((weights * abs(np.arange(31)[:, None] + 16 - np.arange(47))).sum(1).mean())
    logs = np.log(weights, out=np.zeros_like(weights), where=weights > 0)
    assert row["keys in use"] == pytest.approx(np.exp(-(weights * logs).sum(1)).mean())
    np.testing.assert_allclose(found.weights.sum(-1), 1)
    if size == 256:
        np.testing.assert_allclose(found.weights[0], weights, atol=1e-12)
    else:
        assert found.weights.shape == (2, 5, 5)
        rows, columns = (slice(*found.query_edges[1:3]), slice(*found.key_edges[2:4]))
        assert found.weights[0, 1, 2] == pytest.approx(weights[rows, columns].sum(1).mean())


def test_attention_map_of_queries_without_keys() -> None:
    q, k, _ = problem()
    found = explore.attention_map(q[:9], k[:4], heads=1)
    assert not found.weights[0, :5].any() and found.weights[0, 5, 0] == 1 and found.rows[0]["on the first key"] > 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"heads": 3}, "heads: got 3; allowed: indices from 0 to 2"),
        ({"heads": []}, "heads"),
        ({"sequence": 4}, "sequence: got 4"),
        ({"sequence": 1}, "0 queries and 3 keys"),
        ({"size": 0}, "size"),
    ],
)
def test_attention_map_refuses(options: dict, says: str) -> None:
    q, k, _ = problem()
    with pytest.raises(MLAInputError, match=says):
        explore.attention_map(q, k, cu_seqlens_q=CU_Q, cu_seqlens_k=CU_K, **options)


def test_attention_map_refuses_what_would_take_minutes() -> None:
    q = np.broadcast_to(np.float32(0), (50_000, 4, 8))  # no memory
    with pytest.raises(MLAInputError, match=r"50000 queries x 50000 keys x 4 heads.*fewer heads, or the last queries"):
        explore.attention_map(q, q)
    assert attention.MAX_SCORES < 50_000**2 * 4


@pytest.mark.parametrize("framework", CONVERT)
def test_lse_profile(framework: str) -> None:
    given(framework)
    _, lse = oracle.attention(*problem(), CU_Q, CU_K)
    broken = lse.astype(np.float32).copy()
    broken[0, 30], broken[1, 6] = np.inf, 0.0  # a row with keys, and one that has none
    arrays = {"right": CONVERT[framework](lse.astype(np.float32)), "broken": CONVERT[framework](broken)}
    found = explore.lse_profile(arrays, cu_seqlens_q=CU_Q, cu_seqlens_k=CU_K)
    right, wrong = found.rows
    finite = lse[np.isfinite(lse)]
    assert (right["min"], right["median"], right["max"]) == pytest.approx((finite.min(), np.median(finite), finite.max()), rel=1e-6)
    assert right["without a key"] == right["expected"] == 12 and right["not finite"] == 0
    assert wrong["without a key"] == 11 and wrong["expected"] == 12 and wrong["not finite"] == 1
    assert found.keys[:5].tolist() == [8, 9, 10, 11, 12] and not found.keys[5:9].any() and found.keys[-1] == 47


def test_lse_profile_shows_the_base() -> None:
    lse = np.log(np.arange(1, 2001))[None].repeat(2, 0)  # of scores that are all 0
    found = explore.lse_profile({"e": lse, "2": lse / np.log(2)})
    assert [row["per e-fold"] for row in found.rows] == pytest.approx([1, 1 / np.log(2)], rel=0.01)
    with pytest.raises(MLAInputError, match="layout='TN'"):
        explore.lse_profile({"a": lse, "b": lse.T})
    with pytest.raises(MLAInputError, match="empty mapping"):
        explore.lse_profile({})


def test_timing() -> None:
    frameworks = [name for name in CONVERT if name == "numpy" or importlib.util.find_spec(name)]
    q, k, v = problem()
    found = explore.timing(q, k, v, backends="REFERENCE", frameworks=frameworks, lengths=(3, 17), repeats=2)
    assert [(row["framework"], row["tokens"]) for row in found.rows] == [(name, tokens) for tokens in (3, 17) for name in frameworks]
    for row in found.rows:
        assert 0 < row["us_min"] <= row["us"] <= row["us_max"] and row["kernel"] == "REFERENCE.xp"
        pairs = row["tokens"] * (row["tokens"] + 1) / 2
        assert row["tflops"] == pytest.approx(2 * pairs * HEADS * 40 / row["us"] * 1e-6)
    assert found.where(framework="numpy").best() == found.where(framework="numpy").rows
    with pytest.raises(MLAInputError, match="framework='mxnet'"):
        found.where(framework="mxnet")
    with pytest.raises(MLAInputError, match="lengths: got 63"):
        explore.timing(q, k, v, lengths=(63,))


def test_a_backend_that_fails_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless it was named: then its error is the answer."""
    q, k, v = problem()
    monkeypatch.setattr(batch.Batch, "backends", lambda self: ["FLASH_ATTN", "REFERENCE"])
    compared, timed = explore.compare(q, k, v, cu_seqlens_q=CU_Q, cu_seqlens_k=CU_K), explore.timing(q, k, v, lengths=(3,), repeats=1)
    assert compared.labels == ["float64", "REFERENCE"] and "device cpu" in compared.failed["FLASH_ATTN"]
    assert [row["kernel"] for row in timed.rows] == ["REFERENCE.xp"] and "device cpu" in timed.failed["FLASH_ATTN (numpy)"]
    for answer in (compared, timed):
        assert "device cpu" in str(answer) and "device cpu" in answer._repr_html_()
    with pytest.raises(MLAUnsupportedError, match="device cpu"):
        explore.timing(q, k, v, backends="FLASH_ATTN", lengths=(3,))


def test_committed_results_load(request: pytest.FixtureRequest, tmp_path) -> None:
    results = request.config.rootpath / "benchmarks" / "results"
    found = explore.load_results(results / "h200.json")
    assert len(found.best()) == 6 and all(row["us"] == min(r["us"] for r in found.rows if r["problem"] == row["problem"]) for row in found.best())
    assert {row["problem"] for row in explore.load_results(results / "h200_layer.json").rows} == {"layer"}
    (tmp_path / "other.json").write_text("{}")
    for path in (tmp_path / "other.json", tmp_path / "missing.json"):
        with pytest.raises(MLAInputError, match="mla-interop bench"):
            explore.load_results(path)


def test_results_have_a_ceiling_and_overheads(figure_class: type) -> None:
    """Of calls that do what the kernel alone does; not where a kernel is so long that its own time varies by more."""

    def row(name: str, us: float, dtype: str, problem: str = "1x2x1") -> dict[str, Any]:
        return {
            "problem": problem,
            "dtype": dtype,
            "framework": "torch",
            "name": name,
            "kernel": "A.c",
            "us": us,
            "us_min": us,
            "us_max": us,
            "tflops": 100.0 / us,
        }

    short = [row(name, us, "bfloat16") for name, us in (("kernel object", 10.0), ("mla_interop", 12.5), ("mla_interop + lse", 19.0), ("peer", 11.0))]
    long = [row(name, us, "bfloat16", "1x9x1") for name, us in (("kernel object", 1000.0), ("mla_interop", 990.0))]
    rows = [*short, *long, row("mla_interop", 20.0, "float32")]
    found = speed.Timing.of_results("M", {"rows": rows, "ceiling": [{"dtype": "bfloat16", "size": 8, "us": 1.0, "tflops": 50.0}]})
    assert [row.get("overhead_us") for row in found.rows] == [None, 2.5, None, None, None, None, None] and found.ceilings == {"bfloat16": 50.0}
    assert {axis.get_title(loc="left"): axis.get_title(loc="right") for axis in found.plot("tflops").axes if axis.get_visible()} == {
        "1x2x1, bfloat16": "line: a matrix product, 50",
        "1x9x1, bfloat16": "line: a matrix product, 50",
        "1x2x1, float32": "",
    }
    assert isinstance(found.plot("overhead_us"), figure_class)
    with pytest.raises(MLAInputError, match="what: got 'overhead_us'; allowed: 'us' or 'tflops'"):
        speed.Timing.of_results("M", {"rows": rows[-1:]}).plot("overhead_us")


def test_choices() -> None:
    config = MLAPrefillSelectorConfig(dimensions=MODELS["deepseek-v3"].dimensions, num_heads=1, device_type="cpu", dtype="float32")
    found = explore.choices(config, num_heads=(16, 128), num_tokens=(512, 1024, 2048))
    assert [(row["heads"], row["tokens"]) for row in found.rows] == [(n, t) for n in (16, 128) for t in (512, 1024, 2048)]
    assert {row["backend"] for row in found.rows} <= {"CPU_SDPA", "REFERENCE"}
    with pytest.raises(MLAInputError, match="num_heads"):
        explore.choices(config, num_heads=(), num_tokens=(1,))


def all_answers(request: pytest.FixtureRequest) -> list[table.Explored]:
    q, k, v = problem()
    out, lse = oracle.attention(q, k, v, CU_Q, CU_K)
    lengths = {"cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K}
    bad = out.copy()
    bad[20, 1] = np.nan
    results = {"base 2 <b>": (out, lse / np.log(2)), "nan": (bad, np.full_like(lse, np.nan)), "same": (out, lse), "no lse": (out, None)}
    config = MLAPrefillSelectorConfig(dimensions=MODELS["deepseek-v3"].dimensions, num_heads=1, device_type="cpu", dtype="float32")
    return [
        explore.compare(q, k, v, backends="REFERENCE", results=results, **lengths),
        explore.attention_map(q, k, sequence=3, **lengths),
        explore.lse_profile({"a": lse, "all empty": np.full_like(lse, -np.inf)}, **lengths),
        explore.timing(q, k, v, backends="REFERENCE", lengths=(2, 9), repeats=1),
        explore.timing(q, k, v, backends="REFERENCE", repeats=1, **lengths),
        explore.load_results(request.config.rootpath / "benchmarks" / "results" / "h200.json"),
        explore.choices(config, num_heads=(16,), num_tokens=(512,)),
    ]


def test_answers_show_themselves(request: pytest.FixtureRequest, figure_class: type) -> None:
    for answer in all_answers(request):
        html = answer._repr_html_()
        assert html.startswith("<table") and html.count("<table") == html.count("</table>") and "<b>" not in html
        assert all(name in html and name in str(answer) for name in table.columns(answer.rows))
        json.dumps(answer.to_dict(), allow_nan=False)
        figure = answer.plot()
        assert isinstance(figure, figure_class) and figure.axes
        assert figure._repr_png_()[:4] == b"\x89PNG"  # pyright: ignore
    assert "matplotlib.pyplot" not in sys.modules or not sys.modules["matplotlib.pyplot"].get_fignums()


def test_data_frames(request: pytest.FixtureRequest) -> None:
    pytest.importorskip("pandas")
    answers = all_answers(request)
    for answer in answers:
        frame = answer.to_dataframe()
        assert len(frame) == len(answer.rows) and list(frame.columns)[: len(answer.rows[0])] == [*answer.rows[0]]
    compared = answers[0]
    assert isinstance(compared, explore.Comparison)
    assert (
        compared.to_dataframe("agreement").shape == (6, 7) and compared.to_dataframe("heads").shape == (HEADS, 6) and len(compared.to_dataframe("worst")) == 10
    )
    with pytest.raises(MLAInputError, match="what: got 'rest'"):
        compared.to_dataframe("rest")


def test_without_pandas_and_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    found = explore.lse_profile(np.zeros((2, 5), np.float32))
    for module in ("pandas", "matplotlib", "matplotlib.figure", "matplotlib.cm"):
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, "mla_interop.explore.pictures", raising=False)
    for wanted in (found.to_dataframe, found.plot):
        with pytest.raises(MLAUnavailableError, match=r"pip install 'mla-interop\[notebook\]'"):
            wanted()


def test_importing_it_imports_no_framework_and_no_pictures() -> None:
    code = "import sys, mla_interop.explore; print([m for m in ('torch', 'jax', 'pandas', 'matplotlib') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
