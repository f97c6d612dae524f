"""What metadata is to JAX: a pytree by its fields' names, so that no Python runs when a jitted function takes it."""

from collections.abc import Iterator
from typing import Any

import jax


class _FieldName(str):
    """Iterates as one name: JAX before 0.10 takes each of ``drop_fields`` apart into letters, and then misses the field."""

    def __iter__(self) -> Iterator[str]:
        yield str(self)


def register(kind: Any, arrays: list[str], static: list[str], host: list[str]) -> None:
    """Make a dataclass known to JAX. Once: ``importlib.reload`` comes here again, and JAX refuses a second registration.

    Args:
        kind: The class.
        arrays: Its fields that hold arrays, or pytrees of them.
        static: Those that a compiled program depends on.
        host: Those that only the host knows. They stay outside of a program, so they need defaults.
    """
    if not getattr(kind, "_is_jax_pytree", False):
        jax.tree_util.register_dataclass(kind, arrays, static, [_FieldName(name) for name in host])
        kind._is_jax_pytree = True
