"""How good a policy is that plays: loss, and how many episodes of each game it wins."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from grpo_trainable.config import GRPOConfig
from grpo_trainable.config.built_in_tasks import GAMES
from grpo_trainable.engines.torch_engine import TorchEngine
from grpo_trainable.generator.episodes import EpisodePlayer
from grpo_trainable.models.tokenizer import Tokenizer
from grpo_trainable.models.transformer import TransformerLM
from grpo_trainable.tasks import Score
from grpo_trainable.tasks.prompts import Prompts, build_task
from grpo_trainable.tools.pretraining.corpus import Document, Measurements, encode
from grpo_trainable.tools.pretraining.measuring import described, mean_loss

EPISODES = 1024  # episodes of each game
GROUPS_AT_ONCE = 8  # each has a process
GROUP_SIZE = 32
SAMPLES = 10  # episodes of each game on the card
HOW = {
    "held_out_loss_nats": (
        "mean negative log-likelihood per token after the prompt, what the environment says "
        "included, over {held_out_documents} episodes of other draws"
    ),
    "guess_won": "share of {episodes} episodes that end with the right digit, {sampling}",
    "calculator_won": "share of {episodes} episodes that end with the right product, {sampling}",
}


def measure_games(
    held_out: Sequence[Document], model: TransformerLM, tokenizer: Tokenizer, seed: int
) -> Measurements:
    """The numbers of the card, and episodes to read."""
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
            ("held-out loss", f"{facts['held_out_loss_nats']:.3f} nats a token", next(iter(HOW))),
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
    """The episodes of a game, each as a sample of a card."""
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
