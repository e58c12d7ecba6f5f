"""The policy that plays at random, and its corpus."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import islice
from random import Random

from grpo_trainable.environments.guess import Guess
from grpo_trainable.models.directory import GAMES_POLICY
from grpo_trainable.models.model_config import PRESETS
from grpo_trainable.models.store import load_policy
from grpo_trainable.tools.pretraining.games_corpus import episode, guesser, played
from grpo_trainable.tools.pretraining.recipe import GamesRecipe


def test_the_policy_has_the_shape_of_its_preset_and_a_card_with_its_recipe():
    model, tokenizer = load_policy(GAMES_POLICY)
    assert model.config == replace(PRESETS["games"], vocab_size=tokenizer.vocab_size)
    card = json.loads((GAMES_POLICY / "card.json").read_text())
    assert card["command"] == (
        "python launch/pretrain.py --corpus games --out grpo_trainable/assets/games"
    )
    assert card["recipe"] == GamesRecipe().__dict__
    assert 0.2 < card["guess_won"] < 0.35
    assert 0.05 < card["calculator_won"] < 0.2


def test_what_is_said_is_the_same_tokens_by_itself_and_within_an_episode():
    """If a trial encoded a line differently, the policy would get tokens it was not trained on."""
    _, tokenizer = load_policy(GAMES_POLICY)
    for document in islice(played(GamesRecipe(), "another stream"), 50):
        lines = document.response.splitlines(keepends=True)
        by_itself = [token for line in lines for token in tokenizer.encode(line)]
        assert tokenizer.encode(document.response) == by_itself


def test_who_listens_wins_more_often():
    won = dict.fromkeys((False, True), 0)
    for listens in won:
        rng = Random(5)
        for number in range(600):
            secret = number % 10
            document = episode(Guess(), {"secret": secret}, guesser(rng, listens))
            won[listens] += document.response.endswith(f"{secret}\n")
    # Chance finds the number with probability 1 − 0.9³ = 0.271.
    assert 0.2 < won[False] / 600 < 0.34
    assert won[True] / 600 > 0.36


def test_a_corpus_follows_from_its_seed():
    one, other = (list(islice(played(GamesRecipe(), "corpus"), 20)) for _ in range(2))
    assert one == other
    assert one != list(islice(played(GamesRecipe(seed=1), "corpus"), 20))
