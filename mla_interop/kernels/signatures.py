"""What an adapter relies on in the function of another package, checked once when the function is loaded.

Packages rename, reorder and drop parameters between versions.  A call by an old name fails late, inside an XLA program perhaps;
a call by an old position may not fail at all.  So a function that does not fit is refused by name before anything calls it.
"""

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mla_interop.errors import MLAUnavailableError

_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_BY_KEYWORD = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def differences(signature: inspect.Signature, positional: Sequence[str], keywords: Iterable[str]) -> list[str]:
    """Why a call with these arguments would not mean what it says; empty if it does.

    Args:
        signature: Of the installed function.
        positional: The parameters that the adapter fills by position, in order.
        keywords: Those that it fills by name.
    """
    parameters = signature.parameters
    found = []
    in_order = [name for name, parameter in parameters.items() if parameter.kind in _BY_POSITION]
    for index, name in enumerate(positional):
        actual = in_order[index] if index < len(in_order) else None
        if actual != name:
            found.append(f"positional parameter {index + 1} is {actual or 'missing'}, not {name}")
    for name in keywords:
        if name not in parameters or parameters[name].kind not in _BY_KEYWORD:
            found.append(f"no parameter {name}" + (" by keyword" if name in parameters else ""))
    filled = {*positional, *keywords}
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    unknown = [name for name, each in parameters.items() if each.default is each.empty and each.kind not in variadic and name not in filled]
    return found + [f"parameter {name} is required, and unknown here" for name in unknown]


def require(function: Callable[..., Any], what: str, positional: Sequence[str] = (), keywords: Iterable[str] = ()) -> Callable[..., Any]:
    """``function`` itself, if it can be called as the adapter does.

    Args:
        function: A Python function, or one of torch's operator overloads.
        what: The function and the package's version, for the error's text.
        positional, keywords: As for :func:`differences`.

    Raises:
        MLAUnavailableError: It cannot, with every difference.
    """
    found = differences(signature_of(function), positional, keywords)
    if found:
        raise MLAUnavailableError(f"{what} has a signature that this adapter was not written for: {'; '.join(found)}. Install a version that it knows.")
    return function


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """The signature of a Python function, or of a torch operator from its schema."""
    schema = getattr(function, "_schema", None)
    return inspect.signature(function) if schema is None else schema_signature(schema)


def schema_signature(schema: Any) -> inspect.Signature:
    """A torch operator's schema as a signature."""
    parameters = []
    for argument in schema.arguments:
        kind = inspect.Parameter.KEYWORD_ONLY if argument.kwarg_only else inspect.Parameter.POSITIONAL_OR_KEYWORD
        default = argument.default_value if argument.has_default_value() else inspect.Parameter.empty
        parameters.append(inspect.Parameter(argument.name, kind, default=default))
    return inspect.Signature(parameters)
