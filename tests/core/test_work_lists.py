"""Work lists: made once for a metadata, and taken for a call under another mask only where they are right there."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import mla_interop
from mla_interop.backends.base import Kernel, MLAPrefillBackend
from mla_interop.sequences import PrefillMetadata

CONFIG = mla_interop.MLAPrefillSelectorConfig(
    dtype="bfloat16", dimensions=mla_interop.MLADimensions.from_head_dims(192, 128), num_heads=5, device_type="cpu", num_tokens=40, num_seqs=3
)


class Lists(MLAPrefillBackend):
    """Whose list says which mask it was made for."""

    @classmethod
    def get_name(cls) -> str:
        return "LISTS"

    @classmethod
    def unavailable_reasons(cls) -> list[str]:
        return []

    @classmethod
    def kernels(cls, config: Any) -> tuple[Sequence[Kernel], list[str]]:
        return [], []


def backend(is_causal: bool, plan_by_mask: bool) -> Lists:
    config = replace(CONFIG, is_causal=is_causal)
    kernel = Kernel(
        name=config.kernel_name("LISTS", "v1"),
        kind="compiled",
        make=lambda: None,
        plan=lambda host, rows, heads: np.array([is_causal, rows, heads], np.uint8),
        plan_by_mask=plan_by_mask,
    )
    return Lists(config, kernel)


def test_a_list_by_mask_is_made_for_each() -> None:
    metadata = mla_interop.prepare_metadata([0, 7, 7, 37], num_tokens_q=40)
    causal = backend(True, True).prepare_metadata(metadata)
    assert causal.plan.tolist() == [1, 40, 5] and causal.bounds.plan_for == "LISTS.v1.cpu.192x128.5.causal"
    full = backend(False, True).with_plan(causal)
    assert full.plan.tolist() == [0, 40, 5] and full.bounds.plan_for == "LISTS.v1.cpu.192x128.5.full"
    assert backend(True, True).with_plan(full).plan.tolist() == causal.plan.tolist()


def test_another_list_serves_both() -> None:
    metadata = backend(True, False).prepare_metadata(mla_interop.prepare_metadata([0, 7, 7, 37], num_tokens_q=40))
    assert backend(False, False).with_plan(metadata) is metadata


def test_without_the_lengths_the_refusal_names_both_lists() -> None:
    made = backend(True, True).prepare_metadata(mla_interop.prepare_metadata([0, 7, 7, 37], num_tokens_q=40))
    traced = PrefillMetadata(made.cu_seqlens_q, made.cu_seqlens_k, made.plan, made.bounds)
    assert backend(True, True).with_plan(traced) is traced
    words = r"LISTS needs a work list.* is for LISTS.v1.cpu.192x128.5.causal, this call needs one for LISTS.v1.cpu.192x128.5.full\. .*is_causal="
    with pytest.raises(mla_interop.MLAUnsupportedError, match=words):
        backend(False, True).with_plan(traced)


@pytest.mark.parametrize(("given", "of_config", "asked"), [(None, True, True), (None, False, False), (False, True, False), (True, False, True)])
def test_the_mask_of_a_list_is_that_of_the_calls(given: bool | None, of_config: bool, asked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mla_interop.selector.select", lambda config, names: backend(config.is_causal, True))
    metadata = mla_interop.prepare_metadata([0, 7, 7, 37], num_tokens_q=40, is_causal=given, config=replace(CONFIG, is_causal=of_config))
    assert metadata.plan[0] == asked


@pytest.mark.parametrize("of_config", [True, False])
def test_a_layers_lists_are_for_the_masks_of_its_calls(of_config: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """New tokens attend to themselves under the causal mask, to their context under none."""
    monkeypatch.setattr("mla_interop.selector.select", lambda config, names: backend(config.is_causal, True))
    made = mla_interop.prepare_context_metadata([3, 2], [5, 7], block_table=np.array([[0], [1]]), block_size=8, config=replace(CONFIG, is_causal=of_config))
    assert made.new.plan[0] == 1 and [chunk.plan[0] for chunk in made.chunks] == [0]
