"""``mla-interop compare``: other people's results from a file against float64, with the faults that they have in practice."""

import json
from pathlib import Path
from typing import Any

import cases
import numpy as np
import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")
pytest.importorskip("ml_dtypes")

import ml_dtypes  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from mla_interop.cli import app  # noqa: E402
from mla_interop.errors import MLAInputError  # noqa: E402
from mla_interop.saved_inputs import read_npz  # noqa: E402

CASE = cases.Case("every-kind", cases.MIXED_Q, cases.MIXED_K, dtype="float32")


def arrays(**changed: Any) -> dict[str, Any]:
    """A problem with empty sequences of every kind, and the oracle's answer, as someone would save it."""
    problem = CASE.problem()
    made = {"q": problem.q, "k": problem.k, "v": problem.v, "cu_seqlens_q": problem.cu_q, "cu_seqlens_k": problem.cu_k}
    return made | {"out": problem.out.astype(np.float32), "lse": problem.lse.astype(np.float32)} | changed


def compare(tmp_path: Path, saved: dict[str, Any], *arguments: str, code: int = 0) -> dict[str, Any]:
    np.savez(tmp_path / "saved.npz", **saved)
    result = CliRunner().invoke(
        app, ["compare", str(tmp_path / "saved.npz"), "--device", "cpu", "--json", "--no-picture", "--backend", "REFERENCE", *arguments]
    )
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def test_results_that_are_right(tmp_path: Path) -> None:
    made = compare(tmp_path, arrays())
    rows = {row["result"]: row for row in made["rows"]}
    assert set(rows) == {"REFERENCE", "file"} and rows["file"]["out error"] < 1e-6 and made["deviating"] == {}


def test_a_base_two_lse_is_found(tmp_path: Path) -> None:
    saved = arrays()
    made = compare(tmp_path, saved | {"lse": saved["lse"] / np.float32(np.log(2))}, code=1)
    assert set(made["deviating"]) == {"file"} and "lse error" in made["deviating"]["file"] and "base 2" in made["deviating"]["file"]


def test_one_wrong_row_is_found_with_its_place(tmp_path: Path) -> None:
    saved = arrays()
    first = int(saved["cu_seqlens_q"][3])
    saved["out"][first + 5, 1] += 0.5
    made = compare(tmp_path, saved, code=1)
    worst = made["worst"][0]
    assert (worst["result"], worst["sequence"], worst["position"], worst["head"]) == ("file", 3, 5, 1) and "out error" in made["deviating"]["file"]
    assert max(made["heads"], key=lambda row: row["file"])["head"] == 1


def test_nan_is_a_deviation_and_json_stays_json(tmp_path: Path) -> None:
    saved = arrays()
    saved["out"][2, 0, 3] = np.nan
    made = compare(tmp_path, saved, code=1)
    assert made["worst"][0]["error"] == "inf" and "1 rows with NaN" in made["deviating"]["file"]


def test_the_file_as_baseline_and_a_limit_of_one_s_own(tmp_path: Path) -> None:
    saved = arrays()
    saved["out"] *= np.float32(1.001)
    assert compare(tmp_path, saved, code=1)["deviating"].keys() == {"file"}
    assert compare(tmp_path, saved, "--max-error", "0.01")["deviating"] == {}
    made = compare(tmp_path, saved, "--baseline", "file", code=1)
    assert [row["result"] for row in made["rows"]] == ["REFERENCE"] and made["baseline"] == "file"


@pytest.mark.parametrize("encoding", ["float32", "uint16", "int16", "void16"])
def test_bfloat16_in_each_accepted_encoding(encoding: str, tmp_path: Path) -> None:
    rounded = {name: arrays()[name].astype(ml_dtypes.bfloat16) for name in "qkv"}
    if encoding == "float32":
        stored, arguments = {name: x.astype(np.float32) for name, x in rounded.items()}, ("--dtype", "bfloat16")
    else:
        stored, arguments = {name: x if encoding == "void16" else x.view(encoding) for name, x in rounded.items()}, ("--bf16",)
    lengths = {name: arrays()[name] for name in ("cu_seqlens_q", "cu_seqlens_k")}
    made = compare(tmp_path, stored | lengths, *arguments)
    given = read_npz(tmp_path / "saved.npz", "bfloat16" if encoding == "float32" else None, encoding != "float32")
    for name, array in zip("qkv", given.arrays("cpu")):
        values = array.float().numpy() if hasattr(array, "float") else np.asarray(array)
        assert np.array_equal(values.astype(np.float32), rounded[name].astype(np.float32), equal_nan=True)
    assert "bfloat16" in made["title"] and 1e-4 < made["rows"][0]["out error"] < 3e-3


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"q": np.zeros((60, 3, 192), np.uint16)}, "q: got dtype uint16; allowed: float32, float16, float64, .*--bf16"),
        ({"q": np.zeros((60, 3, 192), np.int64)}, "q: got dtype int64"),
        ({"o": np.zeros(3)}, "got arrays .*o; allowed: q, k, v, and cu_seqlens"),
        ({"cu_seqlens": np.zeros(3)}, "got cu_seqlens and cu_seqlens_q; allowed: one of the two"),
        ({"k": np.zeros((99, 3, 192), np.float16)}, "q, k and v of float16, float32; allowed: one dtype"),
        ({"lse": np.zeros((60, 3), np.float32)}, "lse: got shape"),
    ],
)
def test_files_that_hold_something_else(changed: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(MLAInputError, match=text):
        compare(tmp_path, arrays(**changed))


@pytest.mark.parametrize("content", [b"", b"no archive", b"PK\x03\x04 cut"])
def test_files_that_are_none(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.npz").write_bytes(content)
    with pytest.raises(MLAInputError, match=r"a.npz: cannot be read as .npz .*numpy.savez"):
        read_npz(tmp_path / "a.npz")
    with pytest.raises(MLAInputError, match="cannot be read"):
        read_npz(tmp_path / "none.npz")


def test_pickles_are_not_opened(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", q=np.array([{}], dtype=object))
    with pytest.raises(MLAInputError, match="cannot be read"):
        read_npz(tmp_path / "a.npz")


def test_what_people_see_fits_80_columns_with_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    arguments = ["compare", "--device", "cpu", "--heads", "3", "--tokens", "5,0,9", "--context", "2,4,0", "--picture", str(tmp_path / "new" / "a.png")]
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 0, shown.output
    lines = [line for line in shown.stdout.splitlines() if not line.startswith("picture: ")]
    assert max(map(len, lines)) <= 80 and (tmp_path / "new" / "a.png").read_bytes()[:4] == b"\x89PNG"
    assert "14 tokens in 3 sequences, 3 heads of 192/128" in " ".join(shown.stdout.split()) and "rows that differ most" in shown.stdout
    assert "Nothing deviates" in shown.stdout


@pytest.mark.parametrize("arguments", [["--tokens", "3,x"], ["--context", "1"], ["--dtype", "int8"], ["--device", "tpu"], ["--model", "gpt-2"]])
def test_bad_arguments_are_told_in_words(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, ["compare", "--no-picture", *arguments])
    assert isinstance(result.exception, MLAInputError)
