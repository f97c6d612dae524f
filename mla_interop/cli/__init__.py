"""The ``mla-interop`` command: one module for each of its commands.

Exit codes: 0, done; 1, done and the answer is no (something deviates, or could not be had); 2, bad use.
"""

import sys

from mla_interop.errors import MLAError, MLAInputError

try:
    import typer
except ImportError as error:
    sys.exit(f"mla-interop: the command needs typer and rich ({error}); install them with: pip install 'mla-interop[cli]'")

from mla_interop.cli.backends import backends
from mla_interop.cli.bench import bench
from mla_interop.cli.cache import cache
from mla_interop.cli.compare import compare
from mla_interop.cli.demo import demo
from mla_interop.cli.doctor import doctor
from mla_interop.cli.explain import explain
from mla_interop.cli.output import BAD_USE, NO
from mla_interop.cli.tune import tune
from mla_interop.cli.warmup import warmup

app = typer.Typer(
    help="MLA prefill attention from PyTorch and from JAX, through one core.",
    epilog="Exit codes: 0, done; 1, done and the answer is no (something deviates, or could not be had); 2, bad use.",
    no_args_is_help=True,
    add_completion=False,
)
for command, example in (
    (demo, "mla-interop demo --model deepseek-v2-lite README.md"),
    (backends, "mla-interop backends --json"),
    (explain, "mla-interop explain --model deepseek-v3 --gpu h200 --tokens 8192 --sequences 8"),
    (warmup, "mla-interop warmup --model deepseek-v3 --gpu h200"),
    (tune, "mla-interop tune --model deepseek-v3 --heads 16,128"),
    (bench, "mla-interop bench --problems 128x4096x1 --output results.json"),
    (compare, "mla-interop compare saved.npz --backend FLASH_ATTN,FLASHINFER"),
    (doctor, "mla-interop doctor --self-check"),
):
    app.command(epilog=f"Example: {example}")(command)
app.add_typer(cache, name="cache")


def main() -> None:
    """Entry point: what can be expected to go wrong is told in words, without a traceback."""
    try:
        app()
    except MLAError as error:
        _fail(str(error), BAD_USE if isinstance(error, MLAInputError) else NO)
    except OSError as error:  # a full disk, a folder that cannot be written
        _fail(str(error), NO)


def _fail(text: str, code: int) -> None:
    print(f"mla-interop: {text}", file=sys.stderr)
    sys.exit(code)
