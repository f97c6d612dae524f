"""What a deployment's first request waits for on a GPU: from a warm cache, and from an empty one."""

import importlib.util
import json
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

from typer.testing import CliRunner  # noqa: E402

from mla_interop.cli import app  # noqa: E402
from mla_interop.first_call import FRONTENDS, first_call  # noqa: E402

pytestmark = pytest.mark.gpu
WARM_S, COLD_S = 1.5, 10.0
PROBLEM = ("cuda", "bfloat16", 16, (192, 128))


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_a_first_call_from_a_warm_cache_is_quick(frontend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec(frontend.removesuffix("_side")) is None:
        pytest.skip(f"{frontend}'s framework is not installed")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    result = CliRunner().invoke(app, ["warmup", "--model", "deepseek-v3", "--backend", "FLASH_ATTN", "--json"])
    assert result.exit_code == 0, result.output
    assert {step["state"] for step in json.loads(result.stdout)["steps"]} <= {"built", "was there"}
    calls = [first_call(frontend, *PROBLEM, "FLASH_ATTN") for _ in range(2)]  # the first one reads files that the disk has not had for long
    assert not any(call.why for call in calls), calls
    assert min(call.seconds for call in calls) <= WARM_S, calls


@pytest.mark.slow
def test_a_first_call_from_an_empty_cache_ends_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setenv("MLA_INTEROP_CACHE", str(tmp_path))
    call = first_call("torch_side", *PROBLEM, "FLASH_ATTN")
    assert not call.why and call.seconds <= COLD_S and call.backend.startswith("FLASH_ATTN."), call
