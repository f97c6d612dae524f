"""What holds for every command: help with an example and all defaults, ``--json``, and exit codes for scripts."""

import re
import sys
from typing import Any

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

import typer.main  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from mla_interop import cli  # noqa: E402

# Without a value of its own these say in words what is used.
WORDED = {"backend", "baseline", "context", "device", "dtype", "file", "files", "frameworks", "gpu", "heads", "max_error", "names", "problems", "scale"}


def commands() -> dict[str, Any]:
    """Every command that does something, by the words it is called with."""
    group: Any = typer.main.get_command(cli.app)
    found = {}
    for name, command in group.commands.items():
        found |= {f"{name} {below}": each for below, each in command.commands.items()} if hasattr(command, "commands") else {name: command}
    return found


COMMANDS = commands()


def words(text: str) -> str:
    return " ".join(re.sub(r"[│╭╮╰╯─|]", " ", text).split())


def shown(*arguments: str) -> str:
    result = CliRunner().invoke(cli.app, arguments, env={"COLUMNS": "80", "TERM": "dumb"})
    assert result.exit_code == 0, result.output
    return result.output


def test_there_are_commands() -> None:
    assert set(COMMANDS) == {"demo", "backends", "explain", "warmup", "tune", "bench", "compare", "doctor", "cache list", "cache clear"}


def test_the_exit_codes_are_documented() -> None:
    text = words(shown("--help"))
    assert f"Exit codes: {cli.output.OK}, done; {cli.output.NO}, done and the answer is no" in text and f"{cli.output.BAD_USE}, bad use" in text


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_an_example_and_every_option(name: str) -> None:
    text = shown(*name.split(), "--help")
    assert f"Example: mla-interop {name}" in words(text) and "--json" in text and max(map(len, text.splitlines())) <= 80
    for parameter in COMMANDS[name].params:
        assert parameter.help or parameter.name == "help", f"{parameter.name} has no help"
        if parameter.name in WORDED and parameter.default is None:
            assert isinstance(parameter.show_default, str), f"{parameter.name} does not say what is used without it"
            assert f"[default: ({words(parameter.show_default)})]" in words(text)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_example_can_be_parsed(name: str) -> None:
    """Its options exist, and their values are of the right type; nothing is run."""
    example = COMMANDS[name].epilog.removeprefix("Example: mla-interop ").split()
    assert example[: len(name.split())] == name.split()
    COMMANDS[name].make_context(name, example[len(name.split()) :])


BAD_USES = [
    ["no-such-command"],
    ["--no-such-option"],
    *(([*name.split(), "--no-such-option"]) for name in COMMANDS),
    ["doctor", "too-much"],
    ["backends", "too-much"],
    ["explain", "--heads", "0"],
    ["explain", "--gpu", "riva-128"],
    ["warmup", "--model", "gpt-2"],
    ["warmup", "--gpu", "h200", "--backend", "NONE"],
    ["compare", "--tokens", "3,x"],
    ["compare", "no-such-file.npz", "--device", "cpu"],
    ["cache", "clear", "--older-than", "-1"],
]
BAD_USES_OF_TORCH = [["tune", "--heads", "many"], ["bench", "--device", "cpu", "--problems", "1x1"], ["bench", "--device", "tpu"]]
BAD_PICTURES = [["compare", "--device", "cpu", "--picture", "a.doc"], ["bench", "--device", "cpu", "--picture", "a.doc"]]


@pytest.mark.parametrize("arguments", [*BAD_USES, *BAD_USES_OF_TORCH, *BAD_PICTURES], ids=" ".join)
def test_bad_use_is_code_two(arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    if arguments in BAD_USES_OF_TORCH or arguments in BAD_PICTURES:
        pytest.importorskip("torch")
    if arguments in BAD_PICTURES:
        pytest.importorskip("matplotlib")
    monkeypatch.setattr(sys, "argv", ["mla-interop", *arguments])
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # a command sets it for its process, which is this one
    with pytest.raises(SystemExit) as end:
        cli.main()
    told = capsys.readouterr()
    assert end.value.code == 2 and not told.out and told.err.strip() and "Traceback" not in told.err


def test_a_demo_of_a_dtype_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("torch", "transformers", "matplotlib"):
        pytest.importorskip(module)
    monkeypatch.setattr(sys, "argv", ["mla-interop", "demo", "--dtype", "int8"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2
