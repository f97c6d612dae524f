"""The cache of built objects: a build that takes long says what it is doing, a quick one or a failed one leaves nothing behind."""

import logging
import threading
from pathlib import Path

import pytest

from mla_interop.kernels import build


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MLA_INTEROP_CACHE", str(tmp_path))


def test_a_slow_build_says_so_once_and_what_helps(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(build, "SLOW_BUILD_S", 0.01)
    heard = threading.Event()
    monkeypatch.setattr(build._log, "warning", lambda *words, real=build._log.warning: (real(*words), heard.set()))

    def slow(out: Path) -> None:
        assert heard.wait(20)
        out.write_bytes(b"x")

    with caplog.at_level(logging.WARNING, "mla_interop"):
        assert build.cached("flashinfer_fa3", {"a": 1}, slow).read_bytes() == b"x"
        assert build.cached("flashinfer_fa3", {"a": 1}, slow).read_bytes() == b"x"  # there by now: silent
    assert caplog.messages == ["flashinfer_fa3 is being built, once; this can take minutes. `mla-interop warmup` builds beforehand."]


@pytest.mark.parametrize("fails", [False, True])
def test_a_quick_or_failed_build_says_nothing(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path, fails: bool) -> None:
    monkeypatch.setattr(build, "SLOW_BUILD_S", 3600.0)

    def quick(out: Path) -> None:
        if fails:
            raise OSError("no")
        out.write_bytes(b"x")

    if fails:
        with pytest.raises(build.MLABuildError, match="no. Set MLA_INTEROP_CACHE"):
            build.cached("thing", {}, quick)
    else:
        build.cached("thing", {}, quick)
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            thread.join(20)  # one that was cancelled ends
            assert not thread.is_alive(), "it would still speak in an hour"
    assert not caplog.messages
    assert not [path for path in tmp_path.iterdir() if path.is_dir()], "the folder it was built in is gone"


def test_a_compilers_words_are_cut_and_kept() -> None:
    """ninja prints command lines of thousands of characters, which would bury the error."""
    with pytest.raises(build.MLABuildError) as caught:
        build.run_tool(["sh", "-c", "printf 'x%.0s' $(seq 5000) >&2; echo >&2; echo 'error: why' >&2; exit 3"], "a kernel")
    text = str(caught.value)
    assert text.endswith("error: why") and "sh exited with 3" in text and len(text) < 500
