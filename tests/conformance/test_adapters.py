"""Every adapter of a Python package against a stub of that package, on the CPU: what it passes, and what it makes of what comes back."""

import ast
import dataclasses
import functools
import importlib
import inspect
import math
import sys
import textwrap
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402
import oracle  # noqa: E402
import recorded  # noqa: E402
import stub_packages  # noqa: E402

from mla_interop import MLAUnavailableError, MLAUnsupportedError  # noqa: E402
from mla_interop.kernels import blackwell_packages, flash_attn_packages, needs, signatures  # noqa: E402
from mla_interop.kernels.torch_package import TorchPackage  # noqa: E402
from mla_interop.sequences import HostLengths  # noqa: E402

HEADS, TAIL, SCALE = 3, 2, 0.11  # another scale than the default, and N != T
LENGTHS = {
    "every-kind": ((5, 0, 4, 33, 0, 6), (9, 3, 0, 40, 0, 2)),  # with more queries than keys in the last sequence
    "longer-queries-first": ((70, 3), (11, 30)),
}


class Subject(NamedTuple):
    """An adapter, whose package it calls, and which recorded versions it must work with."""

    package: TorchPackage
    distribution: str
    versions: tuple[str, ...]

    @property
    def dtype(self) -> Any:
        return getattr(torch, next(iter(self.package.dtypes)))

    @property
    def out_dtype(self) -> Any:
        return torch.bfloat16

    @property
    def compacts(self) -> bool:
        return needs.NO_EMPTY_SEQUENCES in self.package.needs


DISTRIBUTIONS = {"fa4api": "flash-attn-4", "fa3": "tokenspeed-fa3", "fa3vllm": "vllm", "fa2": "flash-attn", "fa2torch": "torch"}
BLACKWELL = (blackwell_packages.TRTLLM_RAGGED, blackwell_packages.TOKENSPEED_MLA, *blackwell_packages.FLASHINFER)
DISTRIBUTIONS |= {package.variant: package.distribution for package in BLACKWELL}
REFUSED = {("cudnn", "0.6.14")}  # offsets in elements only, and a padded LSE
SUBJECTS = {
    package.variant: Subject(
        package,
        DISTRIBUTIONS[package.variant],
        tuple(version for version in recorded.versions(DISTRIBUTIONS[package.variant]) if (package.variant, version) not in REFUSED),
    )
    for package in (*flash_attn_packages.PACKAGES, *BLACKWELL)
}


@pytest.fixture(autouse=True)
def without_libraries(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's operators need no library here; no workspace outlives a test."""
    monkeypatch.setattr(flash_attn_packages, "_vllm_library", lambda: "")
    monkeypatch.setattr(torch.ops, "load_library", lambda path: None)
    needs._workspaces.clear()
    yield
    needs._workspaces.clear()


def conforms(subject: Subject, is_causal: bool, lengths: str) -> None:
    """One launch in the kernel ABI with what a frontend would pass, every buffer poisoned; fails unless the result is the oracle's."""
    lengths_q, lengths_k = LENGTHS[lengths]
    random = np.random.default_rng(7)
    cu_q, cu_k = (np.concatenate([[0], np.cumsum(each)]).astype(np.int32) for each in (lengths_q, lengths_k))
    tokens, keys = int(cu_q[-1]) + TAIL, int(cu_k[-1])
    # Each a part of something wider, as in a model, so that a kernel that ignores strides reads something else.
    wide = [random.standard_normal((rows, HEADS, 64 + width)).astype(np.float32) for rows, width in ((tokens, 192), (keys, 192), (keys, 128))]
    tensors = {name: torch.from_numpy(each).to(subject.dtype)[..., 64:] for name, each in zip("qkv", wide, strict=True)}
    right, right_lse = oracle.attention(*(x.float().numpy() for x in tensors.values()), cu_q, cu_k, SCALE, is_causal)
    q, k, v = (x if name in subject.package.strided else x.clone(memory_format=torch.contiguous_format) for name, x in tensors.items())
    plan = torch.from_numpy(needs.active_sequences(HostLengths(cu_q, cu_k), tokens, HEADS)) if subject.compacts else None
    out = torch.full((tokens, HEADS, 128), math.nan, dtype=subject.out_dtype)
    lse = torch.full((HEADS, tokens), math.nan)
    bounds = max(lengths_q), max(lengths_k)
    subject.package.load(is_causal)(q, k, v, torch.from_numpy(cu_q), torch.from_numpy(cu_k), plan, None, out, lse, SCALE, *bounds, 3)
    error = np.linalg.norm(out.double().numpy() - right) / np.linalg.norm(right)
    assert error < 4e-3, f"out: relative error {error:.2e}"
    both_none = np.isneginf(lse.numpy()) & np.isneginf(right_lse)
    distance = np.where(both_none, 0.0, np.abs(np.where(both_none, 0.0, lse.double().numpy()) - np.where(both_none, 0.0, right_lse)))
    assert distance.max() < 1e-4, f"lse: absolute error {distance.max():.2e}"


EVERY = [(variant, version) for variant, subject in SUBJECTS.items() for version in subject.versions]


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize(("variant", "version"), EVERY)
def test_an_adapter_and_its_package_agree(monkeypatch: pytest.MonkeyPatch, variant: str, version: str, is_causal: bool, lengths: str) -> None:
    stub_packages.install(monkeypatch, SUBJECTS[variant].distribution, version)
    conforms(SUBJECTS[variant], is_causal, lengths)


def test_a_package_that_compiles_in_a_call_is_called_by_one_thread_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = SUBJECTS["fa4api"]
    stub_packages.install(monkeypatch, subject.distribution, subject.versions[-1])
    package = importlib.import_module("flash_attn.cute")
    real, inside, most = package.flash_attn_varlen_func, [], []

    @functools.wraps(real)
    def slow(*arguments: Any, **named: Any) -> Any:
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.02)
        inside.pop()
        return real(*arguments, **named)

    monkeypatch.setattr(package, "flash_attn_varlen_func", slow)
    launch = subject.package.load(True)
    q, k, v, out = (torch.randn(16, HEADS, width).to(subject.dtype) for width in (192, 192, 128, 128))
    cu = torch.tensor([0, 7, 16], dtype=torch.int32)
    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(launch, q, k, v, cu, cu, None, None, torch.empty_like(out), None, SCALE, 9, 9, 0) for _ in range(8)]:
            done.result()
    assert len(most) == 8 and max(most) == 1


class Swap(ast.NodeTransformer):
    """Two of the adapter's arguments change places."""

    def __init__(self, first: str, second: str) -> None:
        self.other = {first: second, second: first}

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.copy_location(ast.Name(self.other.get(node.id, node.id), node.ctx), node)


class Fix(ast.NodeTransformer):
    """An argument is dropped: a constant is passed instead."""

    def __init__(self, name: str, value: Any) -> None:
        self.name, self.value = name, value

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.copy_location(ast.Constant(self.value), node) if node.id == self.name else node


class Keyword(ast.NodeTransformer):
    """A keyword argument gets another value."""

    def __init__(self, name: str, value: Any) -> None:
        self.name, self.value = name, value

    def visit_keyword(self, node: ast.keyword) -> ast.AST:
        return ast.copy_location(ast.keyword(node.arg, ast.Constant(self.value)), node) if node.arg == self.name else self.generic_visit(node)


EDITS: dict[str, ast.NodeTransformer] = {
    "swap q and k": Swap("q", "k"),
    "swap k and v": Swap("k", "v"),
    "swap lengths": Swap("cu_q", "cu_k"),
    "swap bounds": Swap("max_q", "max_k"),
    "drop scale": Fix("scale", None),
    "scale of 1": Fix("scale", 1.0),
    "always causal": Fix("is_causal", True),
    "never causal": Fix("is_causal", False),
}
OWN_EDITS: dict[str, dict[str, ast.NodeTransformer]] = {
    "trtllmgen": {"no seq_lens": Keyword("seq_lens", None), "a window": Keyword("window_left", 0), "scale of v": Keyword("bmm2_scale", 0.5)},
    "cutedsl": {"q's lengths left out": Keyword("cum_seq_lens_q", None), "q's bound left out": Keyword("max_seq_len_q", None)},
    "cudnn": {"offsets in elements": Keyword("batch_offsets_units", "elements"), "base 2": Keyword("lse_base", "log2")},
    "cutlass": {"a bound that needs a sync": Keyword("max_qo_len", None), "no lse": Keyword("return_lse", False)},
    "fa4api": {"no lse": Keyword("return_lse", False)},
    "fa3": {"no lse": Keyword("return_attn_probs", False)},
}
# What is declared beside an adapter, and what is wrong to declare.
DECLARATIONS: dict[str, dict[str, Any]] = {
    "trtllmgen": {
        "drop the ln 2": {"lse_base": "e"},
        "skip the transpose": {"lse_layout": "NT"},
        "strided q": {"strided": frozenset("qkv")},
        "empty sequences": {"needs": frozenset({needs.OUT_BUFFER, needs.ZEROED_WORKSPACE})},
        "out not zeroed": {"needs_without_mask": frozenset()},
    },
    "cutedsl": {"a ln 2 too many": {"lse_base": "2"}, "skip the transpose": {"lse_layout": "NT"}, "strided v": {"strided": frozenset("v")}},
    "cutlass": {"drop the ln 2": {"lse_base": "e"}, "skip the transpose": {"lse_layout": "NT"}},
    "cudnn": {"a ln 2 too many": {"lse_base": "2"}, "skip the transpose": {"lse_layout": "NT"}},
    "fa2": {"no padding of v": {"pads_v": False}},
    "fa2torch": {"no padding of v": {"pads_v": False}},
}


def edited(open_package: Callable[..., Any], edit: ast.NodeTransformer | None) -> Callable[..., Any]:
    """The function that opens a package, with the adapter inside it changed; ``None`` compiles it as it is."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(open_package)))
    (adapter,) = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "attention")
    before = ast.dump(adapter)
    if edit is not None:
        adapter.body = [edit.visit(statement) for statement in adapter.body]
        assert ast.dump(adapter) != before, "the edit changed nothing"
    namespace = dict(vars(sys.modules[open_package.__module__]))
    exec(compile(ast.fix_missing_locations(tree), "edited", "exec"), namespace)
    return namespace[open_package.__name__]


def changed(subject: Subject, **declared: Any) -> Subject:
    return subject._replace(package=dataclasses.replace(subject.package, **declared))


def mutants() -> list[Any]:
    made = [(variant, name) for variant in SUBJECTS for name in (*EDITS, *OWN_EDITS.get(variant, ()), *DECLARATIONS.get(variant, ()))]
    return [pytest.param(*each, id="-".join(each).replace(" ", "-")) for each in made]


@pytest.mark.parametrize(("variant", "mutation"), mutants())
def test_a_broken_adapter_does_not_conform(monkeypatch: pytest.MonkeyPatch, variant: str, mutation: str) -> None:
    """Break it on purpose: at least one of the cases above must fail, or they prove nothing."""
    subject = SUBJECTS[variant]
    edit = (EDITS | OWN_EDITS.get(variant, {})).get(mutation)
    declared = {"open": edited(subject.package.open, edit)} if edit else DECLARATIONS[variant][mutation]
    stub_packages.install(monkeypatch, subject.distribution, subject.versions[-1])
    broken, failures = changed(subject, **declared), []
    for is_causal in (True, False):
        for lengths in LENGTHS:
            try:
                conforms(broken, is_causal, lengths)
            except Exception as error:
                failures.append(error)
    assert failures, f"{variant} passes with: {mutation}"


@pytest.mark.parametrize("variant", SUBJECTS)
def test_an_adapter_that_is_only_compiled_again_conforms(monkeypatch: pytest.MonkeyPatch, variant: str) -> None:
    """It is the edits that fail above, not the way they are made."""
    subject = SUBJECTS[variant]
    stub_packages.install(monkeypatch, subject.distribution, subject.versions[-1])
    conforms(changed(subject, open=edited(subject.package.open, None)), True, "every-kind")


def renamed(name: str) -> Callable[[recorded.Parameters], recorded.Parameters]:
    return lambda parameters: [{**each, "name": f"{each['name']}_v2"} if each["name"] == name else each for each in parameters]


def with_required(parameters: recorded.Parameters) -> recorded.Parameters:
    return [*(each for each in parameters if not each["kind"].startswith("VAR_")), {"name": "page_size", "kind": "KEYWORD_ONLY"}]


def names_of(variant: str) -> list[str]:
    """What the adapter's package is given, by the calls of a stub."""
    return {"fa2torch": ["query", "cum_seq_q", "scale"], "trtllmgen": ["query", "bmm1_scale", "cum_seq_lens_kv"], "cutedsl": ["cum_seq_lens", "out"]}.get(
        variant, {"cutlass": ["kv_segment_offsets", "sm_scale"], "cudnn": ["batch_offsets_units", "scale"]}.get(variant, ["cu_seqlens_k", "softmax_scale"])
    )


@pytest.mark.parametrize(("variant", "name"), [(variant, name) for variant in SUBJECTS for name in names_of(variant)])
def test_a_version_that_renames_an_argument_is_refused_and_not_called(monkeypatch: pytest.MonkeyPatch, variant: str, name: str) -> None:
    subject = SUBJECTS[variant]
    stub_packages.install(monkeypatch, subject.distribution, subject.versions[-1], renamed(name))
    with pytest.raises(MLAUnavailableError, match=rf"signature that this adapter was not written for.*\b{name}\b"):
        subject.package.load(True)


@pytest.mark.parametrize("variant", SUBJECTS)
def test_a_version_that_requires_something_new_is_refused(monkeypatch: pytest.MonkeyPatch, variant: str) -> None:
    subject = SUBJECTS[variant]
    stub_packages.install(monkeypatch, subject.distribution, subject.versions[-1], with_required)
    with pytest.raises(MLAUnavailableError, match="parameter page_size is required, and unknown here"):
        subject.package.load(True)


@pytest.mark.parametrize("variant", ["fa2", "fa2torch"])
def test_a_version_that_reorders_what_is_passed_by_position_is_refused(monkeypatch: pytest.MonkeyPatch, variant: str) -> None:
    """FlashAttention-4's fourth argument is another one than FlashAttention-2's."""
    subject = SUBJECTS[variant]
    stub_packages.install(monkeypatch, subject.distribution, subject.versions[-1], lambda given: [*given[:3], given[4], given[3], *given[5:]])
    with pytest.raises(MLAUnavailableError, match="positional parameter 4 is cu"):
        subject.package.load(True)


@pytest.mark.parametrize(("variant", "version"), sorted(REFUSED))
def test_recorded_versions_that_cannot_serve_are_refused(monkeypatch: pytest.MonkeyPatch, variant: str, version: str) -> None:
    stub_packages.install(monkeypatch, SUBJECTS[variant].distribution, version)
    with pytest.raises(MLAUnavailableError, match="no parameter batch_offsets_units"):
        SUBJECTS[variant].package.load(True)


def test_a_package_that_hides_why_it_cannot_be_used_is_refused() -> None:
    """tokenspeed-mla exports ``(*args, **kwargs)`` that raise when called, where its imports failed."""
    with pytest.raises(MLAUnavailableError, match="no parameter query"):
        signatures.require(lambda *args, **kwargs: None, "f", keywords=("query",))


@pytest.mark.parametrize("version", ["0.6.14", "0.7.4"])
def test_a_stride_that_wraps_is_refused_where_it_would(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """flashinfer#3779: the number of elements of K in 32 bits. No memory is needed to see it."""
    stub_packages.install(monkeypatch, "flashinfer-python", version)
    monkeypatch.setattr(blackwell_packages, "package_version", lambda distribution: version)
    attention = blackwell_packages.TRTLLM_RAGGED.open()
    keys = torch.empty(1, 1, 192, dtype=torch.bfloat16).expand(2**31 // 192 // 128 + 1, 128, 192)
    cu = torch.tensor([0, 1], dtype=torch.int32)
    with pytest.raises(MLAUnsupportedError if version == "0.6.14" else RuntimeError) as error:  # the stub would need the memory
        attention(keys[:1], keys, keys[..., :128], cu, cu, 1, 1, 0.1, True, out=keys[:1, :, :128], workspace=torch.zeros(1))
    assert ("flashinfer#3779" in str(error.value)) == (version == "0.6.14")


@pytest.mark.parametrize("heads", [16, 128, 256])
@pytest.mark.parametrize(("num_seqs", "max_q"), [(1, 1), (1, 16384), (8, 1024), (64, 257), (512, 2048)])
def test_the_workspace_holds_what_the_launcher_lays_out(num_seqs: int, max_q: int, heads: int) -> None:
    """vllm#48428: 394 MiB overflow. FlashInfer's launcher: 8192 x 256 int32 counters, two floats a head and row of whole 256-row tiles, 1 MiB of guard."""
    counters, statistics = 8192 * 256 * 4, 2 * 4 * heads * num_seqs * -(-max_q // 256) * 256
    scratch = blackwell_packages.trtllm_workspace_bytes(num_seqs, heads, max_q) - counters - statistics - (1 << 20)
    assert 100 << 20 <= scratch <= 128 << 20


def test_more_work_than_the_planner_has_room_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    stub_packages.install(monkeypatch, "flashinfer-python", "0.7.4")
    attention = blackwell_packages.FLASHINFER[0].open()
    q = torch.empty(1, 1, 192).expand(262144, 128, 192)
    cu = torch.tensor([0, 262144], dtype=torch.int32)
    with pytest.raises(MLAUnsupportedError, match="allowed: 131072"):
        attention(q, q, q[..., :128], cu, cu, 262144, 262144, 0.1, True)


def test_flashinfer_without_cudnn_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would call another kernel, whose LSE is padded."""
    stub_packages.install(monkeypatch, "flashinfer-python", "0.7.4")
    monkeypatch.setattr(sys.modules["flashinfer.cudnn.prefill"], "CUDNN_AVAILABLE", False)
    with pytest.raises(MLAUnavailableError, match="cannot import cudnn"):
        SUBJECTS["cudnn"].package.load(True)


@pytest.mark.parametrize("distribution", sorted(recorded.FUNCTIONS))
def test_an_installed_package_has_the_signatures_that_were_recorded(distribution: str) -> None:
    """Of another version than those recorded, it must at least have what its adapters rely on; ``load`` checks the same."""
    root = recorded.installed_root(distribution)
    if root is None:
        pytest.skip(f"{distribution} is not installed")
    version = recorded.metadata.version(distribution)
    if version not in recorded.versions(distribution):
        pytest.skip(f"{distribution} {version} was not recorded: run tests/conformance/recorded.py")
    assert recorded.read(distribution, root) == recorded.load(distribution, version)


def test_torch_has_the_operator_that_was_recorded() -> None:
    signatures.require(
        torch.ops.aten._flash_attention_forward.default,
        "aten",
        ("query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k"),
        ("scale", "dropout_p", "is_causal", "return_debug_mask"),
    )
    version = torch.__version__.partition("+")[0]
    if version in recorded.versions("torch"):
        live = recorded.from_signature(signatures.signature_of(torch.ops.aten._flash_attention_forward.default))
        assert live == recorded.load("torch", version)["torch.ops.aten._flash_attention_forward.default"]


def test_signatures_read_from_sources_are_those_of_the_functions() -> None:
    """The recorder does not import what it records: it must see what ``inspect`` sees."""
    source = textwrap.dedent("""
        def f(a): ...
        def f(a, b: int = 2, *args, c, d=None, **options): ...
    """)
    namespace: dict[str, Any] = {}
    exec(source, namespace)
    made = recorded.from_source(source, "f")
    assert made == recorded.from_signature(inspect.signature(namespace["f"]))
    assert [each.kind for each in recorded.to_signature(made).parameters.values()] == [
        each.kind for each in inspect.signature(namespace["f"]).parameters.values()
    ]
