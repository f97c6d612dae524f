"""CUDNN without a GPU: what its closure hands on, which rows cuDNN sees, what a plan is keyed by, and the graph that the real headers make of it."""

import ctypes
import importlib
import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import oracle
import pytest
import tvm_ffi

from mla_interop import prefill
from mla_interop.backends.base import CallShape, Kernel
from mla_interop.backends.registry import order_for
from mla_interop.capability import DeviceCapability
from mla_interop.dimensions import MLADimensions
from mla_interop.errors import MLAUnavailableError
from mla_interop.exchange import TensorSpec
from mla_interop.installed import assume_installed
from mla_interop.kernels import cudnn_graph
from mla_interop.selector import explain
from mla_interop.selector_config import MLAPrefillSelectorConfig
from mla_interop.sequences import prepare_metadata
from mla_interop.strides import outer_strides

HEADS, DIM, DIM_V, NOPE = 3, 192, 128, 64
LENGTHS = ((0, 7), (5, 5), (6, 0), (9, 4), (3, 11), (0, 0), (2, 2))  # queries and keys of each sequence: 7 of them, planned as 8
WORDS = ("device bfloat16 causal stats stats_stride sequences max_q max_k heads dim dim_v row_q head_q row_k head_k row_v head_v").split()
NONE, HEAD_MAJOR, TOKEN_MAJOR = 0, 1, 2
TAIL, BLIND = 1, 2


def offsets(column: int, lengths: tuple[tuple[int, int], ...] = LENGTHS) -> np.ndarray:
    return np.concatenate([[0], np.cumsum([pair[column] for pair in lengths])]).astype(np.int32)


class FakeCudnn:
    """A closure over a stand-in for the native graph, which does what a plan of the key would do to host memory: it finds rows by element
    offsets, writes only the rows that it was given, and leaves the log-sum-exp where the key says.

    Tensors that native code lends to Python have shapes, but their memory is reached through the arrays of the call.
    """

    def __init__(self, causal: bool = True) -> None:
        self.causal = causal
        self.keys: list[dict[str, int]] = []
        self.finished: list[tuple[Any, ...]] = []
        self.given: dict[str, Any] = {}
        self._launch = cudnn_graph.closure().make(tvm_ffi.convert(self._run), tvm_ffi.convert(self._finish), causal)

    def launch(self, given: dict[str, Any]) -> None:
        self.given = given
        self._launch(*given.values())

    def _run(self, words: Any, *tensors: Any) -> None:
        given = self.given
        assert [x is not None and tuple(x.shape) for x in tensors[:-1]] == [
            given[name] is not None and given[name].shape for name in ("q", "k", "v", "cu_q", "cu_k", "scratch", "out", "lse")
        ]
        key = dict(zip(WORDS, (int(word) for word in words), strict=True))
        self.keys.append(key)
        logs_at = scratch_lse(given) if key["stats"] == TOKEN_MAJOR else given["lse"]
        for index in range(key["sequences"]):
            first_q, first_k, len_q, len_k = visible(given["cu_q"], given["cu_k"], index, bool(key["causal"]))
            q = rows_of(given["q"], first_q * key["row_q"], (len_q, HEADS, DIM), (key["row_q"], key["head_q"]))
            k = rows_of(given["k"], first_k * key["row_k"], (len_k, HEADS, DIM), (key["row_k"], key["head_k"]))
            v = rows_of(given["v"], first_k * key["row_v"], (len_k, HEADS, DIM_V), (key["row_v"], key["head_v"]))
            out, logs = oracle.attention(q, k, v, np.array([0, len_q]), np.array([0, len_k]), tensors[-1], bool(key["causal"]))
            given["out"][first_q : first_q + len_q] = out
            if logs_at is not None:
                (logs_at if key["stats"] == HEAD_MAJOR else logs_at.T)[:, first_q : first_q + len_q] = logs

    def _finish(self, cu_q: Any, cu_k: Any, native: Any, out: Any, lse: Any, bits: int, causal: bool) -> None:
        self.finished.append((None if native is None else tuple(native.shape), lse is not None, bits, causal))
        given, filled = self.given, np.ones(out.shape[0], bool)
        for q0, q1, k0, k1 in zip(given["cu_q"], given["cu_q"][1:], given["cu_k"], given["cu_k"][1:]):
            filled[q0:q1] = (k1 == k0) | (causal & (np.arange(q1 - q0) + (k1 - k0) - (q1 - q0) < 0))
        if bits:
            given["out"][filled] = 0
        if lse is not None:
            given["lse"][...] = given["lse"] if native is None else scratch_lse(given).T
            given["lse"][:, filled] = -np.inf


def rows_of(array: np.ndarray, start: int, shape: tuple[int, ...], steps: tuple[int, int]) -> np.ndarray:
    """Host memory from an element of an array on, as far as its buffer goes; strides in elements."""
    width = array.itemsize
    at = np.frombuffer((ctypes.c_char * width).from_address(array.ctypes.data + start * width), array.dtype)
    return np.lib.stride_tricks.as_strided(at, shape, (steps[0] * width, steps[1] * width, width))


def visible(cu_q: np.ndarray, cu_k: np.ndarray, index: int, causal: bool) -> tuple[int, int, int, int]:
    first_q, first_k, len_q, len_k = (int(x) for x in cudnn_graph.closure().visible_rows(cu_q, cu_k, index, causal))
    return first_q, first_k, len_q, len_k


def scratch_lse(given: dict[str, Any]) -> np.ndarray:
    """Where the layout has the log-sum-exp, ``[T, N]``: last in the scratch of a call without workspace, but for the slack of its alignment."""
    scratch, rows = given["scratch"], given["out"].shape[0]
    used = cudnn_graph.closure().scratch_bytes(len(given["cu_q"]) - 1, rows, HEADS, True, 0) - 256
    start = -scratch.ctypes.data % 256 + used - -(-rows * HEADS * 4 // 256) * 256
    return scratch[start // 4 :][: rows * HEADS].reshape(rows, HEADS)


def arguments(rows: int | None = None, lse: bool = True, **changes: Any) -> dict[str, Any]:
    """An ABI call: V a view of a wider buffer, everything that is written poisoned."""
    rng = np.random.default_rng(5)
    cu_q, cu_k = offsets(0), offsets(1)
    rows, keys = int(cu_q[-1]) if rows is None else rows, int(cu_k[-1])
    floats = -(-cudnn_graph.closure().scratch_bytes(len(LENGTHS), rows, HEADS, lse, 0) // 4)
    given = {
        "q": rng.standard_normal((rows, HEADS, DIM)).astype(np.float16),
        "k": rng.standard_normal((keys, HEADS, DIM)).astype(np.float16),
        "v": rng.standard_normal((keys, HEADS, NOPE + DIM_V)).astype(np.float16)[..., NOPE:],
        "cu_q": cu_q,
        "cu_k": cu_k,
        "plan": None,
        "scratch": np.full(floats, np.nan, np.float32),
        "out": np.full((rows, HEADS, DIM_V), np.nan, np.float16),
        "lse": np.full((HEADS, rows), np.nan, np.float32) if lse else None,
        "scale": 0.3,
        "max_q": 9,
        "max_k": 11,
        "finish": BLIND | (TAIL if rows > cu_q[-1] else 0),
    }
    assert changes.keys() <= given.keys()
    return given | changes


@pytest.mark.parametrize("rows", [25, 128, 133, 160], ids=["exact", "lse in place", "tail", "tail, lse in place"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lse", [True, False])
def test_a_call_gives_every_row_its_value(rows: int, causal: bool, lse: bool) -> None:
    fake, given = FakeCudnn(causal), arguments(rows, lse)
    fake.launch(given)
    out, logs = oracle.attention(*(given[name] for name in ("q", "k", "v", "cu_q", "cu_k")), 0.3, causal)
    np.testing.assert_allclose(given["out"], out, atol=2e-3)
    if lse:
        np.testing.assert_allclose(given["lse"], logs, atol=1e-5)


@pytest.mark.parametrize(("rows", "place"), [(25, TOKEN_MAJOR), (128, HEAD_MAJOR), (160, HEAD_MAJOR), (161, TOKEN_MAJOR), (256, HEAD_MAJOR)])
def test_lse_is_written_in_place_where_few_strides_are_possible(rows: int, place: int) -> None:
    fake, given = FakeCudnn(), arguments(rows)
    fake.launch(given | {"finish": 0})
    assert (fake.keys[0]["stats"], fake.keys[0]["stats_stride"]) == (place, rows if place == HEAD_MAJOR else 0)
    assert fake.finished == ([((rows, HEADS), True, 0, True)] if place == TOKEN_MAJOR else []), "a second launch only where there is something to do"


def test_without_lse_there_is_no_second_launch_unless_rows_are_filled() -> None:
    fake = FakeCudnn()
    fake.launch(arguments(lse=False, finish=0))
    assert fake.finished == [] and fake.keys[0]["stats"] == NONE
    fake.launch(arguments(lse=False, finish=BLIND))
    assert fake.finished == [(None, False, BLIND, True)]


def test_a_key_holds_everything_that_a_plan_has_in_it() -> None:
    fake, given = FakeCudnn(causal=False), arguments()
    fake.launch(given)
    wide, packed = HEADS * (NOPE + DIM_V), HEADS * DIM
    assert fake.keys[0] == dict(zip(WORDS, [0, 0, 0, 2, 0, 8, 128, 128, 3, 192, 128, packed, DIM, packed, DIM, wide, NOPE + DIM_V], strict=True))


@pytest.mark.parametrize("rows", [25, 128])
@pytest.mark.parametrize("lse", [True, False])
def test_a_prepared_call_has_the_key_and_the_scratch_of_its_launch(rows: int, lse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[list[int]] = []

    class Graph:
        @staticmethod
        def prepare(words: list[int]) -> int:
            prepared.append(words)
            return 1000

    monkeypatch.setattr(cudnn_graph, "_graph", lambda capability: Graph)
    fake, given = FakeCudnn(), arguments(rows, lse)
    fake.launch(given)
    strides = tuple((x.strides[0] // 2, x.strides[1] // 2) for x in (given["q"], given["k"], given["v"]))
    shape = CallShape(rows, len(given["k"]), len(LENGTHS), 9, 11, lse, 0, strides)  # pyright: ignore[reportArgumentType]
    floats = cudnn_graph.prepare(shape, "float16", HEADS, (DIM, DIM_V), True, (9, 0))
    assert prepared == [list(fake.keys[0].values())]
    assert floats == len(given["scratch"]) + 1024 // 4, "a workspace takes multiples of 256 bytes"


def test_a_call_is_prepared_with_what_its_launch_gets() -> None:
    """The rows of k that hold keys, true maxima where they may be used, and packed strides where the frontend makes a copy."""
    shapes: list[CallShape] = []
    kernel = Kernel(name="CUDNN.graph.sm_90", kind="compiled", make=lambda: print, native_empty_rows=False, prepare=lambda shape: shapes.append(shape) or 77)
    metadata = prepare_metadata([0, 3, 10], [0, 6, 19], num_tokens_q=12, num_tokens_k=25)
    strides = outer_strides(TensorSpec((12, 2, 8), (64, 16, 2), "bfloat16", "cuda"), True)
    strided = outer_strides(TensorSpec((25, 2, 8), (64, 16, 1), "bfloat16", "cuda"), False)
    backend = SimpleNamespace(kernel=kernel)
    call = prefill.Resolved(backend, (12, 2, 8), (2, 12), 1.0, (True, False, False), (strides, strided, strided), 1, False, prefill.Options(return_lse=True))  # pyright: ignore[reportArgumentType]
    bound = prefill.bind(call, metadata, 25, exact=True)
    assert shapes == [CallShape(12, 19, 2, 7, 13, True, 1, ((16, 8), (64, 16), (64, 16)))]
    assert (bound.scratch_floats, bound.finish) == (77, TAIL)
    prefill.bind(call, metadata, 25, exact=False)
    assert shapes[1][3:5] == (12, 25), "a compiled program must not depend on the lengths"
    assert prefill.bind(replace(call, empty=True), metadata, 25, exact=True).scratch_floats == 0 and len(shapes) == 2


def test_dimensions_of_one_element_make_no_other_plan() -> None:
    fake, given = FakeCudnn(), arguments()
    odd = np.lib.stride_tricks.as_strided(given["k"], (1, HEADS, DIM), (7000, DIM * 2, 2))
    one = {"k": odd, "v": given["v"][:1], "cu_k": np.array([0, 1, 1, 1, 1, 1, 1, 1], np.int32)}
    fake.launch(given | one)
    assert (fake.keys[0]["row_k"], fake.keys[0]["row_v"]) == (HEADS * DIM, HEADS * DIM_V)


@pytest.mark.parametrize("change", [{"scale": 0.0}, {"scale": -1.0}, {"scale": float("nan")}, {"scratch": None}], ids=str)
def test_what_cannot_be_right_is_refused_before_the_call(change: dict[str, Any]) -> None:
    fake = FakeCudnn()
    with pytest.raises(ValueError, match=f"{next(iter(change))}: got"):
        fake.launch(arguments(**change))
    assert fake.keys == [] and fake.finished == []


def test_cudnn_sees_only_rows_that_have_keys() -> None:
    """Every sequence is empty on both sides or on neither, and no query row of it is without a key."""
    cu_q, cu_k = offsets(0), offsets(1)

    def rows(causal: bool) -> list[tuple[int, ...]]:
        return [visible(cu_q, cu_k, index, causal) for index in range(8)]

    full = [(0, 0, 0, 0), (0, 7, 5, 5), (5, 12, 0, 0), (11, 12, 9, 4), (20, 16, 3, 11), (23, 27, 0, 0), (23, 27, 2, 2), (25, 29, 0, 0)]
    assert rows(False) == full
    assert rows(True) == [*full[:2], (11, 12, 0, 0), (16, 12, 4, 4), *full[4:]]


def test_rounding_adds_at_most_a_quarter_and_makes_few_plans() -> None:
    native = cudnn_graph.closure()
    rounded = {length: native.round_length(length) for length in (*range(1, 5000), 65536, 65537, 10**6)}
    assert all(length <= made <= max(128, length * 1.25) for length, made in rounded.items())
    assert all(native.round_length(made) == made and made % 32 == 0 for made in rounded.values())
    assert [rounded[x] for x in (1, 128, 129, 256, 257, 1000, 1024, 1025)] == [128, 128, 160, 256, 320, 1024, 1024, 1280]
    assert len({rounded[length] for length in range(1, 4097)}) == 21
    assert [native.round_sequences(x) for x in (1, 2, 3, 8, 9)] == [1, 2, 4, 8, 16]


def test_parts_of_the_scratch_do_not_overlap_and_grow_with_what_they_hold() -> None:
    size = cudnn_graph.closure().scratch_bytes
    assert size(1, 100, 3, False, 0) == 7 * 256 + 256
    assert size(100, 100, 3, False, 0) == 5 * 1280 + 2 * 512 + 256
    assert size(1, 100, 3, True, 0) - size(1, 100, 3, False, 0) == 1280
    assert size(1, 128, 3, True, 0) == size(1, 128, 3, False, 0), "lse is written in place"
    assert size(1, 100, 3, False, 257) - size(1, 100, 3, False, 0) == 512


INSTALLED = {"nvidia-cudnn-frontend": "1.32.0", "nvidia-cudnn-cu13": "9.19.0.56"}
PROBLEM = (9, 0), "bfloat16", 192, 128


def with_packages(monkeypatch: pytest.MonkeyPatch, **versions: str | None) -> None:
    found = INSTALLED | {name.replace("_", "-"): version for name, version in versions.items()}
    monkeypatch.setattr(cudnn_graph, "package_version", lambda name: found.get(name) or "none")
    monkeypatch.setattr(cudnn_graph, "_is_built", lambda capability: True)


@pytest.mark.parametrize(
    ("capability", "library", "words"),
    [
        ((9, 0), "9.19.0.56", None),
        ((9, 0), "9.10.2.21", None),
        ((9, 0), "9.10.0.56", "9.10.0: wrong results"),
        ((9, 0), "9.10.1.4", "9.10.1: wrong results"),
        ((9, 0), "9.9.0.52", "allowed on 9.x: 9.10.2"),
        ((8, 0), "9.18.0.77", "allowed on 8.x: 9.18.1"),
        ((8, 6), "9.18.1.3", None),
        ((10, 3), "9.28.1.4", None),
        ((9, 0), "10.0.0.1", "allowed: 9.x"),
        ((12, 0), "9.28.1.4", "compute capability: got 12.0"),
    ],
)
def test_versions_of_cudnn(capability: tuple[int, int], library: str, words: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    with_packages(monkeypatch, nvidia_cudnn_cu13=library)
    reasons = cudnn_graph.unsupported_reasons(capability, "bfloat16", 192, 128)
    assert reasons == [] if words is None else len(reasons) == 1 and words in reasons[0]


def test_packages_that_are_missing_or_unproven(monkeypatch: pytest.MonkeyPatch) -> None:
    with_packages(monkeypatch, nvidia_cudnn_frontend="1.18.0")
    assert "got 1.18.0; allowed: 1.32.0" in cudnn_graph.unsupported_reasons(*PROBLEM)[0]
    with_packages(monkeypatch, nvidia_cudnn_frontend=None, nvidia_cudnn_cu13=None)
    assert [reason.split(":")[0] for reason in cudnn_graph.unsupported_reasons(*PROBLEM)] == ["nvidia-cudnn-frontend", "nvidia-cudnn-cu13"]
    with_packages(monkeypatch, nvidia_cudnn_cu13=None, nvidia_cudnn_cu12="9.20.0.48")
    assert cudnn_graph.unsupported_reasons(*PROBLEM) == [] and cudnn_graph.versions()[0] == "nvidia-cudnn-cu12 9.20.0.48"


def test_what_a_build_needs_is_asked_for_only_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with_packages(monkeypatch)
    monkeypatch.setattr(cudnn_graph, "_is_built", lambda capability: False)
    monkeypatch.setattr(cudnn_graph, "find_nvcc", lambda: None)
    monkeypatch.setattr(cudnn_graph, "_include_folders", lambda: [])
    assert [reason.split(":")[0] for reason in cudnn_graph.unsupported_reasons(*PROBLEM)] == ["nvcc", "cudnn_frontend.h", "cudnn.h", "nvrtc.h"]


@pytest.mark.parametrize(
    ("capability", "dims", "good"),
    [((9, 0), (192, 128), True), ((9, 0), (256, 256), True), ((9, 0), (264, 128), False), ((9, 0), (100, 100), False), ((10, 0), (192, 128), True)]
    + [((10, 0), (256, 256), False), ((10, 0), (96, 64), True)],
)
def test_head_dimensions(capability: tuple[int, int], dims: tuple[int, int], good: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with_packages(monkeypatch)
    reasons = cudnn_graph.unsupported_reasons(capability, "bfloat16", *dims)
    assert (reasons == []) is good and all("head dims" in reason for reason in reasons)


def test_the_library_that_another_package_loaded_is_judged_too(monkeypatch: pytest.MonkeyPatch) -> None:
    class Graph:
        @staticmethod
        def open(path: str) -> int:
            return 91001

    monkeypatch.setattr(cudnn_graph, "compile_cuda", lambda *arguments, **options: "library")
    monkeypatch.setattr(cudnn_graph, "open_library", lambda path: Graph)
    with pytest.raises(MLAUnavailableError, match="cuDNN 9.10.1: wrong results.*This process has loaded it"):
        cudnn_graph._graph.__wrapped__((9, 0))


def config(**changes: Any) -> MLAPrefillSelectorConfig:
    dimensions = MLADimensions.from_head_dims(192, 128)
    return MLAPrefillSelectorConfig(**{"dimensions": dimensions, "num_heads": 16, "capability": DeviceCapability(9, 0), "num_sms": 132} | changes)


def test_its_place_in_the_orders() -> None:
    assert order_for("cuda", DeviceCapability(9, 0)) == ("FLASH_ATTN", "FLASHINFER", "CUDNN", "REFERENCE")
    blackwell = order_for("cuda", DeviceCapability(10, 0))
    assert blackwell.index("FLASHINFER") < blackwell.index("CUDNN") < blackwell.index("FLASH_ATTN")
    assert "CUDNN" not in order_for("cuda", DeviceCapability(8, 0))


def test_device_lengths_are_no_reason_and_a_scale_of_zero_is() -> None:
    backend = importlib.import_module("mla_interop.backends.cudnn").CudnnBackend
    with assume_installed():
        assert backend.validate_configuration(config(traced=True)) == []
        assert backend.validate_configuration(config(scale=0.0)) == ["graph: scale 0 (allowed: > 0)"]
        row = next(row for row in explain(config()).rows if row.backend == "CUDNN")
    assert row.valid


needs_headers = pytest.mark.skipif(
    bool(cudnn_graph.unsupported_reasons(*PROBLEM)), reason="; ".join(cudnn_graph.unsupported_reasons(*PROBLEM)) or "everything is here"
)


@needs_headers
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("causal", [1, 0])
@pytest.mark.parametrize("stats", [NONE, HEAD_MAJOR, TOKEN_MAJOR])
def test_the_graph_that_cudnn_is_given(causal: int, stats: int) -> None:
    """The frontend of the real package checks the graph, for Hopper, and writes down what it understood."""
    rows = 2048 if stats == HEAD_MAJOR else 0
    words = [0, 1, causal, stats, rows, 4, 512, 1024, 3, 192, 128, 576, 192, 576, 192, 768, 256]
    graph = json.loads(cudnn_graph._graph((9, 0)).describe(words, 90))
    tensors = {tensor["name"]: tensor for tensor in graph["tensors"]}
    shapes = {name: (tensor["dim"], tensor["stride"]) for name, tensor in tensors.items()}
    assert shapes["q"] == ([4, 3, 512, 192], [512 * 576, 192, 576, 1])
    assert shapes["k"] == ([4, 3, 1024, 192], [1024 * 576, 192, 576, 1])
    assert shapes["v"] == ([4, 3, 1024, 128], [1024 * 768, 256, 768, 1]), "a view of a wider buffer is read where it lies"
    assert shapes["out"] == ([4, 3, 512, 128], [512 * 384, 128, 384, 1])
    assert ("lse" in shapes) is (stats != NONE)
    if stats != NONE:
        assert shapes["lse"][0] == [4, 3, 512, 1]
        assert shapes["lse"][1][1:3] == ([2048, 1] if stats == HEAD_MAJOR else [1, 3])
        assert tensors["lse"]["data_type"] == "FLOAT"
    assert tensors["scale"]["is_pass_by_value"] is True and tensors["scale"]["pass_by_value"] is None
    for name in ("q", "k", "v", "out", *(["lse"] if stats != NONE else [])):
        starts = tensors[f"starts of {name}"]
        assert starts["dim"] == [5, 1, 1, 1] and starts["data_type"] == "INT64"
        assert tensors[name]["ragged_offset_uid"] == starts["uid"]
        assert tensors[name]["uid"] == {"q": 1, "k": 2, "v": 3, "out": 4, "lse": 5}[name]
    node = graph["nodes"][0]
    assert node["padding_mask"] is True and node["generate_stats"] is (stats != NONE)
    assert node["right_bound"] == (0 if causal else None) and node["left_bound"] is None
    assert node["diagonal_alignment"] == ("BOTTOM_RIGHT" if causal else "TOP_LEFT")


@needs_headers
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_what_the_frontend_refuses_is_said_with_the_numbers() -> None:
    words = [0, 1, 1, NONE, 0, 4, 512, 1024, 3, 100, 128, 300, 100, 300, 100, 768, 256]
    with pytest.raises(RuntimeError, match="4 sequences of up to 512 queries and 1024 keys, 3 heads, head dims 100/128"):
        cudnn_graph._graph((9, 0)).describe(words, 90)
