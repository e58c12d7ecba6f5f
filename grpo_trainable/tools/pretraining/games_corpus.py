"""The games corpus: random legal play, in which some players use the environment's answers.

The prompt of a document is the first observation. The response is the rest of the episode, actions
and answers in turn. Most players draw random actions. A share of the guessing players follow the
hints. A share of the calculating players call the calculator, and most of these copy its result.
The policy therefore knows the legal moves but plays at random, and GRPO can teach good play. The
policy also learns to predict the environments' answers, which does no harm.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from random import Random
from typing import Any

from grpo_trainable.config import GRPOConfig
from grpo_trainable.config.built_in_tasks import GAMES
from grpo_trainable.engines.torch_engine import TorchEngine
from grpo_trainable.environments import Environment
from grpo_trainable.environments.calculator import CALL, Calculator
from grpo_trainable.environments.guess import LARGER, Guess
from grpo_trainable.generator.episodes import EpisodePlayer
from grpo_trainable.models.tokenizer import Tokenizer
from grpo_trainable.models.transformer import TransformerLM
from grpo_trainable.tasks import CalculatorTask, GuessTask, Score
from grpo_trainable.tasks.prompts import Prompts, build_task
from grpo_trainable.tools.pretraining.corpus import Corpus, Document, Measurements, encode
from grpo_trainable.tools.pretraining.measuring import described, mean_loss
from grpo_trainable.tools.pretraining.recipe import GamesRecipe

HELD_OUT_DOCUMENTS = 1000
TOKENIZER_DOCUMENTS = 2000
LARGEST = 81  # largest random answer

# Returns the next action, given the specification and the last answer (None at first).
Player = Callable[[dict[str, Any], str | None], str]


def games_corpus(recipe: GamesRecipe) -> Corpus:
    """Generate a corpus of random play that alternates between the two games."""
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
    """Yield an endless stream of episodes."""
    rng = Random(f"games {stream} {recipe.seed}")
    while True:
        listens = rng.random() < recipe.listening_share
        yield episode(Guess(), rng.choice(GuessTask.specs), guesser(rng, listens))
        yield episode(Calculator(), rng.choice(CalculatorTask.specs), calculating(rng, recipe))


def episode(environment: Environment, spec: dict[str, Any], player: Player) -> Document:
    """Play one episode and return its text."""
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
    """Return a player that guesses at random. If `listens`, its guesses agree with the hints."""
    low, high, last = 0, 9, 0

    def play(spec: dict[str, Any], told: str | None) -> str:
        nonlocal low, high, last
        if listens and told is not None:
            low, high = (last + 1, high) if told == LARGER else (low, last - 1)
        last = rng.randint(low, high)
        return f"{last}\n"

    return play


def calculating(rng: Random, recipe: GamesRecipe) -> Player:
    """Return a player that answers at random, or calls the calculator and may use its result."""

    def play(spec: dict[str, Any], told: str | None) -> str:
        if told is None and rng.random() < recipe.calling_share:
            return f"{CALL}{spec['question']}\n"
        if told is not None and rng.random() < recipe.copying_share:
            return told.removeprefix("=")
        return f"{rng.randint(1, LARGEST)}\n"

    return play


# ---- Measurements of a policy: loss, and the share of episodes won in each game ------------------


EPISODES = 1024  # episodes of each game that are measured
GROUPS_AT_ONCE = 8  # each group needs a process
GROUP_SIZE = 32
SAMPLES = 10  # episodes of each game shown on the model card
HOW = {
    "held_out_loss_nats": (
        "mean negative log-likelihood per token after the prompt, the environment's answers "
        "included, over {held_out_documents} episodes generated from other random draws"
    ),
    "guess_won": "share of {episodes} episodes that end with the right digit, {sampling}",
    "calculator_won": "share of {episodes} episodes that end with the right product, {sampling}",
}


def measure_games(
    held_out: Sequence[Document], model: TransformerLM, tokenizer: Tokenizer, seed: int
) -> Measurements:
    """Measure a policy for its model card, and collect sample episodes."""
    rows = [encode(tokenizer, document, model.config.context_length) for document in held_out]
    configs = {game: GRPOConfig.from_dict(_settings(game, seed)) for game in GAMES}
    played = {game: _play(config, model, tokenizer) for game, config in configs.items()}
    won = {game: statistics.mean(own["reward"] for own in played[game]) for game in GAMES}
    facts: dict[str, Any] = {
        "held_out_loss_nats": mean_loss(model, rows, tokenizer.pad_id),
        "held_out_documents": len(rows),
        "episodes": EPISODES,
        **{f"{game}_won": share for game, share in won.items()},
        "samples": [sample for game in GAMES for sample in played[game][:SAMPLES]],
    }
    prompts = Prompts(configs["guess"], build_task(configs["guess"]), tokenizer)
    sampling = described(prompts.request("eval", 0).limits)
    return Measurements(
        facts=facts,
        how={name: how.format(**facts, sampling=sampling) for name, how in HOW.items()},
        rows=[
            ("held-out loss", f"{facts['held_out_loss_nats']:.3f} nats/token", next(iter(HOW))),
            *((f"{game}: episodes won", f"{won[game]:.3f}", f"{game}_won") for game in GAMES),
        ],
        sampling=sampling,
        headline="episodes won: "
        + ", ".join(f"{share:.3f} of {game}" for game, share in won.items()),
    )


def _settings(game: str, seed: int) -> dict[str, Any]:
    samples = {"prompts": EPISODES // GROUP_SIZE, "samples": GROUP_SIZE}
    return {"seed": seed, "task": {"name": game}, "eval": samples}


def _play(config: GRPOConfig, model: TransformerLM, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Play episodes of a game, and return them as samples for the model card."""
    prompts = Prompts(config, build_task(config), tokenizer)
    engine = TorchEngine(model, tokenizer, seed=config.seed)
    player = EpisodePlayer(config.env, prompts, tokenizer)
    episodes = []
    try:
        for first in range(0, config.eval.prompts, GROUPS_AT_ONCE):
            indices = range(first, min(first + GROUPS_AT_ONCE, config.eval.prompts))
            requests = [prompts.request("eval", index) for index in indices]
            groups, scores = player.play(engine, requests, lambda: None)
            for group, own in zip(groups, scores, strict=True):
                for g, (ids, score) in enumerate(zip(group.responses(), own, strict=True)):
                    assert isinstance(score, Score), score
                    episodes.append(
                        {
                            "prompt": prompts.text("eval", group.prompt_index),
                            "response": tokenizer.decode(ids),
                            "finished": bool(group.finished[g]),
                            "reward": score.reward,
                        }
                    )
    finally:
        player.close()
    return episodes
