"""Text generation as a Gymnasium environment: episodes are responses, and actions are tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import gymnasium  # pyright: ignore[reportMissingImports]
import numpy as np
import torch

from grpo_trainable.config import ConfigError, GRPOConfig, flatten
from grpo_trainable.generator.scorer import Scorer, make_scorer
from grpo_trainable.models.directory import policy_shape, policy_tokenizer
from grpo_trainable.models.stop_strings import StopStrings, stops_of
from grpo_trainable.protocol.rollout import SamplingLimits
from grpo_trainable.rllib.module import NO_TOKEN, token_spaces
from grpo_trainable.tasks import RewardError
from grpo_trainable.tasks.prompts import Prompts, build_task
from grpo_trainable.tasks.task import weighted
from grpo_trainable.trial import resolved

# Settings of a trial that are read by the environment, or by the `LanguageModel` that acts in it.
READ = ("model", "task", "seed", "rollout.max_new_tokens", "rollout.stop", "rollout.temperature")

PROMPTS = 1 << 20  # an episode draws one of the first PROMPTS prompts of the training stream


@dataclass(frozen=True)
class World:
    """Objects that the environments of one process share if their settings are the same."""

    prompts: Prompts
    scorer: Scorer
    stops: StopStrings | None
    limits: SamplingLimits
    part_weights: Mapping[str, float]


class TokenEnv(gymnasium.Env):
    """The task of a trial as an environment, for any algorithm that trains in environments.

    An observation is (context_length,) int32: the token ids of the prompt and of the response so
    far, then −1. An action is the id of the next token. The last action gets the reward of the
    response, and all other actions get 0. A response ends where it would end in a trial: at an end
    id, a stop string or `rollout.max_new_tokens`.

    Args:
        config: Nested settings of a trial. Only `model`, `task` and `seed` may be set, and in
            `rollout` only `max_new_tokens`, `stop` and `temperature`.

    Raises:
        ConfigError: A setting is invalid, or has no effect in this environment.
        RuntimeError: A response could not be scored.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 - as in gymnasium.Env

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        settings = _settings(config or {})
        shape = policy_shape(settings.model)
        self.observation_space, self.action_space = token_spaces(shape)
        self._world = _world(settings)
        self._context_length = shape.context_length
        self._index = 0
        self._prompt: Sequence[int] = ()
        self._response: list[int] = []

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Begin a response to a random prompt, or to the prompt `options["prompt_index"]`.

        Prompt indices have the same meaning as in a trial.

        Raises:
            ConfigError: The prompt plus the longest response exceeds the model's context.
        """
        super().reset(seed=seed)
        drawn = int(self.np_random.integers(PROMPTS))
        self._index = int((options or {}).get("prompt_index", drawn))
        self._prompt = self._world.prompts.request("train", self._index).prompt_ids
        self._response = []
        longest = len(self._prompt) + self._world.limits.max_new_tokens
        if longest > self._context_length:
            raise ConfigError(
                f"rollout.max_new_tokens={self._world.limits.max_new_tokens}: prompt "
                f"{self._index} and its response need {longest} tokens, but the model's context "
                f"has {self._context_length}"
            )
        return self._observation(), {"prompt_index": self._index}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Append a token to the response.

        A response that is cut off also gets its reward, so its episode ends as terminated, not as
        truncated.
        """
        self._response.append(int(action))
        ended = self._ended()
        return self._observation(), self._reward() if ended else 0.0, ended, False, {}

    def _observation(self) -> np.ndarray:
        tokens = np.full(self._context_length, NO_TOKEN, np.int32)
        ids = [*self._prompt, *self._response]
        tokens[: len(ids)] = ids
        return tokens

    def _ended(self) -> bool:
        limits, stops = self._world.limits, self._world.stops
        return (
            self._response[-1] in limits.end_ids
            or len(self._response) >= limits.max_new_tokens
            or (stops is not None and stops.completed(self._response))
        )

    def _reward(self) -> float:
        request = self._world.prompts.score_request("train", self._index, self._response)
        (score,) = self._world.scorer.score([request])
        score = weighted(score, self._world.part_weights)
        if isinstance(score, RewardError):
            raise RuntimeError(f"the reward failed on prompt {self._index}: {score.message}")
        return score.reward


def _settings(config: Mapping[str, Any]) -> GRPOConfig:
    for key in flatten(config):
        if key not in READ and key.partition(".")[0] not in READ:
            raise ConfigError(
                f"{key}: has no effect in TokenEnv, which reads only {', '.join(READ)}"
            )
    return resolved(config)


@lru_cache(maxsize=4)
def _world(settings: GRPOConfig) -> World:
    tokenizer = policy_tokenizer(settings.model)
    task = build_task(settings)
    prompts = Prompts(settings, task, tokenizer)
    limits = prompts.request("train", 0).limits
    vocab_size = policy_shape(settings.model).vocab_size
    return World(
        prompts=prompts,
        scorer=make_scorer(settings, task),
        stops=stops_of(limits.stop_strings, tokenizer, vocab_size, torch.device("cpu")),
        limits=limits,
        part_weights=settings.task.part_weights,
    )
