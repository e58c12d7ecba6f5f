"""Episodes: the policy acts, its environment answers, until one of them ends it."""

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
from grpo_trainable.generator.env_processes import Episode, EpisodeError, GroupProcess
from grpo_trainable.models.tokenizer import Tokenizer
from grpo_trainable.protocol.rollout import Request, RolloutGroup
from grpo_trainable.tasks import JSONValue, RewardError, Score, as_score
from grpo_trainable.tasks.prompts import Prompts


@dataclass(kw_only=True)
class Played:
    """An episode as far as it has come."""

    episode: Episode
    process: GroupProcess
    rewards: list[tuple[int, float]] = field(default_factory=list)  # (last token of an action, …)
    info: dict[str, float] = field(default_factory=dict)  # added up over its turns
    error: str | None = None  # why it could not be played

    def add(self, end: int, turn: Turn) -> None:
        """Takes note of what the action that ends with token `end` led to."""
        self.rewards.append((end, turn.reward))
        for name, value in turn.info.items():
            self.info[name] = self.info.get(name, 0.0) + value

    def score(self, discount: float) -> Score | RewardError:
        """Σ discount^turn · reward, where the environment did not fail."""
        if self.error is not None:
            return RewardError(f"environment: {self.error}")
        total = sum(discount**turn * reward for turn, (_, reward) in enumerate(self.rewards))
        try:
            return as_score({"reward": total, "parts": self.info})
        except ValueError as error:  # the sum is no float32
            return RewardError(f"environment: {error}")


class EpisodePlayer:
    """Has requests played, each group in a process of its own, which later groups use again."""

    def __init__(self, settings: EnvSettings, prompts: Prompts, tokenizer: Tokenizer) -> None:
        """
        Raises:
            ValueError: the environment cannot be had, in one line.
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
        """A group for each request, with the rewards of its turns and without its own; and a score
        for each of its episodes."""
        episodes = self._begun(requests)
        call = _Call(self._settings, self._prompts.reply, self._tokenizer.decode, episodes)
        groups = engine.play(requests, between_tokens, call)
        scored, start = [], 0
        for i, group in enumerate(groups):
            own = episodes[start : start + len(group.response_ids)]
            start += len(own)
            groups[i] = _with_turns(group, own)
            scored.append([played.score(self._settings.discount) for played in own])
        return groups, scored

    def _begun(self, requests: Sequence[Request]) -> list[Played]:
        """Has every episode begin, and waits for none to have begun."""
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
        """So many processes, started. All start side by side, and none is played in before they
        have: a start is no answer that others could be held up by."""
        while len(self._processes) < count:
            self._processes.append(GroupProcess(self._settings))
        used = self._processes[:count]
        wait([process.submit(process.start) for process in used])
        return used

    def close(self) -> None:
        """Ends every process; what is under way ends with it."""
        for process in self._processes:
            process.close()
        self._processes = []


@dataclass(frozen=True, kw_only=True)
class _Group:
    """The episodes of one specification."""

    process: GroupProcess
    spec: JSONValue
    prompt: str  # what each reset must say
    episodes: list[Played]

    def begin(self) -> None:
        """Runs in the thread of the group's process."""
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
    """What an engine talks to while it samples the episodes of one call.

    An answer is given to it as soon as all others that are being waited for have come too, so that
    a call gives the same bits when it is repeated. `patience_s` is how long all these waits of a
    call may take together while other rows could go on.
    """

    def __init__(
        self,
        settings: EnvSettings,
        reply: Callable[[str, Sequence[int]], tuple[int, ...]],
        decode: Callable[[Sequence[int]], str],
        episodes: Sequence[Played],
    ) -> None:
        """`reply`: what the policy reads of an observation after such an action, in tokens."""
        self._settings, self._reply, self._decode = settings, reply, decode
        self._episodes = episodes
        self._answers: SimpleQueue[Observation | BaseException] = SimpleQueue()
        self._awaited = 0
        self._patience_s = settings.patience_s

    def act(self, action: Action) -> None:
        """Has the action played, in the thread of the group's process."""
        self._awaited += 1

        def play() -> None:
            try:
                self._answers.put(self._answer(action))
            except BaseException as error:  # told where answers are waited for
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
        """What environments have answered, as `Partner` says."""
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
        """The next answer, waited for as long as it takes or else with what patience is left."""
        if waits:
            return self._answers.get()
        start = time.monotonic()
        try:
            return self._answers.get(timeout=max(self._patience_s, 0.0))
        except Empty:
            return None
        finally:
            self._patience_s -= time.monotonic() - start


def _with_turns(group: RolloutGroup, episodes: Sequence[Played]) -> RolloutGroup:
    earned = torch.full(group.response_ids.shape, torch.nan)
    for row, played in enumerate(episodes):
        for end, reward in played.rewards:
            earned[row, end] = reward
    return replace(group, turn_rewards=earned)
