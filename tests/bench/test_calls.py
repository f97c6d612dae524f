"""What the benchmark measures beside kernels, on a machine that lacks something: the rest is measured all the same."""

import subprocess
import sys
from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

import torch_side  # noqa: E402
from mla_interop.bench import calls, ceiling, tables, timing, torch_contenders  # noqa: E402
from mla_interop.bench.problems import equal  # noqa: E402


def nothing(n: int) -> None:
    pass


def broken(n: int) -> None:
    raise RuntimeError("no compiler")


def test_a_framework_that_is_not_there_and_a_call_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jax", None)
    assert calls.measure("jax", "cpu", "float32") == []
    monkeypatch.setattr(calls, "_torch", lambda *_: {"one": (nothing, 1), "two": (broken, 1)})
    for device, problem in (("cpu", "2x8x1"), ("cuda", "16x512x1")):  # without the floor there is nothing to choose a core by
        one, two = calls.measure("torch", device, "float32")
        assert one["name"] == f"one, {problem}" and one["us"] >= 0 and two == {"name": f"two, {problem}", "failed": "RuntimeError: no compiler"}


def test_the_host_is_measured_on_a_quiet_core_only_beside_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    floor, asked = calls.FLOORS["torch"], []

    def on_a_quiet_core(measure: Callable[[], dict], by: str, sittings: int) -> dict:
        asked.append((by, sittings))
        return measure()

    monkeypatch.setattr(calls, "_torch", lambda *_: {"call": (nothing, 1), floor: (nothing, 1)})
    monkeypatch.setattr(calls, "on_a_quiet_core", on_a_quiet_core)
    for device, expected in (("cpu", []), ("cuda", [(floor, calls.SITTINGS)])):
        assert len(calls.measure("torch", device, "float32")) == 2 and asked == expected


def test_each_framework_is_measured_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    made = {"torch": (0, 'words\nrows: [{"name": "one"}]\nmore words\n', ""), "jax": (1, "", "out of memory")}
    monkeypatch.setattr(calls.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(calls.subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, *made[command[-3]]))
    one, two = calls.call_costs("cuda", "bfloat16")
    assert one == {"name": "one"} and two == {"name": "calls from jax", "failed": "its process exited with 1: out of memory"}

    def forever(command: list[str], timeout: float, **_: object) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(calls.subprocess, "run", forever)
    assert all("timed out after 900 seconds" in row["failed"] for row in calls.call_costs("cuda", "bfloat16"))


def test_the_process_counts_in_which_the_floor_was_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "FLOORS", {"jax": "floor"})
    monkeypatch.setattr(calls, "PROCESSES", {"jax": 4})
    monkeypatch.setattr(calls.importlib.util, "find_spec", lambda name: name)
    said = [({"us": 9.0}, 3.0), ({"us": 7.0}, 30.0), ({"failed": "no"}, 1.0), ({"us": 8.0}, 2.0)]
    processes = iter([[{"name": "call, 1x2x3", "us": 0.0, "us_over": over}, {"name": "floor, 1x2x3", **floor}] for floor, over in said])
    monkeypatch.setattr(calls, "_from_a_process", lambda *_: next(processes))
    call, floor = calls.call_costs("cuda", "bfloat16")
    assert call["us_over"] == 30.0 and call["us_over_elsewhere"] == [2.0, 3.0, 1.0] and floor == {"name": "floor, 1x2x3", "us": 7.0}
    assert tables._host_cell(call) == "0.0 us (+30.0 by turns over x + 1; in slower processes +2.0, +3.0, +1.0)"
    processes = iter([[{"name": "one"}]])

    def killed_at_the_second(*_: object) -> list:
        for rows in processes:
            return rows
        raise RuntimeError("killed")

    monkeypatch.setattr(calls, "_from_a_process", killed_at_the_second)
    assert calls.call_costs("cuda", "bfloat16") == [{"name": "calls from jax", "failed": "killed"}, {"name": "one"}]
    processes = iter([[{"name": "call, 1x2x3", "us": 0.0, "us_over": 1.0}]])
    [call] = calls.call_costs("cpu", "float32")
    assert "us_over_elsewhere" not in call, "beside no GPU one process is enough"


def test_a_jitted_call_is_compared_with_its_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process as the benchmark starts it."""
    pytest.importorskip("jax")
    monkeypatch.setattr(calls, "FLOORS", {"jax": calls.FLOORS["jax"]})
    rows = {row["name"]: row for row in calls.call_costs("cpu", "float32")}
    compared = [f"{name}, 2x8x1" for name in calls.COMPARED if "JAX" in name]
    assert len(compared) == 2 and [name for name, row in rows.items() if "us_over" in row] == compared and len(rows) == 3


def test_a_call_is_compared_with_its_floor_in_the_same_round(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    seconds = {"call": iter([9, 9, 5.0, 13.0, 9.0]), "floor": iter([1, 1, 2.0, 9.0, 7.0])}  # two of each are to find out how many make a loop

    def taking(name: str) -> tuple[Callable[[int], None], int]:
        def run(n: int) -> None:
            clock[0] += next(seconds[name])

        return run, 1

    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
    found = timing.side_by_side({name: taking(name) for name in seconds}, 3, over={"call": "floor", "gone": "floor"})
    assert (found["call"]["us"], found["floor"]["us"], found["call"]["us_over"]) == (9e6, 7e6, 3e6) and "us_over" not in found["floor"]


def test_the_sitting_counts_in_which_the_floor_was_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed, kept = {3, 5}, [{3, 5}]
    monkeypatch.setattr(timing.os, "sched_getaffinity", lambda _: allowed, raising=False)
    monkeypatch.setattr(timing.os, "sched_setaffinity", lambda _, cores: kept.append(cores), raising=False)
    sittings = [{"floor": {"us": floor}, "call": {"us": call}} for floor, call in ((9.0, 10.0), (7.0, 30.0), (8.0, 9.0))]
    left = iter(sittings)
    assert timing.on_a_quiet_core(lambda: next(left), "floor", 3) == sittings[1] and kept[1:] == [{3}, {5}, {3}, allowed]
    with pytest.raises(StopIteration):
        timing.on_a_quiet_core(lambda: next(left), "floor", 1)
    assert kept[-1] == allowed, "free again"

    def forbidden(*_: object) -> None:
        raise PermissionError

    left = iter(sittings)
    monkeypatch.setattr(timing.os, "sched_setaffinity", forbidden, raising=False)
    assert timing.on_a_quiet_core(lambda: next(left), "floor", 3) == sittings[1]
    left = iter(sittings)
    monkeypatch.delattr(timing.os, "sched_getaffinity")
    assert timing.on_a_quiet_core(lambda: next(left), "floor", 3) == sittings[1]


def test_a_matrix_product_has_its_operations_counted() -> None:
    found = ceiling.matrix_product("cpu", "float32", 64)
    assert found["size"] == 64 and found["tflops"] == pytest.approx(2 * 64**3 / (found["us"] * 1e-6) * 1e-12)


def test_what_is_close_is_measured_in_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    from mla_interop.bench import run

    monkeypatch.setattr(run, "PAIR_ROUNDS", 1)
    names = [("mla_interop", "A.a"), ("kernel object", "A.a"), ("kernel object", "B.b"), ("mla_interop + lse", "A.a"), ("peer", "")]
    rows = [{"problem": "1x2x3", "dtype": "float32", "framework": "torch", "name": name, "kernel": kernel} for name, kernel in names]
    runs = {number: (nothing, 1) for number in range(len(rows))}
    (made,) = run._pairs(rows, runs)
    assert made["names"] == ["mla_interop", "kernel object"] and made["kernel"] == "A.a" and made["ratio"] == made["us"][0] / made["us"][1]
    jax = [row | {"framework": "jax"} for row in rows] + [{**rows[0], "framework": "jax", "name": "fa4-jax", "kernel": ""}]
    assert list(run._pairs(jax, {number: (nothing, 1) for number in range(len(jax))})) == [], "only of the kernel that the peer has too"
    jax[0]["kernel"] = "FLASH_ATTN.fa4"
    (made,) = run._pairs(jax, {number: (nothing, 1) for number in range(len(jax))})
    assert made["names"] == ["mla_interop", "fa4-jax"]


def test_the_compiled_contender_is_a_chain_and_its_first_result_is_checked() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    counter, problem = CompileCounterWithBackend("aot_eager"), equal(3, 5, 2)
    q, k, v = (torch.randn(problem.tokens, problem.heads, d) for d in (192, 192, 128))
    compile_it = torch.compile
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda function, **options: compile_it(function, backend=counter, **options))
        made = torch_contenders._compiled(problem, q, k, v, "float32", "CPU_SDPA.torch")
    out, lse = made.result()
    metadata = torch_side.prepare_metadata(problem.cu_seqlens)
    assert lse is None and torch.equal(out, torch_side.mla_prefill(q, k, v, metadata=metadata))
    nodes = [node for node in counter.graphs[0].graph.nodes if "mla_interop" in str(node.target)]
    assert made.calls_in_a_run == len(nodes) == 10 and all(before in after.args[2].all_input_nodes for before, after in zip(nodes, nodes[1:]))
