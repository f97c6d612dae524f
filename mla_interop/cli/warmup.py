"""``mla-interop warmup``."""

import json
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from mla_interop.cli.output import JSON, NO, console, dtypes_named, mib, model_named, plain, progress_bar
from mla_interop.progress import Progress, told, within

_COLOURS = {"built": "green", "was there": "green", "nothing to build": "dim", "left out": "yellow", "failed": "red"}


def warmup(
    model: Annotated[str, typer.Option(help="A model's name; an unknown one lists the known.")] = "deepseek-v3",
    gpu: Annotated[
        str | None, typer.Option(show_default="this machine's", help="A GPU's name (h200, b200, rtx-5090, ...), a compute capability (9.0), or cpu.")
    ] = None,
    dtype: Annotated[str, typer.Option(callback=dtypes_named, help="Of q, k and v; several with commas between.")] = "bfloat16",
    heads: Annotated[int | None, typer.Option(min=1, show_default="the model's", help="Heads on one device.")] = None,
    backend: Annotated[str | None, typer.Option(show_default="all that may be chosen", help="Build these, with commas between.")] = None,
    jax: Annotated[bool, typer.Option("--jax/--no-jax", help="Also the handler for calls from JAX.")] = True,
    torch: Annotated[bool, typer.Option("--torch/--no-torch", help="Also the operators for compiled programs of torch.")] = True,
    first_call: Annotated[bool, typer.Option("--first-call", help="Then time the first call in a fresh process of each framework.")] = False,
    as_json: JSON = False,
) -> None:
    """Build and keep what a deployment will need, so that its first request is fast. No GPU is needed.

    Both masks, with and without LSE. Exit code 1 if something could not be built.
    """
    from mla_interop.kernels.build import cache_dir

    configs = [_config(model, gpu, each, heads) for each in dtype.split(",")]
    steps, seen = [], set()
    with progress_bar("looking at what is there", quiet=as_json) as progress:
        for index, config in enumerate(configs):
            for step in _steps(config, backend, jax, torch, within(progress, index / len(configs), (index + 1) / len(configs))):
                if (step.what, step.file, step.why) in seen:
                    continue
                seen.add((step.what, step.file, step.why))
                steps.append(step)
                if not as_json:
                    _print_step(step)
        calls = _first_calls(configs, backend, progress) if first_call else []
    if as_json:
        made = {"cache": str(cache_dir()), "steps": [step.to_dict() for step in steps]}
        print(json.dumps(made | ({"first_calls": [call.to_dict() for call in calls]} if first_call else {}), indent=2))
    else:
        _print_end(steps, calls, cache_dir())
    if any(step.state == "failed" for step in steps) or any(call.why for call in calls):
        raise typer.Exit(NO)


def _config(model: str, gpu: str | None, dtype: str, heads: int | None) -> Any:
    from mla_interop.doctor import target_settings
    from mla_interop.selector_config import MLAPrefillSelectorConfig

    known = model_named(model)
    return MLAPrefillSelectorConfig(dtype=dtype, dimensions=known.dimensions, num_heads=heads or known.num_heads, **target_settings(gpu))


def _steps(config: Any, backend: str | None, jax: bool, torch: bool, progress: Progress) -> Iterator[Any]:
    from mla_interop.backends.registry import parse_names
    from mla_interop.warmup import warm_up

    yield from warm_up(config, parse_names("backend", backend.split(",")) if backend else (), jax=jax, torch=torch, progress=progress)


def _print_step(step: Any) -> None:
    head = plain(f"{step.what:<18} ")
    head.append(step.state, style=_COLOURS[step.state])
    if step.file:
        head.append(f"  {mib(step.bytes)}  {step.seconds:.1f} s")
    screen = console()
    with screen.capture() as said:  # and out by print, above a bar: rich's own would write into its line
        screen.print(head)
        for line in (step.name, step.why):
            if line:
                screen.print(plain(f"  {line}"), style="dim" if line is step.name else "")
    print(said.get(), end="")


def _print_end(steps: list[Any], calls: list[Any], folder: Any) -> None:
    built = [step for step in steps if step.state == "built"]
    there = sum(step.state == "was there" for step in steps)
    seconds = sum(step.seconds for step in steps)
    failed = sum(step.state == "failed" for step in steps)
    screen = console()
    screen.print(
        plain(f"built {len(built)} ({mib(sum(step.bytes for step in built))}), {there} were there, {failed} failed, in {seconds:.1f} s; kept in {folder}")
    )
    for call in calls:
        said = call.why or f"{call.seconds:.2f} s with {call.backend}, after {call.imports:.1f} s of imports"
        screen.print(plain(f"first call of {call.frontend}: {said}"))


def _first_calls(configs: list[Any], backend: str | None, progress: Progress) -> list[Any]:
    import importlib.util

    from mla_interop.capability import device_capability
    from mla_interop.errors import MLAUnavailableError
    from mla_interop.first_call import FRONTENDS
    from mla_interop.first_call import first_call as measure

    made = []
    for config in configs:
        if config.device_type == "cuda" and device_capability("cuda") != config.capability:
            raise MLAUnavailableError(f"--first-call: this machine has no GPU of compute capability {config.capability}; run it where the model will run")
        head_dims = config.dimensions.qk_head_dim, config.dimensions.v_head_dim
        frontends = [frontend for frontend in FRONTENDS if importlib.util.find_spec(frontend.removesuffix("_side")) is not None]
        for frontend in told(frontends, progress, "a first call of {}".format):
            made.append(measure(frontend, config.device_type, config.dtype, config.num_heads, head_dims, backend))
    return made
