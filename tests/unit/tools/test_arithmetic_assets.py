"""The shipped arithmetic policy, its problems, and the claims of its model card."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import islice

import pytest
import torch

from grpo_trainable.config import GRPOConfig
from grpo_trainable.models.directory import ARITHMETIC_POLICY
from grpo_trainable.models.model_config import PRESETS
from grpo_trainable.models.store import load_policy
from grpo_trainable.tasks.prompts import build_task
from grpo_trainable.tools.pretraining.arithmetic_corpus import (
    arithmetic_documents,
    as_jsonl,
    held_out_problems,
    train_problems,
)
from grpo_trainable.tools.pretraining.corpus import encode
from grpo_trainable.tools.pretraining.measuring import CARD_SAMPLES, mean_loss
from grpo_trainable.tools.pretraining.recipe import ArithmeticRecipe


@pytest.fixture(scope="module")
def card() -> dict:
    return json.loads((ARITHMETIC_POLICY / "card.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def recipe(card: dict) -> ArithmeticRecipe:
    return ArithmeticRecipe(**card["recipe"])


def questions(name: str) -> list[str]:
    lines = (ARITHMETIC_POLICY / name).read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["question"] for line in lines]


def test_the_policy_loads_and_has_the_shape_of_its_preset():
    model, tokenizer = load_policy(ARITHMETIC_POLICY)
    assert model.config == replace(PRESETS["arithmetic"], vocab_size=tokenizer.vocab_size)
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    assert len(tokenizer.encode("2026")) == 4


def test_it_was_made_by_the_default_recipe(card: dict, recipe: ArithmeticRecipe):
    assert recipe == ArithmeticRecipe()
    assert card["command"] == (
        "python launch/pretrain.py --corpus arithmetic --out grpo_trainable/assets/arithmetic"
    )


@pytest.mark.slow
def test_the_problems_are_those_of_its_recipe(recipe: ArithmeticRecipe):
    made = {"train.jsonl": train_problems(recipe), "heldout.jsonl": held_out_problems(recipe)}
    for name, problems in made.items():
        assert (ARITHMETIC_POLICY / name).read_text(encoding="utf-8") == as_jsonl(problems)


@pytest.mark.slow
def test_no_held_out_question_is_trained_on(recipe: ArithmeticRecipe):
    held_out = set(questions("heldout.jsonl"))
    assert len(held_out) >= 512
    assert held_out.isdisjoint(questions("train.jsonl"))
    documents = islice(arithmetic_documents(recipe, "corpus", 0, held_out=False), 5000)
    asked = {d.prompt.removeprefix("User: ").partition("\n")[0] for d in documents}
    assert held_out.isdisjoint(asked)


@pytest.mark.slow
def test_a_trial_of_the_math_task_asks_them_without_any_setting():
    task = build_task(GRPOConfig.from_dict({"task": {"name": "math"}}))
    example = task.eval_examples(1)[0]
    question = str(example.prompt).removeprefix("User: ").removesuffix("\nAssistant: <think>")
    assert question in questions("heldout.jsonl")
    right = f" So. </think> <answer>{example.ground_truth}</answer>"
    assert task.reward(right, example.ground_truth).reward == 1.0


@pytest.mark.slow
def test_every_prompt_fits_beside_a_response():
    config = GRPOConfig.from_dict({"task": {"name": "math"}})
    task = build_task(config)
    model, tokenizer = load_policy(ARITHMETIC_POLICY)
    prompts = [str(example.prompt) for example in task.eval_examples(768)]
    longest = max(len(tokenizer.encode(prompt)) for prompt in prompts)
    assert longest + config.rollout.max_new_tokens <= model.config.context_length


def test_the_card_is_within_the_bounds_that_grpo_needs(card: dict):
    assert card["responses"] >= 2000
    assert 0.25 <= card["right_share"] <= 0.45
    assert 0.6 <= card["format_share"] <= 0.8
    assert card["mixed_share"] >= 0.6
    assert card["finished_share"] >= 0.99
    assert len(card["samples"]) == CARD_SAMPLES


def test_the_length_of_a_response_does_not_tell_whether_it_is_right(card: dict):
    """If right responses were longer or shorter, a policy could earn reward by length alone."""
    length = card["mean_length"]
    assert length["right"]["tokens"] == pytest.approx(length["wrong"]["tokens"], rel=0.1)
    assert length["all"]["tokens"] == pytest.approx(length["corpus"]["tokens"], rel=0.05)


def test_the_card_is_also_there_to_read(card: dict):
    text = (ARITHMETIC_POLICY / "card.md").read_text(encoding="utf-8")
    for sample in card["samples"]:
        assert sample["prompt"].strip() in text
        assert sample["response"] in text


@pytest.mark.slow
def test_the_policy_has_about_the_loss_its_card_says(card: dict, recipe: ArithmeticRecipe):
    """Measure on documents from another seed, to check that policy and card belong together."""
    model, tokenizer = load_policy(ARITHMETIC_POLICY)
    documents = arithmetic_documents(recipe, "another stream", 0, held_out=True)
    rows = [encode(tokenizer, d, model.config.context_length) for d in islice(documents, 200)]
    loss = mean_loss(model, rows, tokenizer.pad_id)
    assert loss == pytest.approx(card["held_out_loss_nats"], abs=0.05)
