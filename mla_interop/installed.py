"""What this machine has: probes for optional packages, which may be missing, broken or stuck, and a way to leave them out of an answer."""

import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from mla_interop.errors import MLAUnavailableError

PROBE_SECONDS = 10.0
"""How long finding out what is installed may take; nothing is imported for it."""
IMPORT_SECONDS = 120.0
"""How long importing an optional package may take, torch on a cold network disk included."""

_T = TypeVar("_T")
_stuck: dict[str, threading.Thread] = {}
_assumed: contextvars.ContextVar[bool | None] = contextvars.ContextVar("mla_interop_assume_installed", default=None)


@contextlib.contextmanager
def assume_installed(everything: bool = True) -> Iterator[None]:
    """Inside, every package counts as installed, in a version that was proven: what is left are the reasons of the problem itself.

    For answers about a machine that is not this one: the tables in the docs, and ``explain`` for a stated target. With False, none counts as installed.
    """
    token = _assumed.set(everything)
    try:
        yield
    finally:
        _assumed.reset(token)


def assumed() -> bool | None:
    """What is assumed to be installed here: everything, nothing, or, with None, what is: part of every cache key whose entry depends on it."""
    return _assumed.get()


def missing(probe: Callable[[], list[str]]) -> list[str]:
    """What ``probe`` finds to be missing on this machine: reasons of the installation, never of the problem.

    Any exception is a reason too: packages raise whatever they like (oumi#2586, open-r1#684).
    """
    if _assumed.get() is not None:
        return [] if _assumed.get() else ["not installed (assumed)"]
    try:
        return probe()
    except Exception as error:
        return [f"cannot tell what is installed: {type(error).__name__}: {error}"]


def within(seconds: float, what: str, action: Callable[[], _T]) -> _T:
    """What ``action`` returns or raises, if it ends in time.

    It runs in a thread of its own, with this thread's context variables; one that hangs is left behind, since no thread can be ended from outside.

    Raises:
        MLAUnavailableError: It did not end in time, or tried to end the process.
    """
    late = f"{what} did not end within {seconds:g} s and was left behind"
    if what in _stuck and _stuck[what].is_alive():
        raise MLAUnavailableError(late)  # not waited for a second time
    context, ended = contextvars.copy_context(), {}

    def run() -> None:
        try:
            ended["result"] = context.run(action)
        except BaseException as error:
            ended["error"] = error

    thread = threading.Thread(target=run, name=f"mla_interop: {what}", daemon=True)
    thread.start()
    thread.join(seconds)
    if "result" in ended:
        return ended["result"]
    if "error" not in ended:
        _stuck[what] = thread
    error: Any = ended.get("error") or MLAUnavailableError(late)
    if not isinstance(error, Exception):
        error = MLAUnavailableError(f"{what} raised {type(error).__name__}: {error}")
    raise error
