"""The choice by measured times: the table, its nearest shape, its renderer, what ships, and what `mla-interop tune` makes."""

import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mla_interop
from mla_interop import MLADimensions, MLAInputError, MLAPrefillSelectorConfig, explain, measured, select, use_config, warmup
from mla_interop.backends.base import Kernel
from mla_interop.bench.measured_table import problem_named, render, write
from mla_interop.capability import machine_name
from mla_interop.measured import DATA, Shape, fastest_first, times_for

ROOT = Path(__file__).parents[2]
R1 = MLADimensions(qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
# Microseconds; FLASH_ATTN.fa3 is faster than what FLASH_ATTN prefers at one shape, and FLASHINFER at another.
TIMES = {
    "16x512x1": {"FLASH_ATTN.fa4": 15.0, "FLASHINFER.fa3": 16.0, "FLASH_ATTN.fa3": 40.0},
    "128x4096x1": {"FLASH_ATTN.fa4": 1143.0, "FLASHINFER.fa3": 1167.0, "FLASH_ATTN.fa3": 1101.0},
    "128x1024x8": {"FLASH_ATTN.fa4": 849.0, "FLASHINFER.fa3": 779.0, "FLASH_ATTN.fa3": 910.0},
    "128xrandom4096x32": {"FLASH_ATTN.fa4": 9000.0, "FLASHINFER.fa3": 8000.0},
}


def results(times: dict[str, dict[str, float]] = TIMES, machine: str = "NVIDIA H200", **environment: Any) -> dict[str, Any]:
    """A result file in the benchmarks' format: the times are the geometric means of the two frameworks'. With rows that must not count."""
    rows = []
    for problem, kernels in times.items():
        head = {"problem": problem, "dtype": "bfloat16"}
        for kernel, us in kernels.items():
            for framework, factor in (("torch", 4), ("jax", 1 / 4)):
                rows.append({**head, "framework": framework, "name": "mla_interop", "kernel": kernel, "us": us * factor, "err_out": 0.002})
                rows.append({**head, "framework": framework, "name": "mla_interop + lse", "kernel": kernel, "us": us * factor})
            rows.append({**head, "framework": "torch", "name": "kernel object", "kernel": kernel, "us": us / 1000})
            rows.append({**head, "framework": "jax", "name": "mla_interop, outside jit", "kernel": kernel, "us": us * 1000})
        rows.append({**head, "framework": "torch", "name": "mla_interop", "kernel": "CUDNN.graph", "failed": "RuntimeError"})
    return {"environment": {"machine": machine, "date": "2026-01-02", "versions": {"torch": "2.11"}, **environment}, "rows": rows}


@pytest.fixture
def shipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Only the table of TIMES ships, and this machine has none of its own."""
    monkeypatch.setattr(measured, "DATA", tmp_path / "data")
    monkeypatch.setenv("MLA_INTEROP_CACHE", str(tmp_path / "cache"))
    write(render(results(), "benchmarks/results/test.json"), tmp_path / "data" / "measured_sm90.json")
    mla_interop.clear_cache()
    return tmp_path


def problem(heads: int, tokens: int | None, seqs: int | None, capability: Any = "9.0", **changed: Any) -> MLAPrefillSelectorConfig:
    return MLAPrefillSelectorConfig(**{"dimensions": R1, "num_heads": heads, "capability": capability, "num_tokens": tokens, "num_seqs": seqs, **changed})


@pytest.mark.usefixtures("all_installed", "shipped")
@pytest.mark.parametrize(
    ("heads", "tokens", "seqs", "chosen"),
    [
        (16, 512, 1, "FLASH_ATTN.fa4"),
        (128, 4096, 1, "FLASH_ATTN.fa3"),
        (128, 8192, 8, "FLASHINFER.fa3"),
        (128, 65536, 32, "FLASHINFER.fa3"),
        (8, 300, 1, "FLASH_ATTN.fa4"),  # nearest: 16x512x1
        (128, 3000, 1, "FLASH_ATTN.fa3"),
        (64, 7000, 9, "FLASHINFER.fa3"),
        (128, None, None, "FLASH_ATTN.fa4"),  # no shape: the order
        (128, 8192, None, "FLASH_ATTN.fa4"),
    ],
)
def test_the_fastest_of_the_nearest_shape(heads: int, tokens: int | None, seqs: int | None, chosen: str) -> None:
    table = explain(problem(heads, tokens, seqs))
    row = next(row for row in table.rows if row.backend == table.chosen)
    assert f"{row.backend}.{row.variant}" == chosen
    assert (table.measured is None) == (tokens is None or seqs is None)
    if table.measured is not None:
        assert row.us == min(table.measured.us.values())


@pytest.mark.usefixtures("all_installed")
def test_what_an_lse_costs_counts_where_it_is_wanted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(measured, "DATA", tmp_path)
    monkeypatch.setenv("MLA_INTEROP_CACHE", str(tmp_path / "cache"))
    content = results({"128x512x1": {"FLASH_ATTN.fa4": 44.0, "FLASHINFER.fa3": 40.0}})
    head = {"problem": "128x512x1", "dtype": "bfloat16", "framework": "torch", "name": "mla_interop + lse"}
    content["rows"] = [row for row in content["rows"] if row["name"] == "mla_interop"]
    content["rows"] += [{**head, "kernel": "FLASHINFER.fa3", "us": 50.0}, {**head, "kernel": "FLASH_ATTN.fa3", "us": 47.0}]
    write(render(content, "a.json"), tmp_path / "measured_a.json")
    for needs_lse, us in ((False, {"FLASHINFER.fa3": 40.0, "FLASH_ATTN.fa3": 47.0}), (True, {"FLASHINFER.fa3": 50.0, "FLASH_ATTN.fa3": 47.0})):
        found = times_for(problem(128, 512, 1, needs_lse=needs_lse))
        assert found is not None and found.us == us | {"FLASH_ATTN.fa4": 44.0}  # one time serves both where there is no other
    assert [explain(problem(128, 512, 1, needs_lse=x)).chosen for x in (False, True)] == ["FLASHINFER", "FLASH_ATTN"]
    assert set(warmup._choices(problem(128, None, None))) == {"FLASHINFER.fa3", "FLASH_ATTN.fa4"}, "warmup builds for both"


@pytest.mark.usefixtures("all_installed", "shipped")
def test_explain_shows_the_numbers_that_decided() -> None:
    table = explain(problem(128, 8192, 8))
    text = str(table)
    assert "fastest that was measured; fa3; 779.0 us" in text and "fa4; 849.0 us" in text
    assert text.endswith("measured: times of NVIDIA H200, 2026-01-02 at 128 heads, 8192 tokens in 8")
    made = json.loads(json.dumps(table.to_dict()))
    assert made["measured"]["us"] == TIMES["128x1024x8"] and made["backends"][0]["us"] == 779.0 and made["order"][0] == "FLASHINFER"
    assert [row.backend for row in table.rows][: len(table.order)] == list(table.order)


@pytest.mark.usefixtures("all_installed", "shipped")
def test_what_was_not_measured_keeps_its_place() -> None:
    order, base = explain(problem(128, 8192, 8)).order, explain(problem(128, None, None)).order
    assert order == ("FLASHINFER", "FLASH_ATTN", *base[2:]) and base[:2] == ("FLASH_ATTN", "FLASHINFER")
    times = {"b": 3.0, "d": 1.0, "e": 2.0}
    assert fastest_first("abcdef", times.get) == list("adcebf")
    assert fastest_first("abc", {}.get) == list("abc")


@pytest.mark.usefixtures("all_installed", "shipped")
def test_what_is_invalid_is_not_chosen_however_fast() -> None:
    table = explain(problem(128, 8192, 8, traced=True))
    assert table.chosen == "FLASH_ATTN" and not next(row for row in table.rows if row.backend == "FLASHINFER").valid
    assert explain(problem(128, 8192, 8, flash_attn_version=2), "FLASH_ATTN").chosen == "FLASH_ATTN"


@pytest.mark.usefixtures("all_installed", "shipped")
@pytest.mark.parametrize("changed", [{"capability": "10.0"}, {"dtype": "float16"}, {"dimensions": MLADimensions.from_head_dims(256, 256)}])
def test_a_table_serves_its_device_dtype_and_dimensions_alone(changed: Any) -> None:
    assert explain(problem(**{"heads": 128, "tokens": 8192, "seqs": 8, **changed})).measured is None


@pytest.mark.usefixtures("all_installed", "shipped")
def test_policies() -> None:
    config = problem(128, 8192, 8)
    with use_config({"policy": "order"}):
        assert explain(config).chosen == "FLASH_ATTN" and explain(config).measured is None
    with use_config({"order": ["FLASH_ATTN", "FLASHINFER"]}):  # somebody's own order is an order
        assert explain(config).chosen == "FLASH_ATTN"
    with use_config({"order": ["FLASH_ATTN", "FLASHINFER"], "policy": "measured"}):
        assert explain(config).chosen == "FLASHINFER"
    assert explain(config, ["FLASH_ATTN", "FLASHINFER"]).chosen == "FLASH_ATTN"


@pytest.mark.usefixtures("all_installed", "shipped")
def test_lengths_inside_one_bucket_select_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Kernel, "launch", property(lambda kernel: lambda *arguments: None))
    first = select(problem(128, 8192, 8))
    assert select(problem(128, 8000, 7)) is first and select(problem(128, 11000, 9)) is first
    assert select(problem(128, 12000, 8)) is not first
    assert first.kernel.variant == "fa3" and first.get_name() == "FLASHINFER"


def test_the_bucket_is_the_nearest_power_of_two() -> None:
    got = [problem(1, tokens, 1).num_tokens for tokens in (1, 2, 3, 5, 6, 11, 12, 1448, 1449, 100_000)]
    assert got == [1, 2, 4, 4, 8, 8, 16, 1024, 2048, 131072]
    assert problem(1, 0, 0).num_tokens is None


def test_of_equally_near_shapes_the_smaller_one() -> None:
    near = [Shape(16, 512, 1), Shape(64, 512, 1)]
    assert near[0].distance(Shape(32, 512, 1)) == near[1].distance(Shape(32, 512, 1)) == 1
    assert Shape(16, 512, 1).distance(Shape(16, 1024, 2)) == 1  # one more sequence of the same length
    assert Shape(16, 512, 1).distance(Shape(16, 512, 2)) == 2


@pytest.mark.usefixtures("shipped")
def test_this_machines_own_table_comes_first_where_it_covers(monkeypatch: pytest.MonkeyPatch, all_installed: None) -> None:
    monkeypatch.setattr("mla_interop.measured.machine_name", lambda device: "NVIDIA H200" if device == "cuda" else "cpu")
    own = {"128x4096x1": {"FLASH_ATTN.fa4": 5.0, "FLASHINFER.fa3": 4.0}}
    write(render(results(own), "mla-interop tune"), measured.user_table("NVIDIA H200"))
    mla_interop.clear_cache()
    assert explain(problem(16, 512, 1)).chosen == "FLASHINFER"
    write(render(results(own, device="9.9"), "mla-interop tune"), measured.user_table("NVIDIA H200"))
    mla_interop.clear_cache()
    assert explain(problem(16, 512, 1)).chosen == "FLASH_ATTN"


@pytest.mark.usefixtures("all_installed")
@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 99}', '{"format": 1, "machine": "x", "date": "y", "entries": [{}]}'])
def test_a_damaged_table_is_left_out_with_a_warning(shipped: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr("mla_interop.measured.machine_name", lambda device: "NVIDIA H200")
    measured.user_table("NVIDIA H200").parent.mkdir()
    measured.user_table("NVIDIA H200").write_text(text)
    with pytest.warns(UserWarning, match="is no table of measured times .* is left out; `mla-interop tune` writes one anew"):
        assert explain(problem(128, 8192, 8)).chosen == "FLASHINFER"


def test_the_renderer_takes_what_a_users_call_takes() -> None:
    table = render(results({**TIMES, "128x3000x1": {"FLASH_ATTN.fa4": 1143.0 * 4, "FLASHINFER.fa3": 1167.0}}), "a.json")
    entries = {(entry["heads"], entry["tokens"], entry["seqs"]): entry for entry in table["entries"]}
    assert (
        table["source"] == "a.json" and table["machine"] == "NVIDIA H200" and set(entries) == {(16, 512, 1), (128, 4096, 1), (128, 8192, 8), (128, 65536, 32)}
    )
    assert entries[128, 8192, 8]["us"] == TIMES["128x1024x8"] and entries[128, 8192, 8]["device"] == "9.0"
    assert entries[128, 4096, 1]["us"] == {"FLASH_ATTN.fa4": 2286.0, "FLASHINFER.fa3": 1167.0, "FLASH_ATTN.fa3": 1101.0}


def test_problems_are_read_from_their_names() -> None:
    assert problem_named("16x512x3").lengths == (512,) * 3 and problem_named("8xrandom64x5").tokens < 320
    with pytest.raises(MLAInputError, match="problem: got 'big'; allowed: heads x length x sequences"):
        problem_named("big")
    with pytest.raises(MLAInputError, match="machine: got 'Riva 128'; allowed: NVIDIA A100"):
        render(results(machine="Riva 128"), "a.json")


TABLES = sorted(DATA.glob("measured_*.json"))
assert TABLES, "a table ships with the package"


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_what_ships_is_rendered_from_its_source(path: Path, tmp_path: Path) -> None:
    source = json.loads(path.read_text())["source"]
    write(render(json.loads((ROOT / source).read_text()), source), tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == path.read_text()


@pytest.mark.usefixtures("all_installed")
@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_the_choice_is_within_three_percent_of_the_best_at_every_shape_that_was_measured(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of all our kernels, by the geometric mean over both frameworks, since one choice serves both: where a call takes no longer than its host, they differ."""
    monkeypatch.setenv("MLA_INTEROP_CACHE", str(tmp_path))
    table = json.loads(path.read_text())
    times: dict[tuple[str, ...], dict[str, list[float]]] = {}
    for row in json.loads((ROOT / table["source"]).read_text())["rows"]:
        if row["name"] in ("mla_interop", "mla_interop + lse") and row["kernel"] and "us" in row:
            times.setdefault((row["problem"], row["dtype"], row["name"]), {}).setdefault(row["kernel"], []).append(row["us"])
    assert len({group[2] for group in times}) == 2 and {len(us) for group in times.values() for us in group.values()} == {2}
    for (name, dtype, kind), measured_us in times.items():
        us = {kernel: statistics.geometric_mean(both) for kernel, both in measured_us.items()}
        shape = problem_named(name)
        options = {"dtype": dtype, "scale": 192**-0.5, "needs_lse": kind.endswith("lse")}
        made = explain(problem(shape.heads, shape.tokens, len(shape.lengths), table["entries"][0]["device"], **options))
        row = next(row for row in made.rows if row.backend == made.chosen)
        assert us[f"{row.backend}.{row.variant}"] <= 1.03 * min(us.values()), (name, dtype, kind, us)


def test_tune_measures_this_machine_and_the_choice_follows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With times that a clock made up, so that the slow one is seen to win where it was fast."""
    pytest.importorskip("torch")
    from mla_interop.bench import tune

    monkeypatch.setenv("MLA_INTEROP_CACHE", str(tmp_path))
    monkeypatch.setattr(measured, "DATA", tmp_path / "none")
    monkeypatch.setattr(tune, "_CPU_SHAPES", ((8, 1), (16, 3)))
    clock = iter([50.0, 2.0, 7.0, 9.0])

    def side_by_side(runs: dict[str, Any], **options: Any) -> dict[str, dict[str, float]]:
        for run, _ in runs.values():
            run(1)
        return {kernel: {"us": next(clock)} for kernel in runs}

    monkeypatch.setattr(tune, "side_by_side", side_by_side)
    said: list[dict[str, Any]] = []
    with use_config({"order": ["REFERENCE", "CPU_SDPA"]}):
        path = tune.tune(mla_interop.MODELS["deepseek-v3"], "cpu", "float32", (2,), 60, said.append)
    assert path == measured.user_table(machine_name("cpu")) and [row["kernel"] for row in said] == ["REFERENCE.xp", "CPU_SDPA.torch"] * 2
    config = {"capability": None, "device_type": "cpu", "dtype": "float32"}
    assert select(problem(2, 8, 1, **config)).get_name() == "CPU_SDPA" and select(problem(2, 48, 3, **config)).get_name() == "REFERENCE"
    arrays = [np.ones((48, 2, width), np.float32) for width in (192, 192, 128)]
    assert mla_interop.mla_prefill(*arrays, cu_seqlens_q=[0, 16, 30, 48]).shape == (48, 2, 128)
    found = times_for(problem(2, 48, 3, **config))
    assert found is not None and found.us == {"REFERENCE.xp": 7.0, "CPU_SDPA.torch": 9.0}


def test_tune_stops_in_time_and_says_when_it_measured_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from mla_interop.bench import tune

    monkeypatch.setenv("MLA_INTEROP_CACHE", str(tmp_path))
    with pytest.raises(mla_interop.MLAUnsupportedError, match="nothing could be measured on cpu in float32: the -1 seconds were over before"):
        tune.tune(mla_interop.MODELS["deepseek-v3"], "cpu", "float32", (2,), -1.0)
    assert not list(tmp_path.glob("measured-*"))


def test_metadata_that_is_prepared_with_a_configuration_is_for_its_own_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    class Ready:
        def prepare_metadata(self, metadata: Any) -> Any:
            return metadata

    monkeypatch.setattr("mla_interop.selector.select", lambda config, backend: asked.append((config.num_tokens, config.num_seqs)) or Ready())
    mla_interop.prepare_metadata([0, 3, 60], config=problem(16, None, None))
    mla_interop.prepare_metadata([0, 3, 60], config=problem(16, 512, 4))
    assert asked == [(64, 2), (512, 4)]
