"""The engine `control`: a small policy that acts in several Gymnasium environments in parallel.

The environments run in the generator's process, all on one thread, because a renderer belongs to
one thread. If an environment fails, only its own group is lost. An environment that hangs is
detected in the same way as a generator that hangs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grpo_trainable.control.policy import ControlPolicy, build_control_policy
from grpo_trainable.control.spaces import episode_seed, make_environment
from grpo_trainable.engines.engine import EngineSetup
from grpo_trainable.engines.loaded_weights import LoadedWeights
from grpo_trainable.engines.local import common_limits
from grpo_trainable.engines.recorded import RecordedRow, as_group
from grpo_trainable.environments.environment import add_info, mean_info, numbers_in
from grpo_trainable.models.sampling import uniforms
from grpo_trainable.plugins import one_line
from grpo_trainable.protocol.rollout import Request, RolloutGroup
from grpo_trainable.tasks import RewardError, Score, as_score

Scores = list[Score | RewardError]


@dataclass(kw_only=True)
class _Episode(RecordedRow):
    """A response in progress. The lists have one entry per action."""

    env: Any
    uniforms: np.ndarray  # (maximum number of actions, components per action)
    observation: np.ndarray  # observation before the next action
    observations: list[np.ndarray] = field(default_factory=list)
    actions: list[Tensor] = field(default_factory=list)  # (A,) each; only for continuous actions
    rewards: list[float] = field(default_factory=list)
    # The numbers in the environment's `info`, each summed over the actions.
    info: dict[str, float] = field(default_factory=dict)
    over: bool = False
    error: str | None = None  # the error that ended the episode

    def begin(self, seed: int) -> None:
        """Reset the environment and store its first observation."""
        try:
            self.observation = self._seen(self.env.reset(seed=seed)[0])
        except Exception as error:  # a user's environment may raise anything
            self.error = f"reset: {one_line(error)}"

    def act(self, action: Any) -> None:
        """Take an action in the environment and record its reward."""
        self.observations.append(self.observation)
        reward = 0.0
        try:
            if self.error is None:
                observation, reward, ended, cut, info = self.env.step(action)
                add_info(self.info, numbers_in(info))
                self.observation, self.finished = self._seen(observation), bool(ended or cut)
        except Exception as error:
            self.error = f"step {len(self.observations)}: {one_line(error)}"
        self.rewards.append(float(reward))
        self.over = self.finished or self.error is not None

    def _seen(self, observation: Any) -> np.ndarray:
        seen = np.asarray(observation)
        if seen.shape != self.observation.shape:
            raise ValueError(
                f"an observation has the shape {seen.shape}, but its space has the shape "
                f"{self.observation.shape}"
            )
        # An environment may write the next observation into the same memory.
        return np.array(seen, dtype=self.observation.dtype)

    def score(self) -> Score | RewardError:
        """Return the sum of the rewards as a score, or the error that ended the episode."""
        if self.error is not None:
            return RewardError(f"environment: {self.error}")
        try:
            return as_score(sum(self.rewards))
        except ValueError as error:
            return RewardError(f"environment: {error}")


class ControlEngine(LoadedWeights):
    """An engine that samples episodes of actions. It draws actions as other engines draw tokens.

    If the environment is deterministic, then on one machine the same list of requests gives the
    same bits in every process with the same number of threads.
    """

    def __init__(
        self, policy: ControlPolicy, env: str, *, seed: int, pad_id: int, device: torch.device
    ) -> None:
        """Prepare to sample.

        Args:
            policy: The policy that acts.
            env: Name of the environment, for `make_environment`.
            seed: Seed of the trial.
            pad_id: Token id that pads the responses.
            device: Device of the policy.
        """
        super().__init__(policy)
        self._policy, self._env, self._seed = policy, env, seed
        self._pad_id, self._device = pad_id, device
        self._envs: list[Any] = []  # reused by later calls
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="environments")
        image = policy.spaces.is_image and policy.spaces.scale != 1.0
        self._nothing = np.zeros(policy.spaces.observation, np.uint8 if image else np.float32)

    def generate(
        self, requests: Sequence[Request], between_tokens: Callable[[], None]
    ) -> list[RolloutGroup]:
        """Return a group of episodes for each request, without scores."""
        return self.earn(requests, between_tokens)[0]

    @torch.no_grad()
    def earn(
        self, requests: Sequence[Request], between_tokens: Callable[[], None]
    ) -> tuple[list[RolloutGroup], list[Scores]]:
        """Return a group of episodes for each request, and the scores of all episodes.

        The groups contain a reward for each action.
        """
        limits = common_limits(requests)
        episodes = self._thread.submit(self._begun, requests, limits.max_new_tokens).result()
        for step in range(limits.max_new_tokens):
            acting = [episode for episode in episodes if not episode.over]
            if not acting:
                break
            between_tokens()
            self._act(acting, step, limits.temperature)
        groups, scores = [], []
        for request in requests:
            own, episodes = episodes[: request.group_size], episodes[request.group_size :]
            groups.append(self._group(request, own))
            scores.append([episode.score() for episode in own])
        return groups, scores

    def _act(self, acting: Sequence[_Episode], step: int, temperature: float) -> None:
        seen = torch.from_numpy(np.stack([episode.observation for episode in acting]))
        uniform = torch.from_numpy(np.stack([episode.uniforms[step] for episode in acting]))
        actions, log_probs = self._policy.act(
            seen.to(self._device), uniform.to(self._device), temperature
        )
        given = self._policy.in_environment(actions.cpu()).numpy()
        tokens = [0] * len(acting) if actions.ndim > 1 else actions.tolist()
        told = zip(acting, tokens, log_probs.tolist(), actions.cpu(), strict=True)
        for episode, token, log_prob, action in told:
            episode.add(token, log_prob, self._version, self._round)
            if actions.ndim > 1:
                episode.actions.append(action)
        self._thread.submit(_act_all, acting, given).result()

    def _begun(self, requests: Sequence[Request], most: int) -> list[_Episode]:
        numbers = self._policy.spaces.action_numbers or 1
        while len(self._envs) < sum(request.group_size for request in requests):
            self._envs.append(make_environment(self._env))
        envs, begun = iter(self._envs), []
        for request in requests:
            seed = episode_seed(request.stream, request.example)
            for response in range(request.group_size):
                key = self._seed, request.stream, request.prompt_index, response
                episode = _Episode(
                    env=next(envs),
                    uniforms=uniforms(*key, most * numbers).reshape(most, numbers),
                    observation=self._nothing,
                )
                episode.begin(seed)
                begun.append(episode)
        return begun

    def _group(self, request: Request, episodes: Sequence[_Episode]) -> RolloutGroup:
        group = as_group(request, episodes, self._pad_id)
        mask = group.response_mask
        observations = torch.zeros(*mask.shape, *self._nothing.shape, dtype=_type(self._nothing))
        observations[mask] = torch.from_numpy(
            np.stack([o for e in episodes for o in e.observations])
        )
        earned = torch.full(mask.shape, torch.nan)
        earned[mask] = torch.tensor([reward for episode in episodes for reward in episode.rewards])
        actions = None
        if self._policy.spaces.choices is None:
            actions = torch.zeros(*mask.shape, self._policy.spaces.action_numbers)
            actions[mask] = torch.stack([a for episode in episodes for a in episode.actions])
        return replace(
            group,
            observations=observations,
            actions=actions,
            turn_rewards=earned,
            info=mean_info([episode.info for episode in episodes]),
        )

    def close(self) -> None:
        """Close the environments. An environment that renders holds a rendering context."""
        for env in self._envs:
            self._thread.submit(env.close).result()
        self._envs = []
        self._thread.shutdown()


def _act_all(episodes: Sequence[_Episode], actions: np.ndarray) -> None:
    for episode, action in zip(episodes, actions, strict=True):
        episode.act(action)


def _type(array: np.ndarray) -> torch.dtype:
    return torch.from_numpy(array).dtype


def build_control_engine(setup: EngineSetup) -> ControlEngine:
    """Build the engine for a policy that acts in `model.env`."""
    config = setup.config
    policy, _ = build_control_policy(config.model, config.seed)
    assert config.model.env is not None, "only policies with model.env use this engine"
    return ControlEngine(
        policy.to(setup.device),
        config.model.env,
        seed=config.seed,
        pad_id=setup.tokenizer.pad_id,
        device=setup.device,
    )
