"""How work that takes long says how far it is: ``progress(share, what)``, the share that is done from 0 to 1, and what comes next."""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

Progress = Callable[[float, str], None]
Item = TypeVar("Item")


def silent(share: float, what: str) -> None:
    """Nobody is told."""


def within(progress: Progress, start: float, end: float) -> Progress:
    """The progress of a part that goes from one share of the whole to another."""
    return lambda share, what: progress(start + (end - start) * share, what)


def told(items: Sequence[Item], progress: Progress, name: Callable[[Item], str] = str) -> Iterator[Item]:
    """The items, each announced before it is worked on."""
    for index, item in enumerate(items):
        progress(index / len(items), name(item))
        yield item
