"""What each backend serves, as a document: models, dtypes and architectures, whatever is installed on the machine that writes it."""

from collections.abc import Iterable, Sequence

from mla_interop.backends.registry import ORDERS, MLAPrefillBackendEnum
from mla_interop.capability import DeviceCapability
from mla_interop.dimensions import DEEPSEEK_R1, MODELS, MLADimensions
from mla_interop.installed import assume_installed
from mla_interop.selector_config import DTYPES, MLAPrefillSelectorConfig

ARCHITECTURES = ("7.5", "8.0", "8.9", "9.0", "10.0", "10.3", "11.0", "12.0", "cpu")
_HEAD = """# Which backend serves what

This file is written by `mla-interop backends --markdown > docs/backends.md`, and a test compares it with the code. It assumes that
every package is installed; `mla-interop doctor` says what is installed on a machine, and `mla-interop explain` what is chosen
there and why.
"""
_ORDERS = """## Orders

The first one that can serve is used, unless a table of measured times covers the problem (`docs/architecture.md`, measured selection). An
architecture is its compute capability's major version; `cuda` is any other.
"""
_MODELS = """## Models

bfloat16, causal, with LSE. A cell names the kernel that is preferred, or the number of the reasons why there is none.
"""
_DTYPES = f"""## Dtypes

Of q, k and v, for head dimensions {DEEPSEEK_R1.qk_head_dim}/{DEEPSEEK_R1.v_head_dim}. A cell lists the architectures that serve it.
"""


def answer(backend: str, dimensions: MLADimensions, architecture: str, dtype: str = "bfloat16") -> tuple[str, tuple[str, ...]]:
    """A backend's preferred kernel for a problem (its variant, or ``""``), and the reasons why there is none, if every package were installed.

    Args:
        backend: A built-in backend's name.
        dimensions: Head dimensions.
        architecture: A compute capability such as ``"9.0"``, or ``"cpu"``.
        dtype: Of q, k and v.
    """
    on_cpu = architecture == "cpu"
    config = MLAPrefillSelectorConfig(
        dtype=dtype,
        dimensions=dimensions,
        num_heads=16,
        device_type="cpu" if on_cpu else "cuda",
        capability=None if on_cpu else DeviceCapability.parse(architecture),
        scale=dimensions.qk_head_dim**-0.5,
    )
    cls = MLAPrefillBackendEnum[backend].get_class()
    with assume_installed():
        reasons = cls.validate_configuration(config)
        return ("", tuple(reasons)) if reasons else (cls.kernels(config)[0][0].variant, ())


def markdown() -> str:
    """The whole document."""
    notes: dict[tuple[str, ...], int] = {}
    parts = [_HEAD, _ORDERS, _table(("device", "order"), ((f"order of {device}", ", ".join(order)) for device, order in ORDERS.items())), _MODELS]
    for dimensions in dict.fromkeys(model.dimensions for model in MODELS.values()):
        models = ", ".join(name for name, model in MODELS.items() if model.dimensions == dimensions)
        parts += [f"### {dimensions.qk_head_dim}/{dimensions.v_head_dim} {dimensions}: {models}\n", _support(dimensions, notes)]
    parts += [_DTYPES, _dtypes(), "## Reasons\n"]
    parts.append("".join(f"{number}. {'; '.join(reasons)}\n" for reasons, number in notes.items()))
    return "\n".join(parts)


def summary() -> str:
    """One table for the README: DeepSeek's head dimensions in bfloat16, the kernel that is preferred, or ``-``."""
    made = [(name, *(answer(name, DEEPSEEK_R1, each)[0] or "-" for each in ARCHITECTURES)) for name in MLAPrefillBackendEnum.__members__]
    return _table(("backend", *ARCHITECTURES), made).rstrip()


def _support(dimensions: MLADimensions, notes: dict[tuple[str, ...], int]) -> str:
    rows = []
    for backend in MLAPrefillBackendEnum.__members__:
        cells = []
        for architecture in ARCHITECTURES:
            variant, reasons = answer(backend, dimensions, architecture)
            cells.append(variant or f"no ({notes.setdefault(reasons, len(notes) + 1)})")
        rows.append((backend, *cells))
    return _table(("backend", *ARCHITECTURES), rows)


def _dtypes() -> str:
    rows = []
    for backend in MLAPrefillBackendEnum.__members__:
        served = [[each for each in ARCHITECTURES if answer(backend, DEEPSEEK_R1, each, dtype)[0]] for dtype in DTYPES]
        rows.append((backend, *(", ".join(each) or "-" for each in served)))
    return _table(("backend", *DTYPES), rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
