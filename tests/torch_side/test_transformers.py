"""Whole models of ``transformers`` through this package against the library's eager attention: padding, packing, caches, one token."""

import copy
import importlib
import inspect
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from frontends import waiting_refused

from mla_interop import MLAError
from mla_interop.errors import MLAInputError

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.17")

import torch_side  # noqa: E402
from torch_side import ragged_mask  # noqa: E402

VOCABULARY = 61
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 4096}
# The published geometry of attention: heads cut to 3, layers to 2 (one dense, one of experts), and everything around it made small.
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 40,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "max_position_embeddings": 163840,
    "attention_dropout": 0.0,
    "pad_token_id": None,
    "initializer_range": 0.2,
}
MODELS: dict[str, dict[str, Any]] = {
    "deepseek-v2-lite": {
        "model_type": "deepseek_v2",
        **{"q_lora_rank": None, "kv_lora_rank": 32, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
        "rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3",
        **{"q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
        "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
    "moonlight": {
        "model_type": "deepseek_v3",
        **{"q_lora_rank": None, "kv_lora_rank": 32, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
        "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
    },
    "glm-4.7-flash": {
        "model_type": "glm4_moe_lite",
        **{"q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256},
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "mlp_layer_types": ["dense", "sparse"],
    },
}


def build(name: str, device: str = "cpu", dtype: Any = torch.float32) -> tuple[Any, Any]:
    """The model with the library's eager attention and with ours; the same random weights."""
    torch_side.register_transformers()
    fields = {**SMALL, **MODELS[name]}
    config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    torch.manual_seed(0)
    eager = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="eager").eval()
    ours = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="mla_interop").eval()
    ours.load_state_dict(eager.state_dict())
    return eager.to(device, dtype), ours.to(device, dtype)


@pytest.fixture(scope="module", params=MODELS)
def models(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    return build(request.param)


@pytest.fixture(scope="module")
def small() -> tuple[Any, Any]:
    return build("deepseek-v3")


@pytest.fixture(autouse=True)
def no_grad(request: pytest.FixtureRequest) -> Iterator[None]:
    with torch.set_grad_enabled("grad" in request.node.name):
        yield


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every launch of a kernel: the shapes of q and v, and the cumulative lengths, as the kernel got them."""
    seen: list[Any] = []
    module = importlib.import_module("torch_side.eager")
    monkeypatch.setattr("mla_interop.kernels.torch_op.at_hand", lambda: False)  # what C++ launches nobody sees
    real = module.launch

    def spy(prepared: Any, *rest: Any) -> Any:
        def launch(*arguments: Any) -> Any:
            q, _, v, cu_q, cu_k = arguments[:5]
            seen.append((tuple(q.shape), tuple(v.shape), cu_q.tolist(), cu_k.tolist()))
            return prepared.launch(*arguments)

        assert prepared.runs == "kernel"
        return real(prepared._replace(launch=launch), *rest)

    monkeypatch.setattr(module, "launch", spy)
    return seen


def tokens(*shape: int, seed: int = 1, device: str = "cpu") -> Any:
    return torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed)).to(device)


def padded(side: str, lengths: tuple[int, ...] = (9, 4, 1), width: int = 9) -> Any:
    """A mask ``[B, width]``: tokens on the right (left padding), on the left, or around a hole."""
    mask = torch.zeros(len(lengths), width, dtype=torch.int64)
    for row, length in enumerate(lengths):
        mask[row, width - length :] = 1
    if side == "right":
        mask = mask.flip(1)
    if side == "hole":
        mask[0, 3:6] = 0
    return mask


def same(got: Any, expected: Any, where: Any = None, tolerance: float = 1e-5) -> None:
    """Logits at real tokens, to float32 rounding; what comes out at padding is nobody's."""
    assert got.isfinite().all() and expected.abs().max() > 0.1
    if where is not None:
        got, expected = got[where.bool()], expected[where.bool()]
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


def test_prefill(models: tuple[Any, Any], calls: list[Any]) -> None:
    """Also that the kernel ran: once per layer, on V of its own width, though D is another (the library pads V for flash attention)."""
    eager, ours = models
    ids = tokens(3, 7)
    same(ours(ids).logits, eager(ids).logits)
    config = ours.config
    q_shape, v_shape = (21, 3, config.qk_nope_head_dim + config.qk_rope_head_dim), (21, 3, config.v_head_dim)
    assert calls == [(q_shape, v_shape, [0, 7, 14, 21], [0, 7, 14, 21])] * 2


@pytest.mark.parametrize("side", ["left", "right", "hole"])
def test_a_padded_batch(models: tuple[Any, Any], calls: list[Any], side: str) -> None:
    """Padding reaches no kernel: lengths are those of the real tokens, on either side."""
    eager, ours = models
    ids, mask = tokens(3, 9), padded(side)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    got, expected = (model(ids, attention_mask=mask, position_ids=positions).logits for model in (ours, eager))
    same(got, expected, mask)
    lengths = [0, 6, 10, 11] if side == "hole" else [0, 9, 13, 14]
    assert [call[2:] for call in calls] == [(lengths, lengths)] * 2


def test_rows_of_padding_get_zeros(small: tuple[Any, Any]) -> None:
    ours = small[1]
    mask, outputs = padded("left"), []
    hook = ours.model.layers[0].self_attn.o_proj.register_forward_pre_hook(lambda module, inputs: outputs.append(inputs[0]))
    ours(tokens(3, 9), attention_mask=mask)
    hook.remove()
    assert not outputs[0][~mask.bool()].any() and (outputs[0][mask.bool()].abs().amax(-1) > 0).all()


def test_a_batch_with_a_row_of_padding_alone(small: tuple[Any, Any]) -> None:
    eager, ours = small
    ids, mask = tokens(3, 9), padded("left", (9, 0, 2))
    same(ours(ids, attention_mask=mask).logits, eager(ids, attention_mask=mask).logits, mask)


@pytest.mark.parametrize("batch", [1, 2])
def test_a_packed_batch(models: tuple[Any, Any], calls: list[Any], batch: int) -> None:
    """Positions that start again: sequences do not see each other; each is what it is alone."""
    eager, ours = models
    lengths = (5, 1, 7)
    ids = tokens(batch, sum(lengths))
    positions = torch.cat([torch.arange(n) for n in lengths]).expand(batch, -1)
    got, expected = (model(ids, position_ids=positions, use_cache=False).logits for model in (ours, eager))
    same(got, expected)
    cumulative = [0, 5, 6, 13] if batch == 1 else [0, 5, 6, 13, 18, 19, 26]
    assert [call[2:] for call in calls] == [(cumulative, cumulative)] * 2
    same(got[:1, 6:], eager(ids[:1, 6:]).logits)


@pytest.mark.parametrize("where", ["host", "device"])
def test_lengths_that_come_with_the_inputs(small: tuple[Any, Any], calls: list[Any], where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As data collators give them (``return_flash_attn_kwargs``), here with a cache, where the library does not look at positions."""
    eager, ours = small
    lengths = (5, 1, 7)
    cumulative = torch.tensor([0, 5, 6, 13], dtype=torch.int32)
    prepared = []
    real = torch_side.prepare_metadata
    module = importlib.import_module("torch_side.transformers")
    monkeypatch.setattr(module, "prepare_metadata", lambda *a, **k: (prepared.append(a), real(*a, **k))[1])
    ids, positions = tokens(1, 13), torch.cat([torch.arange(n) for n in lengths])[None]
    given = {"cu_seq_lens_q": cumulative, "cu_seq_lens_k": cumulative, "max_length_q": 7, "max_length_k": 7}
    got = ours(ids, position_ids=positions, use_cache=where == "device", **given).logits
    same(got, eager(ids, position_ids=positions, use_cache=False).logits)
    assert len(prepared) == (where == "device") and [call[2] for call in calls] == [[0, 5, 6, 13]] * 2
    with pytest.raises(MLAInputError, match="cu_seq_lens_q: got a batch of 2 rows"):
        ours(ids.expand(2, -1), position_ids=positions.expand(2, -1), **given)


@pytest.mark.parametrize("side", [None, "left", "right"])
def test_with_a_cache(models: tuple[Any, Any], calls: list[Any], side: str | None) -> None:
    """A prompt in two parts, then two single tokens: fewer queries than keys, aligned at the bottom right."""
    eager, ours = models
    lengths = (13, 8, 7) if side == "left" else (13, 9, 7)
    mask = None if side is None else padded(side, lengths, 13)
    if side == "right":  # a prompt's padding lies before the tokens that follow
        mask[:, 7:] = 1
        mask[1:, 5:7] = 0
    ids = tokens(3, 13)
    steps = ((0, 7), (7, 11), (11, 12), (12, 13))
    results = []
    for model in (ours, eager):
        cache = transformers.DynamicCache(config=model.config)
        name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"  # renamed after 5.17
        parts = []
        for start, stop in steps:
            seen = None if mask is None else mask[:, :stop]
            positions = torch.arange(start, stop)[None] if mask is None else (mask.cumsum(1) - 1).clamp(min=0)[:, start:stop]
            parts.append(model(ids[:, start:stop], attention_mask=seen, position_ids=positions, **{name: cache}).logits)
        results.append(torch.cat(parts, 1))
    same(results[0], results[1], mask)
    if side is None:
        assert [call[2:] for call in calls[-4:]] == [([0, 1, 2, 3], [0, 12, 24, 36])] * 2 + [([0, 1, 2, 3], [0, 13, 26, 39])] * 2
        same(results[0], eager(ids).logits)
    if side == "left":
        assert calls[-1][2:] == ([0, 1, 2, 3], [0, 13, 21, 28])


@pytest.mark.parametrize("cache", [None, "static"])
def test_generate(small: tuple[Any, Any], cache: str | None) -> None:
    """The library's own loop, left padded; with a static cache the keys that are not written yet are cut off."""
    ids, mask = tokens(3, 9), padded("left", (9, 4, 2))
    options = {"max_new_tokens": 5, "do_sample": False, "cache_implementation": cache, "pad_token_id": 0, "eos_token_id": VOCABULARY}
    got, expected = (model.generate(ids, attention_mask=mask, **options) for model in small[::-1])
    assert got.shape == (3, 14) and torch.equal(got, expected)


def test_a_mask_is_read_once_per_forward_pass(small: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers share what the mask function made: one set of metadata, and one set of indices."""
    made, masks = [], []
    real = ragged_mask.prepare_metadata
    monkeypatch.setattr(ragged_mask, "prepare_metadata", lambda *a, **k: (made.append(a), real(*a, **k))[1])
    hooks = [
        layer.self_attn.register_forward_pre_hook(lambda module, args, kwargs: masks.append(kwargs["attention_mask"]), with_kwargs=True)
        for layer in small[1].model.layers
    ]
    small[1](tokens(3, 9), attention_mask=padded("left"))
    for hook in hooks:
        hook.remove()
    assert len(made) == 1 and len(masks) == 2 and masks[0] is masks[1]
    assert {key[0] for key in masks[0].memo} == {"rows_q", "rows_k"}


def test_full_attention_inside_a_sequence() -> None:
    """A decoder made an encoder by its config, as embedding models are."""
    eager, ours = build("deepseek-v3")
    ids, mask = tokens(3, 9), padded("right")
    for model in (eager, ours):
        model.config.is_causal = False
    same(ours(ids, attention_mask=mask).logits, eager(ids, attention_mask=mask).logits, mask)


def test_a_layer_by_itself_without_a_mask(small: tuple[Any, Any]) -> None:
    """Nobody made a mask: the layer says whether it is causal, and a caller may say otherwise."""
    attention = transformers.AttentionInterface()["mla_interop"]
    module = small[1].model.layers[0].self_attn
    q, k, v = (torch.randn(2, 3, rows, dim) for rows, dim in ((4, 192), (9, 192), (9, 128)))
    scores = 0.1 * q @ k.transpose(2, 3)
    below = torch.arange(9)[None, :] <= torch.arange(4)[:, None] + 5
    for is_causal in (None, True, False):
        weights = scores if is_causal is False else scores.masked_fill(~below, -torch.inf)
        out, nothing = attention(module, q, k, v, None, scaling=0.1, is_causal=is_causal)
        assert nothing is None and out.shape == (2, 4, 3, 128)
        torch.testing.assert_close(out, (weights.softmax(-1) @ v).transpose(1, 2), rtol=1e-5, atol=1e-5)


def test_switching_a_model_to_it_and_naming_a_backend(small: tuple[Any, Any]) -> None:
    eager, _ = build("deepseek-v2-lite")
    ids = tokens(2, 6)
    expected = eager(ids).logits
    assert torch_side.register_transformers("mla_reference", backend="reference") == "mla_reference"
    eager.set_attn_implementation("mla_reference")
    same(eager(ids).logits, expected)
    with pytest.raises(MLAInputError, match="backend"):
        torch_side.register_transformers(backend="no such backend")
    for name in ("mla_flash", "", "a|b", "a/b", 3):
        with pytest.raises(MLAInputError, match="^name: got"):
            torch_side.register_transformers(name)  # pyright: ignore[reportArgumentType]


def test_in_grad_mode_it_says_that_it_is_for_inference(small: tuple[Any, Any]) -> None:
    with pytest.raises(MLAInputError, match=r"grad mode.*torch\.no_grad"):
        small[1](tokens(2, 5))


def test_what_cannot_be_served_is_refused(small: tuple[Any, Any]) -> None:
    ours, ids = small[1], tokens(2, 5)
    with pytest.raises(MLAInputError, match="attention_mask: got a mask of shape .*eager"):
        ours(ids, attention_mask=torch.zeros(2, 1, 5, 5))
    with pytest.raises(MLAInputError, match="attention_mask: got 3 columns; allowed: at least 5"):
        ours(ids, attention_mask=torch.ones(2, 3))
    for name, value in (("sliding_window", 3), ("softcap", 30.0), ("s_aux", torch.zeros(3)), ("position_bias", torch.zeros(1))):
        with pytest.raises(MLAInputError, match=f"^{name}: got .*eager"):
            ours(ids, **{name: value})


def test_dropout_in_training_is_refused() -> None:
    _, ours = build("deepseek-v3")
    ours.train()
    for layer in ours.model.layers:
        layer.self_attn.attention_dropout = 0.1
    with pytest.raises(MLAInputError, match=r"^dropout: got 0\.1.*model\.eval"):
        ours(tokens(2, 5))


def test_attention_weights_are_refused(small: tuple[Any, Any]) -> None:
    """By the library where it knows, and by us where it passes the wish on."""
    with pytest.raises((MLAError, ValueError), match="output_attentions|attentions"):
        small[1](tokens(2, 5), output_attentions=True)
    attention = transformers.AttentionInterface()["mla_interop"]
    q = torch.zeros(1, 3, 4, 192)
    with pytest.raises(MLAInputError, match="^output_attentions: got True"):
        attention(torch.nn.Module(), q, q, q[..., :128], None, output_attentions=True)


def over(*functions: Any) -> Any:
    from transformers import masking_utils

    return masking_utils.and_masks(*functions)


def test_masks_that_are_no_packing_are_refused(small: tuple[Any, Any]) -> None:
    """The mask is a function: it is asked, so that a pattern is not taken for a packing."""
    from transformers import masking_utils as m

    blocks = m.or_masks(m.causal_mask_function, m.blockwise_overlay(torch.tensor([[-1, 0, 0, -1, -1, -1]] * 2)))
    for function in (m.sliding_window_causal_mask_function(3), blocks, over(m.causal_mask_function, lambda b, h, q, k: k != 2)):
        with pytest.raises(MLAInputError, match="^mask: got a sliding window, blocks or another pattern.*eager"):
            ragged_mask.ragged_mask(2, 6, 6, mask_function=function)
    with pytest.raises(MLAInputError, match="^mask: got a function of the caller's"):
        ragged_mask.ragged_mask(2, 6, 6, mask_function=m.causal_mask_function, use_vmap=True)
    with pytest.raises(MLAInputError, match="^mask: got keys that start at position 4"):
        ragged_mask.ragged_mask(2, 6, 6, kv_offset=4)
    with pytest.raises(MLAInputError, match="^mask: got a pattern together with padding"):
        ragged_mask.ragged_mask(2, 6, 6, mask_function=m.sliding_window_causal_mask_function(3), attention_mask=torch.ones(2, 6, dtype=torch.bool))


def test_without_the_library_there_is_one_error_and_no_import() -> None:
    statement = (
        "import sys; sys.modules['transformers'] = None; import torch_side, mla_interop.errors as e\n"
        "try: torch_side.register_transformers()\n"
        "except e.MLAUnavailableError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", statement], capture_output=True, text=True, check=True, timeout=240)
    assert done.stdout.startswith("transformers: cannot be imported")


@pytest.mark.gpu
@pytest.mark.parametrize("side", [None, "left", "right"])
def test_on_a_gpu_in_bfloat16(side: str | None, calls: list[Any]) -> None:
    """Against eager in float32, next to eager in bfloat16: no further from the truth than the library itself, give or take half."""
    exact, _ = build("deepseek-v3", "cuda")
    eager, ours = build("deepseek-v3", "cuda", torch.bfloat16)
    exact.load_state_dict(eager.state_dict())
    ids = tokens(3, 40, device="cuda")
    mask = None if side is None else padded(side, (40, 17, 3), 40).cuda()
    where = torch.ones(3, 40, dtype=torch.bool, device="cuda") if mask is None else mask.bool()
    truth = exact(ids, attention_mask=mask).logits[where]
    # An expert that is chosen by a hair is chosen otherwise after rounding: compare typical tokens, not the worst.
    errors = [(model(ids, attention_mask=mask).logits[where].float() - truth).norm(dim=-1).median() / truth.norm(dim=-1).median() for model in (ours, eager)]
    assert len(calls) == 2 and errors[0] < 0.3 and errors[0] <= 1.5 * errors[1]


@pytest.mark.gpu
def test_on_a_gpu_only_the_mask_function_reads_back() -> None:
    _, ours = build("deepseek-v3", "cuda", torch.bfloat16)
    ids, mask = tokens(3, 40, device="cuda"), padded("left", (40, 17, 3), 40).cuda()
    made = ragged_mask.ragged_mask(3, 40, 40, attention_mask=mask)
    attention, module = transformers.AttentionInterface()["mla_interop"], ours.model.layers[0].self_attn
    q, k, v = (torch.randn(3, 3, 40, dim, device="cuda", dtype=torch.bfloat16) for dim in (192, 192, 128))
    expected, _ = attention(module, q, k, v, made)  # copies lengths and indices to the device, and may build a kernel
    with waiting_refused():
        got, _ = attention(module, q, k, v, made)
    assert torch.equal(got, expected) and not got[~mask.bool()].any() and ids.is_cuda
