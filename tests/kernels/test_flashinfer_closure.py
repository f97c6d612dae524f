"""What the closure hands to FlashInfer's raw call, and what it refuses; with fakes for all that needs a GPU."""

from typing import Any

import numpy as np
import pytest
import tvm_ffi

from mla_interop.kernels import flashinfer_module
from mla_interop.kernels.build import compile_cpp

ROWS, KEYS, HEADS, NUM_SMS = 300, 500, 3, 132
CU_Q, CU_K = np.array([0, 100, 100, 290], np.int32), np.array([0, 300, 310, 500], np.int32)
COMMON = 14  # arguments up to the generation's own


class Fakes:
    """A closure around functions that only note their arguments: shapes of tensors, everything else as it came."""

    def __init__(self, generation: int, causal: bool = True) -> None:
        self.generation = generation
        self.run: list[Any] = []
        self.finished: list[Any] = []
        closure = tvm_ffi.load_module(compile_cpp("flashinfer_closure", ["flashinfer_closure.cc"]))
        fakes = [tvm_ffi.convert(fake) for fake in (self._run, self._finish, lambda device_id: NUM_SMS)]
        self.launch = closure.make(*fakes, generation, causal, flashinfer_module.MIN_SCALE)

    def _run(self, *arguments: Any) -> None:
        self.run = [self._note(argument) for argument in arguments]

    def _finish(self, *arguments: Any) -> None:
        self.finished = [self._note(argument) for argument in arguments]

    @staticmethod
    def _note(argument: Any) -> Any:
        return tuple(argument.shape) if isinstance(argument, tvm_ffi.Tensor) else argument

    def arguments(self, **changes: Any) -> list[Any]:
        plan = flashinfer_module.plan(self.generation, CU_Q, CU_K, ROWS, HEADS, True, NUM_SMS)
        named = {
            "q": np.zeros((ROWS, HEADS, 192), np.float16),
            "k": np.zeros((KEYS, HEADS, 192), np.float16),
            "v": np.zeros((KEYS, HEADS, 256), np.float16)[:, :, 128:],
            "cu_q": CU_Q,
            "cu_k": CU_K,
            "plan": plan,
            "scratch": np.zeros(flashinfer_module.scratch_floats(ROWS, HEADS, True), np.float32),
            "out": np.zeros((ROWS, HEADS, 128), np.float16),
            "lse": np.zeros((HEADS, ROWS), np.float32),
            "scale": 0.5,
            "max_q": 190,
            "max_k": 300,
            "finish": 3,
        }
        assert changes.keys() <= named.keys()
        return list((named | changes).values())


@pytest.mark.parametrize("causal", [True, False])
def test_generation_3_gets_its_arguments_in_order(causal: bool) -> None:
    fakes = Fakes(3, causal)
    arguments = fakes.arguments()
    fakes.launch(*arguments)
    plan_bytes = arguments[5].size
    offsets = [int(offset) for offset in fakes.run[2]]
    assert len(offsets) == 9 and offsets[0] == 0 and max(offsets) < plan_bytes and offsets[8] == 0
    assert fakes.run[:2] == [(plan_bytes,)] * 2
    tensors = [(ROWS, HEADS, 192), (KEYS, HEADS, 192), (KEYS, HEADS, 128), (4,), (4,), (ROWS, HEADS, 128), (ROWS, HEADS)]
    assert fakes.run[3:COMMON] == [*tensors, int(causal), 0, -1, False]
    assert fakes.run[COMMON:] == [None, None, None, None, 0.0, 0.5, 1.0, 0]
    assert fakes.finished == [(4,), (4,), (ROWS, HEADS), (ROWS, HEADS, 128), (HEADS, ROWS), 3, causal]


def test_generation_2_gets_its_arguments_in_order() -> None:
    fakes = Fakes(2)
    fakes.launch(*fakes.arguments())
    entries, rows, total_rows, tile_rows, request, *_, graph, split = (int(number) for number in fakes.run[2])
    assert (entries, rows, tile_rows, request, graph, split) == (-(-ROWS // 128) + 2, ROWS, 128, 0, 1, 0)
    assert total_rows % 16 == 0
    assert fakes.run[COMMON:] == [None] * 8 + [0.0, 0.5, 1.0, 1.0, 0]


def test_offsets_point_at_what_the_planner_wrote() -> None:
    fakes = Fakes(3)
    arguments = fakes.arguments()
    fakes.launch(*arguments)
    plan, offsets = arguments[5], [int(offset) for offset in fakes.run[2]]
    ends = plan[offsets[6] : offsets[6] + 4 * (NUM_SMS + 1)].view(np.int32)
    works = int(ends[-1])
    assert works == (1 + 2) * HEADS
    batches = plan[offsets[7] : offsets[7] + 4 * works].view(np.int32)
    q_starts = plan[offsets[1] : offsets[1] + 4 * works].view(np.int32)
    assert sorted(zip(batches, q_starts)) == [(0, 0)] * HEADS + [(2, 100)] * 2 * HEADS


def test_without_lse_there_is_none_in_the_call_and_no_finish_unless_rows_are_filled() -> None:
    fakes = Fakes(3)
    fakes.launch(*fakes.arguments(lse=None, scratch=None, finish=0))
    assert fakes.run[9] is None and fakes.finished == []
    fakes.launch(*fakes.arguments(lse=None, scratch=None, finish=2))
    assert fakes.finished == [(4,), (4,), None, (ROWS, HEADS, 128), None, 2, True]


@pytest.mark.parametrize("generation", [2, 3])
def test_what_would_read_or_write_at_wrong_places_is_refused_before_the_call(generation: int) -> None:
    fakes = Fakes(generation)
    refused: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (RuntimeError, "plan: got", {"q": np.zeros((ROWS + 200, HEADS, 192), np.float16)}),
        (RuntimeError, "plan: got", {"plan": flashinfer_module.plan(generation, CU_Q, CU_K, 2 * ROWS, HEADS, True, NUM_SMS)}),
        (RuntimeError, "scratch", {"scratch": None}),
        (RuntimeError, "scratch", {"scratch": np.zeros(ROWS * HEADS - 1, np.float32)}),
        (ValueError, "scale", {"scale": 0.0}),
        (ValueError, "scale", {"scale": -1.0}),
        (ValueError, "scale", {"scale": float("nan")}),
    ]
    for kind, text, changes in refused:
        with pytest.raises(kind, match=text):
            fakes.launch(*fakes.arguments(**changes))
    assert fakes.run == [] and fakes.finished == []


def test_generation_2_refuses_what_32_bit_offsets_cannot_reach() -> None:
    fakes = Fakes(2)
    row = np.zeros((1, HEADS, 192), np.float16)
    wide = np.lib.stride_tricks.as_strided(row, (KEYS, HEADS, 192), (2 * (2**32 // KEYS + 1), 384, 2))
    with pytest.raises(RuntimeError, match="elements; allowed: under 2"):
        fakes.launch(*fakes.arguments(k=wide))
    assert fakes.run == []
