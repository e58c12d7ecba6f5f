"""The games corpus: random legal play, of which a share makes use of what the environment says.

A document is the first thing that an environment says, and then what a player writes and what it is
told, turn by turn. Most players draw their actions; a share of those who guess listen to the hints,
a share of those who calculate call the calculator, and most of these write down what it says. So
the policy knows the moves and plays them at random, which leaves GRPO the playing. It learns to
predict what environments say too, which does no harm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from random import Random
from typing import Any

from grpo_trainable.environments import Environment
from grpo_trainable.environments.calculator import CALL, Calculator
from grpo_trainable.environments.guess import LARGER, Guess
from grpo_trainable.tasks import CalculatorTask, GuessTask
from grpo_trainable.tools.pretraining.corpus import Corpus, Document
from grpo_trainable.tools.pretraining.games_measures import measure_games
from grpo_trainable.tools.pretraining.recipe import GamesRecipe

HELD_OUT_DOCUMENTS = 1000
TOKENIZER_DOCUMENTS = 2000
LARGEST = 81  # largest answer that is drawn

# What a player does next: of the specification, and of what it was told last (none at first).
Player = Callable[[dict[str, Any], str | None], str]


def games_corpus(recipe: GamesRecipe) -> Corpus:
    """Random play of both games, by turns."""
    documents = list(islice(played(recipe, "corpus"), recipe.steps * recipe.batch_size))
    unseen = list(islice(played(recipe, "held-out"), HELD_OUT_DOCUMENTS))
    texts = [d.prompt + d.response for d in documents[:TOKENIZER_DOCUMENTS]]
    return Corpus(
        documents=documents,
        held_out=unseen,
        tokenizer_texts=texts,
        digits_alone=True,
        settings={"task.name": "guess"},
        measure=partial(measure_games, unseen),
    )


def played(recipe: GamesRecipe, stream: str) -> Iterator[Document]:
    """An endless stream of episodes."""
    rng = Random(f"games {stream} {recipe.seed}")
    while True:
        listens = rng.random() < recipe.listening_share
        yield episode(Guess(), rng.choice(GuessTask.specs), guesser(rng, listens))
        yield episode(Calculator(), rng.choice(CalculatorTask.specs), calculating(rng, recipe))


def episode(environment: Environment, spec: dict[str, Any], player: Player) -> Document:
    """One episode as a text."""
    prompt, told, written = environment.reset(spec), None, ""
    while True:
        action = player(spec, told)
        turn = environment.step(action)
        written += action
        if turn.done:
            return Document(prompt, written)
        told = turn.text
        written += told


def guesser(rng: Random, listens: bool) -> Player:
    """Guesses at random; who listens, among what the hints have left."""
    low, high, last = 0, 9, 0

    def play(spec: dict[str, Any], told: str | None) -> str:
        nonlocal low, high, last
        if listens and told is not None:
            low, high = (last + 1, high) if told == LARGER else (low, last - 1)
        last = rng.randint(low, high)
        return f"{last}\n"

    return play


def calculating(rng: Random, recipe: GamesRecipe) -> Player:
    """Answers at random, or calls the calculator, whose result it may write down."""

    def play(spec: dict[str, Any], told: str | None) -> str:
        if told is None and rng.random() < recipe.calling_share:
            return f"{CALL}{spec['question']}\n"
        if told is not None and rng.random() < recipe.copying_share:
            return told.removeprefix("=")
        return f"{rng.randint(1, LARGEST)}\n"

    return play
