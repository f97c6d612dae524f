"""The main job: real text through a layer of a real model, by every path, on two tiny files."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("jax")
pytest.importorskip("transformers")
typer_testing = pytest.importorskip("typer.testing")

from mla_interop.cli import app  # noqa: E402  (after the skips)
from mla_interop.demo.layer import default_files, known_models, read_model, read_texts, take_layer_inputs  # noqa: E402
from mla_interop.demo.paths import float64_reference  # noqa: E402
from mla_interop.demo.run import DTYPES, run_demo  # noqa: E402
from mla_interop.dimensions import MODELS, MLADimensions, softmax_scale  # noqa: E402
from mla_interop.errors import MLAInputError  # noqa: E402

# Rounding of the dtype, with room for the order of sums.
ERRORS = {"float32": (2e-6, 1e-4), "bfloat16": (8e-3, 1e-2)}


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Two texts of unequal length: one shorter than the cut at 64 tokens, one longer."""
    texts = {"short.txt": "Ünïcode is more bytes than letters.", "long.txt": "The quick brown fox jumps over the lazy dog. " * 3}
    for name, text in texts.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    return [tmp_path / name for name in texts]


@pytest.fixture
def small_config(tmp_path: Path) -> Path:
    """The config.json of a small model with other head dimensions than DeepSeek's, as Hugging Face lays it out, nested."""
    fields = dict(
        model_type="some_mla_model", hidden_size=96, num_attention_heads=3, q_lora_rank=48, kv_lora_rank=32, qk_nope_head_dim=64, qk_rope_head_dim=32
    ) | dict(v_head_dim=64, rms_norm_eps=1e-5, max_position_embeddings=4096, rope_theta=10000.0, rope_scaling=None, vocab_size=1000, n_routed_experts=8)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "outer", "text_config": fields}))
    return path


@pytest.mark.parametrize("dtype", ERRORS)
def test_every_path_agrees_with_float64(files: list[Path], tmp_path: Path, dtype: str) -> None:
    report = run_demo(files, output=tmp_path / "out", max_tokens=64, dtype=dtype, device="cpu")
    assert report.lengths == [37, 64]
    assert [path.name for path in report.paths] == ["transformers", "torch_side", "jax_side (jit)"]
    assert report.picture.read_bytes().startswith(b"\x89PNG")
    for path in report.paths:
        assert path.out.shape == (101, 16, 128)
        assert path.out_error < ERRORS[dtype][0], path.name
        assert path.milliseconds > 0
        assert bool(path.backend) == (path.name != "transformers")
        if path.lse is not None:
            assert path.lse.shape == (16, 101)
            assert path.lse_error is not None and path.lse_error < ERRORS[dtype][1], path.name


def test_an_empty_text_is_an_empty_sequence(files: list[Path], small_config: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    report = run_demo([tmp_path / "empty.txt", files[0], tmp_path / "empty.txt"], config=small_config, output=tmp_path / "out", device="cpu")
    assert report.lengths == [0, 37, 0]
    assert all(path.out_error < ERRORS["float32"][0] for path in report.paths)


def test_command_takes_any_config_and_prints_json(files: list[Path], small_config: Path, tmp_path: Path) -> None:
    arguments = ["demo", *map(str, files), "--config", str(small_config), "--output", str(tmp_path / "out"), "--max-tokens", "64", "--json", "--device", "cpu"]
    done = typer_testing.CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert (result["model"], result["num_heads"], result["qk_head_dim"], result["v_head_dim"]) == ("some_mla_model", 3, 96, 64)
    assert [sequence["tokens"] for sequence in result["sequences"]] == [37, 64]
    assert len(result["paths"]) == 3
    assert Path(result["picture"]).exists()


def test_command_prints_a_table_of_at_most_80_columns(files: list[Path], small_config: Path, tmp_path: Path) -> None:
    arguments = ["demo", *map(str, files), "--config", str(small_config), "--output", str(tmp_path), "--max-tokens", "64", "--device", "cpu"]
    done = typer_testing.CliRunner().invoke(app, arguments, catch_exceptions=False)
    lines = done.stdout.splitlines()
    assert all(len(line) <= 80 for line in lines if "/" not in line), done.stdout
    assert "2 texts (of 37, 64 bytes" in done.stdout and "torch_side" in done.stdout and "jax_side" in done.stdout
    table = [line.split() for line in lines if line.startswith((" torch_side", " jax_side", " transformers"))]
    assert [len(row) > 5 for row in table] == [True] * 3 and "Copies: " in done.stdout, "a path is one line"


def test_layer_gives_what_the_model_gives(files: list[Path]) -> None:
    import torch

    _, fields = read_model("deepseek-v2-lite", None)
    inputs = take_layer_inputs(fields, read_texts(files, 64), torch.float32, "cpu", seed=0)
    assert inputs.q.shape == inputs.k.shape == (101, 16, 192)
    # V is a view of the up-projection's output, beside k_nope: the layer's own memory, not a copy.
    assert inputs.v.shape == (101, 16, 128) and inputs.v.stride() == (16 * 256, 256, 1)
    assert inputs.scale == pytest.approx(softmax_scale(fields), rel=1e-12)
    # All heads share the rotary part of k, and positions start anew with each sequence.
    assert torch.equal(inputs.k[:, :1, 128:].expand(-1, 16, -1), inputs.k[:, :, 128:])
    alone = take_layer_inputs(fields, read_texts(files[1:], 64), torch.float32, "cpu", seed=0)
    torch.testing.assert_close(inputs.q[37:], alone.q)
    torch.testing.assert_close(inputs.k[37:], alone.k)


def test_reference_is_right_where_it_can_be_worked_out(rng: np.random.Generator) -> None:
    q, k, v = rng.normal(size=(3, 2, 8)), rng.normal(size=(3, 2, 8)), rng.normal(size=(3, 2, 4))
    out, lse = float64_reference(q, k, v, np.array([0, 2, 3]), scale=0.0)
    np.testing.assert_allclose(out, np.stack([v[0], (v[0] + v[1]) / 2, v[2]]))
    np.testing.assert_allclose(lse, np.broadcast_to(np.log([1.0, 2.0, 1.0]), (2, 3)))


def test_models_have_the_dimensions_of_the_core() -> None:
    for name, fields in known_models().items():
        dimensions = MLADimensions(**{field: fields[field] for field in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")})
        assert (dimensions, fields["num_attention_heads"]) == (MODELS[name].dimensions, MODELS[name].num_heads), name
        assert fields["source"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (dict(model="gpt-2"), "deepseek-v2-lite"),
        (dict(dtype="int8"), "bfloat16"),
        (dict(files=[Path("no such file")]), "no such file"),
    ],
)
def test_wrong_arguments_are_told_in_words(options: dict, text: str, tmp_path: Path) -> None:
    with pytest.raises(MLAInputError, match=text):
        run_demo(**options, output=tmp_path, device="cpu")


def test_a_config_without_mla_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(dict(model_type="llama", hidden_size=64, num_attention_heads=4)))
    with pytest.raises(MLAInputError, match="kv_lora_rank"):
        run_demo(config=tmp_path / "config.json", output=tmp_path, device="cpu")


def test_default_texts_are_the_project_s_own() -> None:
    assert "README.md" in [path.name for path in default_files()]
    assert set(DTYPES) == {"float32", "bfloat16", "float16"}


def test_command_without_its_packages_says_what_to_install() -> None:
    code = "import sys; sys.modules['typer'] = None; from mla_interop.cli import main"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])})
    assert done.returncode == 1
    assert "mla-interop[cli]" in done.stderr
