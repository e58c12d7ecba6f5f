"""Compute a judge's reward, asking all questions about a batch of responses at the same time."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

from grpo_trainable.config import ConfigError
from grpo_trainable.protocol.rollout import Rubric
from grpo_trainable.tasks.judge import evolving, verdicts
from grpo_trainable.tasks.judge.chat_client import ChatClient, NoAnswer
from grpo_trainable.tasks.judge.evolving import Comparison, comparison, keep_distinctive
from grpo_trainable.tasks.judge.judge_file import (
    RUBRICS,
    JudgeSettings,
    api_key,
    read_judge_file,
)
from grpo_trainable.tasks.judge.verdicts import Question, question, rubric_reward
from grpo_trainable.tasks.reward_function import Responses, RewardFunction
from grpo_trainable.tasks.task import RewardError, Score

CACHED = 100_000  # maximum number of answers that a process keeps
# Once the endpoint has left this many questions of a batch unanswered, the remaining ones are not
# asked.
MAX_UNANSWERED = 10
# After this share of the time limit, no call waits any longer. At the limit itself, the process
# would be killed, and the scores of the other responses would be lost.
TIME_SHARE = 0.9
# Time limit of the one call that tests a judge before a command starts.
TEST_S = 120.0


@dataclass(slots=True)
class _Answer:
    """The cost of a question, with its answer or the reason why there is no answer."""

    value: Any = None  # a score in [0, 1], or new rubrics
    error: RewardError | None = None
    usage: Counter[str] = field(default_factory=Counter)


Ask = Callable[[Any, Counter[str], float], Any]  # (question, usage, until) -> value of the answer


class Judge:
    """Scores responses by the criteria of a judge's file, and by rubrics that the judge writes.

    Answers are kept, and equal questions are asked once. If a verdict on a response is missing, the
    response gets a `RewardError`, never a reward.
    """

    def __init__(self, settings: JudgeSettings, key: str | None) -> None:
        """Create a judge.

        Args:
            settings: The contents of the judge's file.
            key: The API key, or None if the endpoint needs none.
        """
        self.settings = settings
        self._client = ChatClient(settings, key)
        self._threads = ThreadPoolExecutor(settings.concurrency, thread_name_prefix="judge")
        self._cache: dict[bytes, Any] = {}  # digest of a question -> its answer, oldest first

    def score(self, batch: Sequence[Responses]) -> list[list[Score | RewardError]]:
        """Return a score or an error for each response to each prompt of a batch."""
        limit_s = sum(given.deadline_s * len(given.texts) for given in batch)
        call = _Call(self, time.monotonic() + TIME_SHARE * limit_s)
        groups = [_Group(given, self.settings) for given in batch]
        call.ask(self.compare, [group.comparison for group in groups if group.comparison])
        for group in groups:
            group.take_rubrics(call)
        call.ask(self.verdict, [one for group in groups for one in group.questions()])
        scored = [group.scores(call) for group in groups]
        self._keep(call)
        return scored

    def known(self, question: Hashable) -> Any:
        """Return the value of the answer to a question, or None if it has no answer yet."""
        return self._cache.get(_digest(question))

    def map(self, ask: Callable[[Any], _Answer], questions: Sequence[Any]) -> Iterable[_Answer]:
        """Ask several questions at the same time, and return the answers in order."""
        return self._threads.map(ask, questions)

    def _keep(self, call: _Call) -> None:
        answers = call.answers.items()
        self._cache |= {_digest(one): own.value for one, own in answers if own.error is None}
        while len(self._cache) > CACHED:
            del self._cache[next(iter(self._cache))]

    def verdict(self, one: Question, usage: Counter[str], until: float) -> float:
        """Ask for the score of a response by a criterion.

        Raises:
            NoAnswer: There is no answer, or the answer has no score.
        """
        system = verdicts.instructions(self.settings.scale)
        answer = self._client.ask(system, one.text(), usage, until)
        return self._required("score", answer, verdicts.verdict(answer, self.settings.scale))

    def compare(self, one: Comparison, usage: Counter[str], until: float) -> tuple[Rubric, ...]:
        """Ask for new rubrics.

        Raises:
            NoAnswer: There is no answer, or the answer has no rubrics.
        """
        most = self.settings.max_rubrics
        answer = self._client.ask(evolving.instructions(most), one.text(), usage, until)
        return self._required("criteria", answer, evolving.new_rubrics(answer, one, most))

    def _required(self, what: str, answer: str, found: Any) -> Any:
        if found is None:
            shown = self._client.without_key(answer)
            raise NoAnswer(f"no {what} in the answer: {shown}", repeats=True)
        return found


class _Call:
    """The questions of one call, which share a time limit."""

    def __init__(self, judge: Judge, until: float) -> None:
        self.answers: dict[Hashable, _Answer] = {}
        self._judge = judge
        self._until = until
        self._unanswered = 0
        self._changing = Lock()  # guards `_unanswered`

    def ask(self, ask: Ask, questions: Iterable[Hashable]) -> None:
        """Ask those questions whose answers are not known yet.

        If a question fails, its answer contains the error.
        """
        fresh = []
        for one in dict.fromkeys(questions):
            value = self._judge.known(one)
            if value is None:
                fresh.append(one)
            else:
                self.answers[one] = _Answer(value, usage=Counter(cached=1))
        answers = self._judge.map(partial(self._ask_one, ask), fresh)
        self.answers |= zip(fresh, answers, strict=True)

    def _ask_one(self, ask: Ask, one: Hashable) -> _Answer:
        if self._unanswered >= MAX_UNANSWERED:
            why = f"the judge did not answer {MAX_UNANSWERED} other questions of the batch"
            return _Answer(error=RewardError(f"not asked, because {why}"))
        usage: Counter[str] = Counter()
        try:
            return _Answer(ask(one, usage, self._until), usage=usage)
        except NoAnswer as failure:
            with self._changing:
                self._unanswered += not failure.answered
            return _Answer(error=RewardError(str(failure), repeats=failure.repeats), usage=usage)

    def take(self, one: Hashable, usage: Counter[str]) -> _Answer:
        """Return an answer, and add its cost to `usage`.

        Equal questions share an answer. Its cost counts for the first of these questions.
        """
        answer = self.answers[one]
        usage += answer.usage
        again = Counter(cached=1) if answer.error is None else Counter[str]()
        self.answers[one] = replace(answer, usage=again)
        return answer


class _Group:
    """The responses to one prompt, and the criteria that apply to them."""

    def __init__(self, given: Responses, settings: JudgeSettings) -> None:
        self._given = given
        self._most = settings.max_rubrics
        self._fixed = settings.criteria
        self._usage: Counter[str] = Counter()  # cost of the comparison
        self._error: RewardError | None = None  # the reason why the comparison failed
        # Held-out responses are scored only by the criteria of the file.
        evolves = self._most > 0 and given.rubrics is not None
        self._rubrics = tuple(Rubric(*own) for own in given.rubrics or ()) if evolves else ()
        fixed = [criterion.description for criterion in self._fixed]
        existing = [*fixed, *(rubric.description for rubric in self._rubrics)]
        self.comparison = comparison(given, existing) if evolves else None

    def take_rubrics(self, call: _Call) -> None:
        """Add the rubrics that the judge has written."""
        if self.comparison is None:
            return
        answer = call.take(self.comparison, self._usage)
        if answer.error is None:
            self._rubrics += answer.value
        else:
            self._error = _about("new criteria", answer.error)

    def questions(self) -> list[Question]:
        """Return a question for each response and each criterion."""
        if self._error is not None:
            return []
        return [one for text in self._given.texts for one in self._about_response(text)]

    def _about_response(self, text: str) -> list[Question]:
        criteria = [*self._fixed, *self._rubrics]
        return [question(self._given, text, own.description) for own in criteria]

    def scores(self, call: _Call) -> list[Score | RewardError]:
        """Return a score or an error for each response. The first lists the rubrics to keep."""
        if self._error is not None:
            first = replace(self._error, usage=dict(self._usage))
            return [first, *([self._error] * (len(self._given.texts) - 1))]
        rows = [self._row(text, call) for text in self._given.texts]
        scored = [row if isinstance(row, RewardError) else self._score(*row) for row in rows]
        first = scored[0]
        scored[0] = replace(first, usage=dict(Counter(first.usage) + self._usage))
        complete = [row[0] for row in rows if not isinstance(row, RewardError)]
        if self.comparison is None or len(complete) < len(rows):
            return scored
        columns = list(zip(*complete, strict=True))[len(self._fixed) :]
        kept = keep_distinctive(self._rubrics, columns, self._most)
        return [replace(scored[0], rubrics=kept), *scored[1:]]

    def _row(self, text: str, call: _Call) -> tuple[list[float], Counter[str]] | RewardError:
        """Return the verdicts on a response and their cost."""
        usage: Counter[str] = Counter()
        answers = [call.take(one, usage) for one in self._about_response(text)]
        names = [*(criterion.name for criterion in self._fixed), *([RUBRICS] * len(self._rubrics))]
        for name, answer in zip(names, answers, strict=True):
            if answer.error is not None:
                return replace(_about(f"criterion {name}", answer.error), usage=dict(usage))
        return [answer.value for answer in answers], usage

    def _score(self, scores: Sequence[float], usage: Counter[str]) -> Score:
        weights = [own.weight for own in (*self._fixed, *self._rubrics)]
        weighted = list(zip(weights, scores, strict=True))
        count = len(self._fixed)
        parts = {own.name: score for own, score in zip(self._fixed, scores, strict=False)}
        if self._most:
            parts[RUBRICS] = rubric_reward(weighted[count:])
        reward = rubric_reward(weighted)
        return Score(reward, None, reward, parts=parts, usage=dict(usage))


def _digest(question: Hashable) -> bytes:
    """Return a digest of a question. A digest takes less memory than the question's texts."""
    return hashlib.sha256(repr(question).encode()).digest()


def _about(what: str, error: RewardError) -> RewardError:
    return replace(error, message=f"judge, {what}: {error.message}")


def judge_reward(path: str) -> RewardFunction:
    """Return the reward of the judge that a file describes.

    Raises:
        ConfigError: The file or the environment contains a mistake. The message is one line.
    """
    settings = read_judge_file(path)
    judge = Judge(settings, api_key(settings))
    # A field of `Responses` and a part of the reward both have this name.
    rubrics = (RUBRICS,) if settings.max_rubrics else ()
    return RewardFunction(
        score=lambda given: judge.score([given])[0],
        score_batch=judge.score,
        reads=frozenset({"prompt", "deadline_s", *rubrics}),
        name=Path(path).stem,
        parts=(*(criterion.name for criterion in settings.criteria), *rubrics),
    )


def check_judge(path: str) -> None:
    """Check a judge's file, API key and endpoint by asking one question.

    Raises:
        ConfigError: The judge cannot be used. The message is one line.
    """
    settings = read_judge_file(path)
    judge = Judge(settings, api_key(settings))
    example = Question("Say hello.", "", "Hello!", settings.criteria[0].description)
    try:
        judge.verdict(example, Counter(), time.monotonic() + TEST_S)
    except NoAnswer as failure:
        raise ConfigError(f"{settings.endpoint} with model={settings.model}: {failure}") from None
