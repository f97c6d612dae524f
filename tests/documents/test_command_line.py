"""docs/command_line.md has every command and every option, in the words of ``--help``, and no other; and its exit codes are those of the code."""

import re
from typing import Any

import pages
import pytest

typer = pytest.importorskip("typer")

from mla_interop import cli  # noqa: E402
from mla_interop.cli import output  # noqa: E402

PAGE = (pages.ROOT / "docs" / "command_line.md").read_text()
SECTIONS = dict(re.findall(r"^##+ `mla-interop ([\w ]+)`\n(.*?)(?=^##+ |\Z)", PAGE, flags=re.DOTALL | re.MULTILINE))


def commands() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, command in typer.main.get_command(cli.app).commands.items():
        inner = getattr(command, "commands", None)
        found |= {f"{name} {each}": sub for each, sub in inner.items()} if inner else {name: command}
    return found


def test_every_command_has_a_section() -> None:
    assert list(SECTIONS) == list(commands())


@pytest.mark.parametrize("name", commands())
def test_a_section_has_the_words_of_the_help(name: str) -> None:
    command, text = commands()[name], SECTIONS[name]
    assert " ".join((command.help or "").split("\n\n")[0].split()) in " ".join(text.split())
    example = (command.epilog or "").removeprefix("Example: ")
    assert example and example in text
    options = [option for option in command.params if option.name != "help"]
    listed = dict(re.findall(r"^\| `([^`]+)` \| (.*) \|$", text, flags=re.MULTILINE))
    wanted = {
        " / ".join([*option.opts, *option.secondary_opts]) if option.param_type_name == "option" else (option.metavar or option.name.upper()): option
        for option in options
    }
    assert list(listed) == list(wanted)
    for flag, option in wanted.items():
        default = f" [default: {option.show_default}]" if isinstance(option.show_default, str) else ""
        assert listed[flag] == " ".join((option.help or "").replace("|", "\\|").split()) + default, flag


def test_json_is_an_option_of_every_command() -> None:
    assert all("--json" in text for text in SECTIONS.values())


def test_exit_codes() -> None:
    codes = {int(code): " ".join(text.split()) for code, text in re.findall(r"^\| (\d) \| (.*) \|$", PAGE, flags=re.MULTILINE)}
    assert list(codes) == [output.OK, output.NO, output.BAD_USE] == [0, 1, 2]
