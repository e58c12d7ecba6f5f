"""Play episodes, in which a policy and its environment take turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue

import torch

from grpo_trainable.config import EnvSettings
from grpo_trainable.engines.engine import Action, Observation, PlayingEngine
from grpo_trainable.environments import Turn
from grpo_trainable.environments.environment import add_info, mean_info
from grpo_trainable.generator.env_processes import Episode, EpisodeError, GroupProcess
from grpo_trainable.models.tokenizer import Tokenizer
from grpo_trainable.protocol.rollout import Request, RolloutGroup
from grpo_trainable.tasks import JSONValue, RewardError, Score, as_score
from grpo_trainable.tasks.prompts import Prompts


@dataclass(kw_only=True)
class Played:
    """An episode, and the results of the turns played so far."""

    episode: Episode
    process: GroupProcess
    # For each turn: (index of the action's last token, reward).
    rewards: list[tuple[int, float]] = field(default_factory=list)
    info: dict[str, float] = field(default_factory=dict)  # name -> sum over the turns
    error: str | None = None  # the reason if the environment failed, else None

    def add(self, end: int, turn: Turn) -> None:
        """Record the environment's answer to the action whose last token has the index `end`."""
        self.rewards.append((end, turn.reward))
        add_info(self.info, turn.info)

    def score(self, discount: float) -> Score | RewardError:
        """Return Σ discount^turn · reward as a score, or an error if the environment failed."""
        if self.error is not None:
            return RewardError(f"environment: {self.error}")
        total = sum(discount**turn * reward for turn, (_, reward) in enumerate(self.rewards))
        try:
            return as_score({"reward": total, "parts": self.info})
        except ValueError as error:  # the sum is not a finite float32
            return RewardError(f"environment: {error}")


class EpisodePlayer:
    """Plays the episodes that the requests ask for.

    In a call of `play`, each group has a separate process. Later calls reuse the processes.
    """

    def __init__(self, settings: EnvSettings, prompts: Prompts, tokenizer: Tokenizer) -> None:
        """Start one process, to check that the environment can be loaded.

        Args:
            settings: The environment's settings.
            prompts: Provides the specification and the first text of each episode.
            tokenizer: Decodes actions.

        Raises:
            ValueError: The environment cannot be loaded. The message is one line.
        """
        self._settings, self._prompts, self._tokenizer = settings, prompts, tokenizer
        self._processes = [GroupProcess(settings)]
        self._processes[0].start()

    def play(
        self,
        engine: PlayingEngine,
        requests: Sequence[Request],
        between_tokens: Callable[[], None],
    ) -> tuple[list[RolloutGroup], list[list[Score | RewardError]]]:
        """Sample and play the episodes of `requests`.

        Returns:
            One group per request, and one list of scores per group, with one score per episode. The
            groups contain the rewards of turns, but not yet the rewards of responses.
        """
        episodes = self._begun(requests)
        call = _Call(self._settings, self._prompts.reply, self._tokenizer.decode, episodes)
        groups = engine.play(requests, between_tokens, call)
        scored, start = [], 0
        for i, group in enumerate(groups):
            own = episodes[start : start + len(group.response_ids)]
            start += len(own)
            groups[i] = _with_results(group, own)
            scored.append([played.score(self._settings.discount) for played in own])
        return groups, scored

    def _begun(self, requests: Sequence[Request]) -> list[Played]:
        """Begin every episode, without waiting for the environments to answer."""
        begun = []
        for process, request in zip(self._started(len(requests)), requests, strict=True):
            example = request.example
            group = _Group(
                process=process,
                spec=self._prompts.ground_truth(request.stream, example),
                prompt=self._prompts.said(request.stream, example),
                episodes=[
                    Played(episode=Episode(process, place, self._settings), process=process)
                    for place in range(request.group_size)
                ],
            )
            process.submit(group.begin)
            begun += group.episodes
        return begun

    def _started(self, count: int) -> list[GroupProcess]:
        """Return `count` started processes.

        All processes start in parallel, and no episode begins before all have started. Otherwise,
        the time that a process takes to start would count as time that its environment takes to
        answer, and would hold up other episodes.
        """
        while len(self._processes) < count:
            self._processes.append(GroupProcess(self._settings))
        used = self._processes[:count]
        wait([process.submit(process.start) for process in used])
        return used

    def close(self) -> None:
        """Close every process, which also ends all running episodes."""
        for process in self._processes:
            process.close()
        self._processes = []


@dataclass(frozen=True, kw_only=True)
class _Group:
    """The episodes that share one specification."""

    process: GroupProcess
    spec: JSONValue
    prompt: str  # the text that each episode must begin with
    episodes: list[Played]

    def begin(self) -> None:
        """Begin all episodes. Call this in the thread of the `GroupProcess`."""
        try:
            self.process.start()
        except ValueError as error:
            for played in self.episodes:
                played.error = str(error)
            return
        for played in self.episodes:
            try:
                played.episode.begin(self.spec, self.prompt)
            except EpisodeError as error:
                played.error = str(error)


class _Call:
    """The engine's `Partner` in one call. It passes the engine's actions to the environments.

    The engine gets all awaited answers together, once the last one has arrived, so a repeated call
    gives the same bits. While other rows could continue, a call waits for at most `patience_s` in
    total. After that, the engine gets only the answers that have already arrived.
    """

    def __init__(
        self,
        settings: EnvSettings,
        reply: Callable[[str, Sequence[int]], tuple[int, ...]],
        decode: Callable[[Sequence[int]], str],
        episodes: Sequence[Played],
    ) -> None:
        """Prepare a call.

        Args:
            settings: The environment's settings.
            reply: Converts an observation to the tokens that the policy reads after an action.
            decode: Converts the tokens of an action to text.
            episodes: The episode of each row of the call.
        """
        self._settings, self._reply, self._decode = settings, reply, decode
        self._episodes = episodes
        self._answers: SimpleQueue[Observation | BaseException] = SimpleQueue()
        self._awaited = 0
        self._patience_s = settings.patience_s

    def act(self, action: Action) -> None:
        """Submit an action to the thread that talks to the process of the action's group."""
        self._awaited += 1

        def play() -> None:
            try:
                self._answers.put(self._answer(action))
            except BaseException as error:  # `observations` raises the error again
                self._answers.put(error)

        self._episodes[action.row].process.submit(play)

    def _answer(self, action: Action) -> Observation:
        played = self._episodes[action.row]
        if played.error is not None:
            return Observation(action.row, over=True)
        try:
            turn = played.episode.step(self._decode(action.ids))
        except EpisodeError as error:
            played.error = str(error)
            return Observation(action.row, over=True)
        played.add(action.end, turn)
        if turn.done or len(played.rewards) == self._settings.max_turns:
            return Observation(action.row, over=True, finished=turn.done)
        return Observation(action.row, self._reply(turn.text, action.ids))

    def observations(self, *, waits: bool) -> list[Observation]:
        """Return the answers of the environments, as `Partner` describes."""
        heard: list[Observation] = []
        while self._awaited:
            answer = self._next(waits=waits and not heard)
            if answer is None:
                break
            self._awaited -= 1
            if isinstance(answer, BaseException):
                raise answer
            heard.append(answer)
        return sorted(heard)

    def _next(self, *, waits: bool) -> Observation | BaseException | None:
        """Return the next answer, or None if it does not come in time.

        If `waits` is True, wait for as long as it takes. Otherwise, wait at most for the rest of
        `patience_s`.
        """
        if waits:
            return self._answers.get()
        start = time.monotonic()
        try:
            return self._answers.get(timeout=max(self._patience_s, 0.0))
        except Empty:
            return None
        finally:
            self._patience_s -= time.monotonic() - start


def _with_results(group: RolloutGroup, episodes: Sequence[Played]) -> RolloutGroup:
    """Return the group with the turn rewards, and the mean `info`, of its episodes."""
    earned = torch.full(group.response_ids.shape, torch.nan)
    for row, played in enumerate(episodes):
        for end, reward in played.rewards:
            earned[row, end] = reward
    info = mean_info([played.info for played in episodes])
    return replace(group, turn_rewards=earned, info=info)
