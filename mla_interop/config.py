"""What a user may set, and where it may be set: a keyword beats an :class:`MLAPrefillConfig`, which beats the environment."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields

from mla_interop.errors import input_error

ENVIRONMENT = {
    "backend": "MLA_INTEROP_BACKEND",
    "flash_attn_version": "MLA_INTEROP_FLASH_ATTN_VERSION",
    "order": "MLA_INTEROP_ORDER",
    "allow_reference": "MLA_INTEROP_ALLOW_REFERENCE",
}


@dataclass(frozen=True)
class MLAPrefillConfig:
    """Settings of the selection. ``None`` everywhere means "not set": the next source decides.

    Attributes:
        backend: Name of the backend to use, or an ordered tuple of names of which the first valid one is used.
        flash_attn_version: 2, 3 or 4: the only generation that FLASH_ATTN may use.
        order: Names in order of preference, instead of the architecture's own order.
        allow_reference: Whether REFERENCE, plain array code, may serve when nothing faster can (default: yes).
    """

    backend: str | tuple[str, ...] | None = None
    flash_attn_version: int | None = None
    order: tuple[str, ...] | None = None
    allow_reference: bool | None = None

    def __post_init__(self) -> None:
        if self.flash_attn_version not in (None, 2, 3, 4):
            raise input_error("flash_attn_version", repr(self.flash_attn_version), "2, 3, 4 or None")

    @classmethod
    def from_mapping(cls, values: Mapping[str, object]) -> "MLAPrefillConfig":
        """From a mapping of the attributes' names.

        Raises:
            MLAInputError: A name is unknown, or a value is not allowed.
        """
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise input_error("config", ", ".join(map(repr, unknown)), ", ".join(sorted(known)))
        return cls(**values)  # pyright: ignore[reportArgumentType]

    @classmethod
    def from_environment(cls) -> "MLAPrefillConfig":
        """From ``MLA_INTEROP_*``; lists are separated by commas. An empty value is an error, not "unset" (vllm#22217)."""
        texts = {name: os.environ[variable] for name, variable in ENVIRONMENT.items() if variable in os.environ}
        values: dict[str, object] = {}
        for name, text in texts.items():
            if not text.strip():
                raise input_error(ENVIRONMENT[name], repr(text), "a value", "Unset the variable to leave the choice open.")
            values[name] = _parse(name, text.strip())
        return cls.from_mapping(values)

    def over(self, other: "MLAPrefillConfig") -> "MLAPrefillConfig":
        """This config, with what it leaves open taken from ``other``."""
        chosen = {field.name: getattr(self, field.name) for field in fields(self)}
        return MLAPrefillConfig(**{name: getattr(other, name) if value is None else value for name, value in chosen.items()})


def _parse(name: str, text: str) -> object:
    if name in ("backend", "order"):
        names = tuple(part.strip() for part in text.split(","))
        return names[0] if name == "backend" and len(names) == 1 else names
    if name == "flash_attn_version":
        if not text.isdigit():
            raise input_error(ENVIRONMENT[name], repr(text), "2, 3 or 4")
        return int(text)
    if text.lower() not in ("0", "1", "true", "false"):
        raise input_error(ENVIRONMENT[name], repr(text), "0 or 1")
    return text.lower() in ("1", "true")


def environment_key() -> tuple[str | None, ...]:
    """The raw values of our variables: part of every cache key whose entry depends on them (flash-linear-attention#881)."""
    return tuple(map(os.environ.get, ENVIRONMENT.values()))
