"""The CPU_SDPA kernel against a float64 oracle written in NumPy, called as frontends call it."""

import hashlib
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from mla_interop.kernels import build, cpu_sdpa

torch = pytest.importorskip("torch")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Relative Frobenius error of out, absolute error of lse.
TOLERANCE = {"float32": (1e-5, 1e-4), "bfloat16": (3e-3, 1e-3), "float16": (5e-4, 1e-3)}
YARN_SCALE = 0.1352337788608801  # DeepSeek-V3: 192 ** -0.5 * (0.1 * ln(40) + 1) ** 2


@pytest.fixture
def one_thread():
    """torch on one thread: idle threads of two pools (torch's, NumPy's) that spin for the same cores take most of a small test's time.

    For tests of values over many small shapes; those of large logits, blocks, layouts and memory keep torch's own number.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def oracle(q, k, v, cu_q, cu_k, is_causal, scale):
    """Attention in float64 from float64 arrays; (out [T, N, V], lse [N, T]), rows without a key 0 and -inf."""
    out, lse = np.zeros((*q.shape[:2], v.shape[2])), np.full((q.shape[1], q.shape[0]), -np.inf)
    for q0, q1, k0, k1 in zip(cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:]):
        if q0 == q1 or k0 == k1:
            continue
        logits = np.einsum("qhd,khd->hqk", q[q0:q1], k[k0:k1], optimize=True) * scale
        if is_causal:
            hidden = np.arange(k1 - k0)[None, :] > np.arange(q1 - q0)[:, None] + (k1 - k0) - (q1 - q0)
            logits = np.where(hidden, -np.inf, logits)
        top = logits.max(-1, keepdims=True)
        weights = np.exp(logits - np.where(np.isfinite(top), top, 0.0))
        total = weights.sum(-1, keepdims=True)
        with np.errstate(divide="ignore"):
            lse[:, q0:q1] = np.where(total > 0, np.log(total) + top, -np.inf)[..., 0]
        out[q0:q1] = np.einsum("hqk,khd->qhd", weights / np.where(total > 0, total, 1.0), v[k0:k1], optimize=True)
    return out, lse


def offsets(lengths):
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


class Case:
    """Inputs for one call, with NaN in the tails of k and v and in the outputs; ``tail`` is rows past the last sequence."""

    def __init__(self, len_q, len_k, *, dtype="bfloat16", heads=3, dims=(192, 128), tail=0, factor=1.0, seed=0, v_from=128):
        make = torch.Generator().manual_seed(seed)
        self.dtype, (d, v) = dtype, dims
        self.cu_q, self.cu_k = offsets(len_q), offsets(len_k)
        rows_q, rows_k = max(self.cu_q[-1] + tail, 1), max(self.cu_k[-1] + tail, 1)

        def normal(*shape):
            return torch.randn(*shape, generator=make)

        self.q = (normal(rows_q, heads, d) * factor).to(DTYPES[dtype])
        self.k = (normal(rows_k, heads, d) * factor).to(DTYPES[dtype])
        # As in a model: V is the right part of the up-projection's rows.
        self.v = normal(rows_k, heads, v_from + v).to(DTYPES[dtype])[..., v_from:]
        self.k[self.cu_k[-1] :] = float("nan")
        self.v[self.cu_k[-1] :] = float("nan")

    def run(self, is_causal, scale, with_lse=True):
        rows, heads, _ = self.q.shape
        out = torch.full((rows, heads, self.v.shape[2]), float("nan"), dtype=DTYPES[self.dtype])
        lse = torch.full((heads, rows), float("nan")) if with_lse else None
        cu_q, cu_k = torch.from_numpy(self.cu_q), torch.from_numpy(self.cu_k)
        launch = cpu_sdpa.load(is_causal)
        launch(self.q, self.k, self.v, cu_q, cu_k, None, None, out, lse, scale, rows, self.k.shape[0], 3)
        return out, lse

    def check(self, is_causal, scale=None):
        scale = self.q.shape[2] ** -0.5 if scale is None else scale
        want, want_lse = oracle(*(x.double().numpy() for x in (self.q, self.k, self.v)), self.cu_q, self.cu_k, is_causal, scale)
        out, lse = self.run(is_causal, scale)
        out, lse = out.double().numpy(), lse.double().numpy()
        blind = np.isneginf(want_lse)
        assert np.array_equal(np.isneginf(lse), blind)
        assert not out[blind.T].any()
        for_out, for_lse = TOLERANCE[self.dtype]
        # A query-key product is accumulated in float32: what it loses grows with the logits.
        for_lse *= max(1.0, np.abs(want_lse[~blind]).max(initial=0.0) / 100)
        assert np.linalg.norm(out - want) <= for_out * max(np.linalg.norm(want), 1e-30)
        assert np.abs(lse[~blind] - want_lse[~blind]).max(initial=0.0) <= for_lse


RAGGED = [
    ([5, 64, 1], [5, 64, 1]),
    ([0, 33, 130], [0, 33, 130]),  # empty sequence first, with neither queries nor keys
    ([17, 0, 9], [17, 40, 9]),  # no queries in the middle
    ([17, 6, 9], [17, 0, 9]),  # no keys in the middle
    ([40, 7], [40, 0]),  # no keys at the end
    ([12, 0], [30, 5]),  # no queries at the end
    ([70, 90, 2], [20, 5, 1]),  # more queries than keys: the first rows see nothing
    ([20, 1, 65, 260], [200, 513, 66, 270]),  # fewer queries than keys
    ([0, 0], [0, 0]),
]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", RAGGED, ids=str)
def test_ragged_with_tails(lengths, dtype, is_causal):
    Case(*lengths, dtype=dtype, tail=4).check(is_causal)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [1, 63, 64, 65, 127, 129, 255, 257])
def test_lengths_around_the_tiles(length, dtype):
    Case([length, length, 257], [length, 257, length], dtype=dtype, heads=2).check(True)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [1, 3, 16, 40])
@pytest.mark.parametrize("dims", [(192, 128), (256, 256), (96, 64), (128, 128)], ids=str)
def test_heads_and_dims(dims, heads, dtype):
    Case([40, 9], [40, 30], dims=dims, heads=heads, dtype=dtype, tail=2).check(True)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [None, 0.0, -0.1, 1.0, YARN_SCALE, 1e-60])
@pytest.mark.parametrize("is_causal", [True, False])
def test_scale_is_used_as_given(is_causal, scale, dtype):
    Case([90, 30, 20], [90, 41, 10], dtype=dtype).check(is_causal, scale)


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_logits(dtype):
    # 1e5 in the logits: softmax is a choice of one key, and an overflow would be NaN.  float64 sees the same inputs.
    case = Case([129, 60], [129, 200], dtype=dtype, factor=30.0)
    scale = 192**-0.5
    want, want_lse = oracle(*(x.double().numpy() for x in (case.q, case.k, case.v)), case.cu_q, case.cu_k, True, scale)
    out, lse = case.run(True, scale)
    assert np.linalg.norm(out.double().numpy() - want) <= 4e-3 * np.linalg.norm(want)
    assert np.allclose(lse.double().numpy(), want_lse, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_mask_in_several_blocks(dtype):
    # 16,500 columns leave a mask of 16 MB 256 rows: two blocks of each sequence.
    Case([300, 290], [16_500, 400], dtype=dtype, heads=1).check(True)


def test_mask_stays_within_its_memory():
    """More queries than any sequence has keys, beside one that needs the mask: a write before its memory stops the process."""
    script = """
from test_cpu_sdpa import DTYPES, Case
for dtype in DTYPES:
    for scale in (None, -0.1):  # a scale that is not positive needs the mask on a square too
        for lengths in ([8, 3, 130], [3, 8, 66]), ([2, 5000], [5, 1]), ([130, 4], [4, 4]), ([90, 40, 2], [20, 60, 0]):
            Case(*lengths, dtype=dtype, heads=1).check(True, scale)
print("fine")
"""
    env = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=Path(__file__).parent, env=env)
    assert done.stdout == "fine\n", done.stderr


@pytest.mark.parametrize("heads", [3, 8])
@pytest.mark.parametrize("layout", ["contiguous", "heads first", "one key head for all", "sliced"])
def test_layouts_give_the_value_of_their_contiguous_copy(layout, heads):
    case = Case([50, 77], [50, 120], heads=heads, tail=3, v_from=0)
    case.k.nan_to_num_(), case.v.nan_to_num_()
    if layout == "heads first":
        case.q, case.k, case.v = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (case.q, case.k, case.v))
    elif layout == "one key head for all":
        case.k, case.v = (x[:, :1].expand(-1, heads, -1) for x in (case.k, case.v))
    elif layout == "sliced":
        case.q, case.k, case.v = (torch.cat([x, torch.full_like(x, float("nan"))], -1)[..., : x.shape[2]] for x in (case.q, case.k, case.v))
    case.check(True)


def test_nan_beside_v_changes_nothing():
    # V is read beyond its columns where that saves a copy: whatever lies between its rows must stay without effect.
    case = Case([200], [200], heads=16, dtype="float32")
    clean, clean_lse = case.run(True, 0.07)
    base = torch.full((200, 16, 256), float("nan"))
    base[..., 128:] = case.v
    case.v = base[..., 128:]
    out, lse = case.run(True, 0.07)
    assert torch.equal(out, clean) and torch.equal(lse, clean_lse)


def test_memory_outside_v_is_never_read():
    """V at the very start, then at the very end of a readable page: a read outside it is a segmentation fault."""
    script = """
import ctypes, mmap, numpy as np
import tvm_ffi
from mla_interop.kernels import cpu_sdpa
page, size = mmap.PAGESIZE, 64 * 8 * 128 * 4
libc = ctypes.CDLL(None, use_errno=True)
area = mmap.mmap(-1, size + 2 * page)
start = ctypes.addressof(ctypes.c_char.from_buffer(area))
for guard in (start, start + page + size):
    assert libc.mprotect(ctypes.c_void_p(guard), ctypes.c_size_t(page), 0) == 0
v = np.frombuffer(area, np.float32, 64 * 8 * 128, page).reshape(64, 8, 128)
v[:] = 1.0
q = np.ones((64, 8, 192), np.float32)
out, cu = np.zeros((64, 8, 128), np.float32), np.array([0, 64], np.int32)
cpu_sdpa.load(True)(*map(tvm_ffi.from_dlpack, (q, q, v, cu, cu)), None, None, tvm_ffi.from_dlpack(out), None, 0.1, 64, 64, 0)
assert np.allclose(out, 1.0)
print("fine", flush=True)
import os; os._exit(0)
"""
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout == "fine\n"


def test_lse_is_optional_and_inputs_are_left_alone():
    case = Case([90, 20], [90, 60], heads=16, tail=2)
    arrays = [case.q, case.k, case.v, torch.from_numpy(case.cu_q), torch.from_numpy(case.cu_k)]

    def digest():
        return [hashlib.sha256(x.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest() for x in arrays]

    before = digest()
    out, _ = case.run(True, 0.1)
    again, none = case.run(True, 0.1, with_lse=False)
    assert none is None and torch.equal(out.view(torch.uint8), again.view(torch.uint8))
    assert digest() == before


def test_threads_may_call_at_once():
    cases = [Case([100 + 10 * i, 40], [100 + 10 * i, 80], heads=8, seed=i) for i in range(2)]
    want = [case.run(True, 0.1) for case in cases]
    wrong = []

    def work(case, expected):
        for _ in range(10):
            if not all(torch.equal(x, y) for x, y in zip(case.run(True, 0.1), expected)):
                wrong.append(case)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(cases, want)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("cu", [[0, 20, 10], [0, 10, 21], [1, 10, 20], [0, -1, 20]], ids=str)
def test_wrong_offsets_are_refused(cu):
    case = Case([10, 10], [10, 10])
    case.cu_k = np.array(cu, np.int32)
    with pytest.raises(ValueError, match="cu_seqlens_k"):
        case.run(True, 0.1)


@pytest.mark.parametrize("first", ["kernel", "torch"])
def test_one_libtorch_in_either_order(first):
    """A process that has only the kernel, and imports torch later, has one libtorch_cpu; so has one that does it the other way."""
    script = f"""
import sys
if {first!r} == "kernel":
    sys.modules["torch"] = None  # TVM FFI imports torch where it can
import tvm_ffi
if {first!r} == "kernel":
    del sys.modules["torch"]
import numpy as np
from mla_interop.kernels import cpu_sdpa
launch = cpu_sdpa.load(True)
def call():
    x, cu = np.ones((70, 8, 64), np.float32), np.array([0, 70], np.int32)
    out = np.zeros_like(x)
    launch(*map(tvm_ffi.from_dlpack, (x, x, x, cu, cu)), None, None, tvm_ffi.from_dlpack(out), None, 0.1, 70, 70, 0)
    assert np.allclose(out, 1.0)
call()
assert ("torch" in sys.modules) == ({first!r} == "torch")
import torch
torch.nn.functional.scaled_dot_product_attention(*[torch.ones(1, 2, 8, 16, requires_grad=True)] * 3).sum().backward()
call()
loaded = {{line.split()[-1] for line in open("/proc/self/maps") if "libtorch_cpu" in line or "libgomp" in line}}
assert len(loaded) == 2, loaded
print("fine")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "fine\n", done.stderr


def test_support_is_stated_with_reasons(monkeypatch, tmp_path):
    assert cpu_sdpa.unsupported_reasons("bfloat16", 192, 128) == []
    dtype, dims = cpu_sdpa.unsupported_reasons("float64", 128, 192)
    assert "float64" in dtype and "float32" in dtype and "(128, 192)" in dims
    with monkeypatch.context() as patch:
        patch.setattr(cpu_sdpa, "package_version", lambda name: "2.4.1+cpu")
        assert cpu_sdpa.unsupported_reasons("float32", 192, 128) == ["torch: got version 2.4.1+cpu; allowed: >= 2.7"]
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "torch", None)
        assert "torch: got none" in cpu_sdpa.unsupported_reasons("float32", 192, 128)[0]
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("MLA_INTEROP_CACHE", str(tmp_path))
    assert build.cache_dir() == tmp_path
    (reason,) = cpu_sdpa.unsupported_reasons("float32", 192, 128)
    assert "no-such-compiler" in reason


def test_loading_is_memoised():
    assert cpu_sdpa.load(True) is cpu_sdpa.load(True)
    assert cpu_sdpa.load(True) is not cpu_sdpa.load(False)
