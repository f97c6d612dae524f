"""What a user may set, and where it may be set.

One precedence, setting by setting: a keyword of the call beats the configuration of the innermost :func:`use_config`, which beats the ones
around it, which beat :func:`set_config`'s, which beats the environment, which beats the defaults.
"""

import contextlib
import contextvars
import os
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from mla_interop.capability import stated_target
from mla_interop.errors import MLAInputError, input_error
from mla_interop.installed import assumed

ENVIRONMENT = {
    "backend": "MLA_INTEROP_BACKEND",
    "flash_attn_version": "MLA_INTEROP_FLASH_ATTN_VERSION",
    "order": "MLA_INTEROP_ORDER",
    "allow_reference": "MLA_INTEROP_ALLOW_REFERENCE",
    "policy": "MLA_INTEROP_POLICY",
    "self_check": "MLA_INTEROP_SELF_CHECK",
}

# Flags that vLLM's AttentionConfig had before mla_prefill_backend, and what each of them means now.
OLD_FLAGS = {"use_cudnn_prefill": "CUDNN", "use_trtllm_ragged_deepseek_prefill": "TRTLLM_RAGGED", "disable_flashinfer_prefill": "FLASH_ATTN"}


@dataclass(frozen=True)
class MLAPrefillConfig:
    """Settings of the selection. ``None`` everywhere means "not set": the next source decides.

    Attributes:
        backend: Name of the backend to use, or an ordered tuple of names of which the first valid one is used.
        flash_attn_version: 2, 3 or 4: the only generation that FLASH_ATTN may use.
        order: Names in order of preference, instead of the architecture's own order.
        allow_reference: Whether REFERENCE, plain array code, may serve when nothing faster can (default: yes).
        policy: ``"order"``: the first valid backend in the order. ``"measured"``: the fastest by a table of measured times, where one covers the
            problem. Default: measured, unless an order was set.
        self_check: Whether a kernel must pass :func:`mla_interop.self_check` on this machine before it is used (default: no).

    Raises:
        MLAInputError: A setting has a value that it cannot have. Names of backends are looked at where a configuration is put to use.
    """

    backend: Any = None
    flash_attn_version: int | None = None
    order: tuple[str, ...] | None = None
    allow_reference: bool | None = None
    policy: str | None = None
    self_check: bool | None = None

    def __post_init__(self) -> None:
        for name in ("backend", "order"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        if self.flash_attn_version not in (None, 2, 3, 4) or isinstance(self.flash_attn_version, float):
            raise input_error("flash_attn_version", repr(self.flash_attn_version), "2, 3, 4 or None")
        if self.policy not in (None, "order", "measured"):
            raise input_error("policy", repr(self.policy), "'order', 'measured' or None")
        for name in ("allow_reference", "self_check"):
            if not isinstance(getattr(self, name), bool | None):
                raise input_error(name, repr(getattr(self, name)), "True, False or None")

    @classmethod
    def from_mapping(cls, values: Mapping[str, object]) -> "MLAPrefillConfig":
        """From a mapping of the attributes' names.

        Raises:
            MLAInputError: A name is unknown, or a value is not allowed.
        """
        if not isinstance(values, Mapping):
            raise input_error("config", type(values).__name__, "a mapping of settings")
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(values) - known, key=repr)
        if unknown:
            raise input_error("config", ", ".join(map(repr, unknown)), ", ".join(sorted(known)))
        return cls(**values)  # pyright: ignore[reportArgumentType]

    @classmethod
    def from_environment(cls) -> "MLAPrefillConfig":
        """From ``MLA_INTEROP_*``; lists are separated by commas.

        Raises:
            MLAInputError: A value is not allowed. An empty one is an error, not "unset" (vllm#22217).
        """
        texts = {name: os.environ[variable] for name, variable in ENVIRONMENT.items() if variable in os.environ}
        values: dict[str, object] = {}
        for name, text in texts.items():
            if not text.strip():
                raise input_error(ENVIRONMENT[name], repr(text), "a value", "Unset the variable to leave the choice open.")
            values[name] = _parse(name, text.strip())
        return cls.from_mapping(values)

    @classmethod
    def from_vllm(cls, attention_config: object) -> "MLAPrefillConfig":
        """From vLLM's ``AttentionConfig``, or a mapping or any object with its fields; what is not about prefill is left alone.

        Read are ``mla_prefill_backend`` (a name or an enum member), ``flash_attn_version``, and the flags that came before: ``use_cudnn_prefill``
        means CUDNN, ``use_trtllm_ragged_deepseek_prefill`` means TRTLLM_RAGGED, and ``disable_flashinfer_prefill`` means FLASH_ATTN unless
        something else was asked for. Each flag that is set gives a DeprecationWarning. There they were ignored beside
        ``mla_prefill_backend`` (vllm#32623); here what contradicts is an error.

        Raises:
            MLAInputError: A flag is no bool, two settings ask for different backends, or FLASHINFER is both asked for and disabled.
        """
        known = ("mla_prefill_backend", "flash_attn_version", *OLD_FLAGS)
        if not isinstance(attention_config, Mapping) and not any(hasattr(attention_config, name) for name in known):
            raise input_error("attention_config", type(attention_config).__name__, "an AttentionConfig (not what holds one), or a mapping of its fields")
        read = attention_config.get if isinstance(attention_config, Mapping) else lambda name: getattr(attention_config, name, None)
        chosen = read("mla_prefill_backend")
        chosen = getattr(chosen, "name", chosen)
        if not isinstance(chosen, str | None):
            raise input_error("mla_prefill_backend", repr(chosen), "a name, an enum member, or None")
        backend = None if chosen is None else chosen.upper()
        asked = {} if backend is None else {"mla_prefill_backend": backend}
        for flag, meaning in OLD_FLAGS.items():
            value = read(flag)
            if not isinstance(value, bool | None):
                raise input_error(flag, repr(value), "True, False or None")
            if not value:
                continue
            warnings.warn(f"{flag} is deprecated: use mla_prefill_backend, or MLAPrefillConfig(backend={meaning!r})", DeprecationWarning, stacklevel=2)
            if flag != "disable_flashinfer_prefill":
                asked[flag] = meaning
            elif not asked:
                asked[flag] = meaning
            elif "FLASHINFER" in (name.partition(".")[0] for name in asked.values()):
                raise MLAInputError("disable_flashinfer_prefill: got True with mla_prefill_backend FLASHINFER; allowed: one of the two.")
        if len(set(asked.values())) > 1:
            said = ", ".join(f"{name} ({meaning})" for name, meaning in asked.items())
            raise input_error("mla_prefill_backend", f"different backends from {said}", "one backend")
        version: Any = read("flash_attn_version")
        return cls(backend=next(iter(asked.values()), None), flash_attn_version=version)

    def over(self, other: "MLAPrefillConfig") -> "MLAPrefillConfig":
        """This config, with what it leaves open taken from ``other``."""
        chosen = {field.name: getattr(self, field.name) for field in fields(self)}
        return MLAPrefillConfig(**{name: getattr(other, name) if value is None else value for name, value in chosen.items()})


def _parse(name: str, text: str) -> object:
    if name in ("backend", "order"):
        names = tuple(part.strip() for part in text.split(","))
        return names[0] if name == "backend" and len(names) == 1 else names
    if name == "policy":
        return text.lower()
    if name == "flash_attn_version":
        if not text.isdecimal():  # isdigit takes superscripts too, which int does not
            raise input_error(ENVIRONMENT[name], repr(text), "2, 3 or 4")
        return int(text)
    if text.lower() not in ("0", "1", "true", "false"):
        raise input_error(ENVIRONMENT[name], repr(text), "0 or 1")
    return text.lower() in ("1", "true")


_for_process: MLAPrefillConfig | None = None
_for_context: contextvars.ContextVar[MLAPrefillConfig | None] = contextvars.ContextVar("mla_interop_config", default=None)


def set_config(config: MLAPrefillConfig | Mapping[str, object] | None) -> None:
    """Make ``config`` the process's own, in every thread.

    Args:
        config: Settings, or a mapping of their names; None takes back what was set.

    Raises:
        MLAInputError: A setting, or the name of a backend, is unknown.
    """
    global _for_process
    _for_process = None if config is None else _checked(config)


@contextlib.contextmanager
def use_config(config: MLAPrefillConfig | Mapping[str, object]) -> Iterator[MLAPrefillConfig]:
    """Inside, calls of this thread (or task) use ``config``; what it leaves open comes from the configuration around it.

    A program that ``jax.jit`` has compiled, and a CUDA graph, keep the choice they were made with.

    Args:
        config: Settings, or a mapping of their names.

    Raises:
        MLAInputError: A setting, or the name of a backend, is unknown.
    """
    outer = _for_context.get()
    made = _checked(config) if outer is None else _checked(config).over(outer)
    token = _for_context.set(made)
    try:
        yield made
    finally:
        _for_context.reset(token)


def current_config() -> MLAPrefillConfig:
    """All that is set here and now, by :func:`use_config`, :func:`set_config` and the environment.

    Raises:
        MLAInputError: A variable of the environment has a value that is not allowed.
    """
    config = MLAPrefillConfig.from_environment()
    for nearer in config_in_use():
        config = config if nearer is None else nearer.over(config)
    return config


def config_in_use() -> tuple[MLAPrefillConfig | None, MLAPrefillConfig | None]:
    """What :func:`set_config` and :func:`use_config` set: part of every cache key whose entry depends on it."""
    return _for_process, _for_context.get()


def environment_key() -> tuple[Any, ...]:
    """The raw values of our variables, the configuration in use and the stated target: part of every cache key whose entry depends on
    them (flash-linear-attention#881)."""
    return (*map(os.environ.get, ENVIRONMENT.values()), os.environ.get("MLA_INTEROP_CACHE"), assumed(), stated_target(), *config_in_use())


def _checked(config: MLAPrefillConfig | Mapping[str, object]) -> MLAPrefillConfig:
    from mla_interop.backends.registry import parse_names  # the backends are described with this module's help

    if isinstance(config, Mapping):
        config = MLAPrefillConfig.from_mapping(config)
    elif not isinstance(config, MLAPrefillConfig):
        raise input_error("config", type(config).__name__, "an MLAPrefillConfig, or a mapping of its attributes")
    for name in ("backend", "order"):
        value = getattr(config, name)
        if value is not None:
            names = parse_names(name, value)
            # A configuration is a part of cache keys, and a sequence inside a sequence may be no tuple.
            config = config if isinstance(value, str) else replace(config, **{name: names})
    return config
