"""The shipped files: the nouns, the policy, and the claims of the model card."""

from __future__ import annotations

import json
import re
from random import Random

import pytest
import torch

from grpo_trainable.models.directory import SHIPPED_POLICY
from grpo_trainable.models.model_config import PRESETS
from grpo_trainable.models.store import load_policy
from grpo_trainable.tasks.keyword import NOUNS_FILE, read_keywords
from grpo_trainable.tools.pretraining.corpus import encode
from grpo_trainable.tools.pretraining.measuring import CARD_SAMPLES, mean_loss
from grpo_trainable.tools.pretraining.stories import Storyteller


@pytest.fixture(scope="module")
def card() -> dict:
    return json.loads((SHIPPED_POLICY / "card.json").read_text(encoding="utf-8"))


def test_nouns_are_at_least_850_lower_case_words_once_each_in_order():
    lines = NOUNS_FILE.read_text(encoding="utf-8").splitlines()
    assert len(lines) >= 850
    assert lines == sorted(set(lines))
    assert all(re.fullmatch("[a-z]+", line) for line in lines)
    assert read_keywords(NOUNS_FILE) == lines


def test_assets_take_at_most_5_mb():
    files = [path for path in NOUNS_FILE.parent.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 5_000_000


def test_the_shipped_policy_loads_and_is_the_tiny_preset():
    model, tokenizer = load_policy(SHIPPED_POLICY)
    assert model.config == PRESETS["tiny"]
    assert tokenizer.vocab_size == model.config.vocab_size
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


def test_the_card_states_how_the_policy_was_made_and_measured(card: dict):
    assert card["command"].startswith(
        "python launch/pretrain.py --out grpo_trainable/assets/policy"
    )
    assert card["recipe"]["seed"] == card["seed"]
    assert card["tokens_seen"] > card["response_tokens_seen"] > 1_000_000
    for name in ("held_out_loss_nats", "held_out_inclusion_rate", "distinct_trigram_share"):
        assert isinstance(card[name], float)
        assert len(card["measured_how"][name]) > 40
    assert len(card["samples"]) == CARD_SAMPLES == 20
    text = (SHIPPED_POLICY / "card.md").read_text(encoding="utf-8")
    for sample in card["samples"]:
        assert sample["prompt"].strip() in text
        assert sample["response"] in text


def test_the_card_is_within_the_bounds_that_grpo_needs(card: dict):
    assert card["held_out_inclusion_responses"] >= 1000
    assert 0.15 <= card["held_out_inclusion_rate"] <= 0.45
    assert card["finished_share"] >= 0.95
    assert card["held_out_loss_nats"] <= 1.35
    assert card["distinct_trigram_share"] == pytest.approx(
        card["distinct_trigram_share_corpus"], rel=0.2
    )


def test_the_length_of_a_response_does_not_tell_whether_it_holds_its_keyword(card: dict):
    """If stories with their keyword were longer or shorter, length alone could earn reward."""
    length = card["mean_length"]
    for unit in ("tokens", "sentences"):
        assert length["with_keyword"][unit] == pytest.approx(
            length["without_keyword"][unit], rel=0.05
        )
        assert length["all"][unit] == pytest.approx(length["corpus"][unit], rel=0.05)


@pytest.mark.slow
def test_the_shipped_policy_has_about_the_loss_its_card_says(card: dict):
    """Measure on stories from another seed, to check that policy and card belong together."""
    model, tokenizer = load_policy(SHIPPED_POLICY)
    teller = Storyteller(read_keywords(NOUNS_FILE), Random("another seed"))
    stories = [teller.document(card["recipe"]["keyword_share"]) for _ in range(150)]
    rows = [encode(tokenizer, story, model.config.context_length) for story in stories]
    loss = mean_loss(model, rows, tokenizer.pad_id)
    assert loss == pytest.approx(card["held_out_loss_nats"], abs=0.1)
