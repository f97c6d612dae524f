"""The package's one family of exceptions, and the one way their texts are built.

A text says which argument, what came, what is allowed, and what to do.
"""


class MLAError(Exception):
    """Base of every error that this package raises on purpose."""


class MLAInputError(MLAError, ValueError):
    """An argument is wrong; nothing was launched."""


class MLAUnsupportedError(MLAError, NotImplementedError):
    """The request is well formed, but no backend (or not the one asked for) can serve it; carries every reason."""


class MLAUnavailableError(MLAError, ImportError):
    """What was asked for exists, but cannot be had on this machine (a package is missing or broken)."""


class MLABuildError(MLAUnavailableError):
    """Native code could not be built or loaded; the text carries the end of the tool's output."""


def input_error(argument: str, got: object, allowed: str, advice: str = "") -> MLAInputError:
    """An :class:`MLAInputError` in the house form: ``argument: got X; allowed is Y. Advice``."""
    text = f"{argument}: got {got}; allowed: {allowed}."
    return MLAInputError(f"{text} {advice}" if advice else text)
