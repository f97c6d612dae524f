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
        scales = flashinfer_module.MIN_SCALE[generation], flashinfer_module.MAX_SCALE
        self.launch = closure.fa3(*fakes, causal, *scales) if generation == 3 else closure.fa2(*fakes[:2], causal, *scales)

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
            "scratch": np.zeros(flashinfer_module.scratch_floats(2, ROWS, HEADS, True), np.float32),
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
    arguments = fakes.arguments(scratch=None)
    fakes.launch(*arguments)
    tensors = [(ROWS, HEADS, 192), (KEYS, HEADS, 192), (KEYS, HEADS, 128), (arguments[5].size,)]
    assert fakes.run == [*tensors, 3, causal, 0.5, (ROWS, HEADS, 128), (HEADS, ROWS), NUM_SMS]
    assert fakes.finished == [(4,), (4,), None, (ROWS, HEADS, 128), (HEADS, ROWS), 3, causal]


@pytest.mark.parametrize("causal", [True, False])
def test_generation_2_gets_its_arguments_in_order(causal: bool) -> None:
    fakes = Fakes(2, causal)
    arguments = fakes.arguments()
    fakes.launch(*arguments)
    assert fakes.run[:2] == [(arguments[5].size,)] * 2
    tensors = [(ROWS, HEADS, 192), (KEYS, HEADS, 192), (KEYS, HEADS, 128), (4,), (4,), (ROWS, HEADS, 128), (ROWS, HEADS)]
    assert fakes.run[3:COMMON] == [*tensors, int(causal), 0, -1, False]
    assert fakes.finished == [(4,), (4,), (ROWS, HEADS), (ROWS, HEADS, 128), (HEADS, ROWS), 3, causal]
    entries, rows, total_rows, tile_rows, request, *_, graph, split = (int(number) for number in fakes.run[2])
    assert (entries, rows, tile_rows, request, graph, split) == (-(-ROWS // 128) + 2, ROWS, 128, 0, 1, 0)
    assert total_rows % 16 == 0
    assert fakes.run[COMMON:] == [None] * 8 + [0.0, 0.5, 1.0, 1.0, 0]


@pytest.mark.parametrize(("generation", "place"), [(2, 9), (3, 8)])
def test_without_lse_there_is_none_in_the_call_and_no_finish_unless_rows_are_filled(generation: int, place: int) -> None:
    fakes = Fakes(generation)
    fakes.launch(*fakes.arguments(lse=None, scratch=None, finish=0))
    assert fakes.run[place] is None and fakes.finished == []
    fakes.launch(*fakes.arguments(lse=None, scratch=None, finish=2))
    assert fakes.finished == [(4,), (4,), None, (ROWS, HEADS, 128), None, 2, True]


def test_generation_3_needs_no_finish_for_its_lse() -> None:
    fakes = Fakes(3)
    fakes.launch(*fakes.arguments(scratch=None, finish=0))
    assert fakes.run[8] == (HEADS, ROWS) and fakes.finished == []


@pytest.mark.parametrize("generation", [2, 3])
def test_what_would_read_or_write_at_wrong_places_is_refused_before_the_call(generation: int) -> None:
    fakes = Fakes(generation)
    refused: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (RuntimeError, "plan: got", {"q": np.zeros((ROWS + 200, HEADS, 192), np.float16)}),
        (RuntimeError, "plan: got", {"plan": flashinfer_module.plan(generation, CU_Q, CU_K, 2 * ROWS, HEADS, True, NUM_SMS)}),
        (ValueError, "scale", {"scale": 0.0}),
        (ValueError, "scale", {"scale": -1.0}),
        (ValueError, "scale", {"scale": float("nan")}),
        (ValueError, "scale", {"scale": flashinfer_module.MIN_SCALE[generation] * 0.99}),
        (ValueError, "scale", {"scale": flashinfer_module.MAX_SCALE * 1.01}),
    ]
    if generation == 2:
        refused += [(RuntimeError, "scratch", {"scratch": scratch}) for scratch in (None, np.zeros(ROWS * HEADS - 1, np.float32))]
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
