"""Side effects of training: the policy's text before training, compared with its text at the end.

A policy can earn reward with text that nobody intended: one sentence instead of four, the same
sentence every time, or a loop. The reward does not show such changes. Each quantity here is
measured before and after training. The report names each quantity that moved by more than its
threshold in either direction. The reader decides whether the change is harmless. A figure that
rests on few responses has a wider threshold.

A word is an unbroken sequence of letters and digits, in lower case, so the measures work for any
language. In a language without spaces between words, such a sequence is a whole phrase, so n-grams
are longer than their names suggest.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_trainable.config import schedule
from grpo_trainable.telemetry.metrics import SE
from grpo_trainable.text import joined
from reports.parquet_reader import is_whole, read_parts
from reports.records import TrialRecord, error_of_mean

# The thresholds apply if there are at least this many responses both before and after training.
# With fewer responses, chance alone moves figures further, so the thresholds are wider.
ENOUGH = 64
# Largest threshold of a relative change. A value can fall by at most 100 %. Without this limit, the
# threshold for very few responses would exceed 100 %, and the report would never name a fall.
MAX_RELATIVE = 0.8
REPEATED_WORDS = 4  # length of the n-grams that a response may repeat
WORDING_WORDS = 3  # length of the n-grams that several responses may share

STANDARD_ERRORS = 2.0
NLL_METRIC = "response/reference_nll_nats"

FEW = f"some figures rest on fewer than {ENOUGH} responses"

Ngram = tuple[str, ...]
Ends = tuple[float, float]  # values before and after training
Values = Mapping[str, float]  # name of a quantity -> value; unknown quantities are left out


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """Quantity that is measured before and after training."""

    name: str  # key in report.json
    title: str  # heading in tables
    measured: str  # how the quantity is measured
    form: str  # format of a value
    unit: str  # unit that follows a value in a sentence; empty for shares
    fell: str  # sentence for a decrease
    rose: str  # sentence for an increase
    threshold: float  # the report names changes larger than this, in both directions
    relative: bool  # True: the threshold is a share of the value before training
    because: str  # reason for this threshold

    def change(self, before: float, after: float) -> float:
        """Return the change from `before` to `after` in the unit of the threshold."""
        # Round, because 0.4 - 0.3 is more than 0.1 in floating point.
        if not self.relative:
            return round(after - before, 9)
        return round(after / before - 1, 9) if before else math.inf if after else 0.0

    def shown_change(self, ends: Sequence[Ends]) -> str:
        """Return the change between the medians: `-68%`, `+0.12`, or for a share `+12.0 points`."""
        change = self.change(*_medians(ends))
        if self.relative:
            return f"{100 * change:+.0f}%" if math.isfinite(change) else "from zero"
        return f"{100 * change:+.1f} points" if "%" in self.form else f"{change:+.2f}"

    def shown(self, size: float) -> str:
        """Return the size of a change as text: `25%`, `10 points` or `0.3 nats per token`."""
        size = 100 * size if self.relative or "%" in self.form else size
        unit = "%" if self.relative else " points" if "%" in self.form else f" {self.unit}"
        return f"{size:.3g}{unit}"


LENGTH = Quantity(
    name="response_tokens",
    title="tokens per response",
    measured="mean length of the held-out responses",
    form="{:.1f}",
    unit="tokens",
    fell="responses became shorter",
    rose="responses became longer",
    threshold=0.25,
    relative=True,
    because="in a text of four sentences, this is about one sentence more or less",
)
TRUNCATED = Quantity(
    name="truncated_share",
    title="cut off",
    measured="share of the held-out responses that reached the limit rollout.max_new_tokens",
    form="{:.0%}",
    unit="",
    fell="the token limit cuts off fewer held-out responses",
    rose="the token limit cuts off more held-out responses",
    threshold=0.10,
    relative=False,
    because="one response in ten ends differently",
)
ENTROPY = Quantity(
    name="entropy_nats",
    title="entropy in nats per token",
    measured="policy/entropy_nats over all responses of round 1, compared with its mean over the "
    "last eighth of the rounds",
    form="{:.2f}",
    unit="nats per token",
    fell="the policy chooses among fewer tokens (entropy)",
    rose="the policy chooses among more tokens (entropy)",
    threshold=0.50,
    relative=True,
    because="some loss of entropy is normal in training; losing half of it is not",
)
REPEATED = Quantity(
    name="repeated_4grams_share",
    title="repeated 4-grams",
    measured="share of a response's 4-grams that occur earlier in the same response, averaged over "
    "the held-out responses with at least four words",
    form="{:.1%}",
    unit="",
    fell="responses repeat themselves less (4-grams)",
    rose="responses repeat themselves more (4-grams)",
    threshold=0.05,
    relative=False,
    because="normal text rarely repeats four words within a few sentences; a loop always does",
)
DISTINCT = Quantity(
    name="distinct_responses_share",
    title="distinct responses",
    measured="share of distinct texts among the held-out responses, ignoring differences in white "
    "space",
    form="{:.0%}",
    unit="",
    fell="fewer responses are distinct",
    rose="more responses are distinct",
    threshold=0.10,
    relative=False,
    because="one response in ten became, or stopped being, a copy of another",
)
WORDING = Quantity(
    name="distinct_3grams_share",
    title="distinct 3-grams",
    measured="number of different 3-grams in the held-out responses, as a share of all their "
    "3-grams; the same number of 3-grams is counted before and after training",
    form="{:.0%}",
    unit="",
    fell="fewer distinct 3-grams",
    rose="more distinct 3-grams",
    threshold=0.15,
    relative=False,
    because="similar texts share some phrases; texts from a template share nearly all",
)
COMMONEST = Quantity(
    name="commonest_3gram_share",
    title="commonest 3-gram",
    measured="share of the held-out responses that contain the commonest 3-gram, which may be a "
    "different one after training",
    form="{:.0%}",
    unit="",
    fell="fewer responses share one phrase (3-gram)",
    rose="more responses share one phrase (3-gram)",
    threshold=0.25,
    relative=False,
    because="one response in four gained or lost a shared phrase",
)
NLL = Quantity(
    name="reference_nll_nats",
    title="reference NLL",
    measured="response/reference_nll_nats in round 1, compared with its mean over the last eighth "
    "of the rounds. If rounds measure it on a sample of their responses, a change that exceeds the "
    f"threshold by less than {STANDARD_ERRORS:g} standard errors may not really exceed it",
    form="{:.2f}",
    unit="nats per token",
    fell="the initial policy finds the text more likely (reference NLL)",
    rose="the initial policy finds the text less likely (reference NLL)",
    threshold=0.3,
    relative=False,
    because="an average token became a quarter less likely (e^-0.3 = 0.74) or a third more likely "
    "(e^0.3 = 1.35)",
)
QUANTITIES = (LENGTH, TRUNCATED, ENTROPY, REPEATED, DISTINCT, WORDING, COMMONEST, NLL)


@dataclass(frozen=True, kw_only=True)
class Change:
    """One quantity of one arm, before and after training."""

    quantity: Quantity
    kind: str  # what the names are: `seed`, `member` or `trial`
    names: Sequence[str]  # one entry per trial, as in the following sequences
    before: Sequence[float | None]  # None if unknown
    after: Sequence[float | None]
    # Number of responses that each trial's values rest on, before or after training, whichever
    # number is smaller.
    responses: Sequence[int] = ()
    # Standard error of each trial's change, if rounds measure the quantity on a sample of their
    # responses. A change counts if it exceeds the threshold by `STANDARD_ERRORS` times this error.
    errors: Sequence[float] = ()

    @property
    def name(self) -> str:
        """Key of the quantity in report.json."""
        return self.quantity.name

    @property
    def threshold(self) -> float:
        """The report names the quantity if its change exceeds this threshold."""
        wide = self.quantity.threshold * self.widened
        return min(wide, MAX_RELATIVE) if self.quantity.relative else wide

    @property
    def widened(self) -> float:
        """Factor by which the threshold is wider than with `ENOUGH` responses.

        The standard deviation of a mean over n responses is proportional to 1 / sqrt(n).
        """
        known = [n for n in self.responses if n]
        return max(1.0, math.sqrt(ENOUGH / min(known))) if known else 1.0

    @property
    def known(self) -> list[Ends]:
        """Pairs (before, after) of the trials for which both values are known."""
        pairs = zip(self.before, self.after, strict=True)
        return [(b, a) for b, a in pairs if b is not None and a is not None]

    @property
    def moved(self) -> bool:
        """Return True if the change exceeds the threshold in any trial: one collapse is enough."""
        return bool(self.sizes)

    @property
    def sizes(self) -> dict[int, float]:
        """Place in `names` -> size of a change above the threshold, in units of the threshold."""
        moved = self._beyond(-1) | self._beyond(1)
        change = self.quantity.change
        return {place: abs(change(*ends)) / self.threshold for place, ends in moved.items()}

    def _found(self) -> Iterator[tuple[str, Mapping[int, Ends], str]]:
        """For each direction, yield a description, the values before and after, and any doubt.

        If no change in a direction exceeds the threshold by more than the noise of its measurement,
        the changes in this direction are in doubt.
        """
        within = f" (within {STANDARD_ERRORS:g} standard errors of the threshold)"
        for sign, said in ((-1, self.quantity.fell), (1, self.quantity.rose)):
            if moved := self._beyond(sign):
                yield said, moved, ""
            elif unsure := self._beyond(sign, noise=0.0):
                yield said, unsure, within

    def sentences(self) -> Iterator[str]:
        """Yield one sentence for trials with a fall, and one for trials with a rise.

        Only changes above the threshold count. A sentence shows the medians over its trials:
        `responses became shorter, 38.9 -> 12.4 tokens (-68%, threshold 25%)`.
        """
        quantity = self.quantity
        unit = f" {quantity.unit}" if quantity.unit else ""
        for said, moved, doubt in self._found():
            ends = list(moved.values())
            before, after = (quantity.form.format(end) for end in _medians(ends))
            threshold = quantity.shown(self.threshold).partition(" ")[0]  # without the unit
            change = f"{quantity.shown_change(ends)}, threshold {threshold}"
            where = f"{self._among(moved)}{doubt}"
            yield f"{said}, {before} -> {after}{unit} ({change}){where}"

    def in_short(self) -> Iterator[str]:
        """Yield a short form of each sentence: `responses became shorter, -68%`."""
        for said, moved, doubt in self._found():
            change = self.quantity.shown_change(list(moved.values()))
            median = " (median)" if len(moved) > 1 else ""
            yield f"{said}, {change}{median}{self._among(moved)}{doubt}"

    def _among(self, moved: Collection[int]) -> str:
        """Name the trials in which the quantity moved: ` in seeds 0 and 2`; empty for one trial.

        Args:
            moved: Places of the trials in `names`.
        """
        if len(self.names) < 2:
            return ""
        if len(moved) == len(self.names):
            return f" in {'both' if len(moved) == 2 else f'all {len(moved)}'} {self.kind}s"
        named = joined([self.names[place] for place in moved])
        return f" in {self.kind}{'s' if len(moved) > 1 else ''} {named}"

    def _beyond(self, sign: int, noise: float = STANDARD_ERRORS) -> dict[int, Ends]:
        """Return place in `names` -> (before, after) for each trial that moved in a direction.

        Args:
            sign: 1 for a rise, -1 for a fall.
            noise: The number of standard errors by which a change must exceed the threshold.
        """
        change, errors = self.quantity.change, self.errors or [0.0] * len(self.before)
        return {
            place: (b, a)
            for place, (b, a, error) in enumerate(zip(self.before, self.after, errors, strict=True))
            if b is not None
            and a is not None
            and sign * change(b, a) > self.threshold + noise * error
        }


def _medians(ends: Sequence[Ends]) -> Ends:
    before, after = zip(*ends, strict=True)
    return statistics.median(before), statistics.median(after)


def of_arm(trials: Sequence[TrialRecord]) -> list[Change]:
    """Read the evaluations of one arm's trials, and return the change in each of `QUANTITIES`."""
    ends = [of_trial(trial) for trial in trials]
    seeds = [str(trial.config.seed) for trial in trials]
    # The members of a population exchange seeds, and a user's own Tuner can repeat a seed.
    is_seed = len(set(seeds)) == len(seeds) and not any(trial.member for trial in trials)
    kind = "seed" if is_seed else "member" if trials[0].member else "trial"
    return [
        Change(
            quantity=quantity,
            kind=kind,
            names=seeds if is_seed else [trial.label for trial in trials],
            before=[before.get(quantity.name) for before, _, _ in ends],
            after=[after.get(quantity.name) for _, after, _ in ends],
            responses=[responses[quantity.name] for _, _, responses in ends],
            errors=[_error_of_nll(trial) for trial in trials] if quantity is NLL else (),
        )
        for quantity in QUANTITIES
    ]


def of_trial(trial: TrialRecord) -> tuple[Values, Values, Mapping[str, int]]:
    """Return the values before training and at the latest round, with numbers of responses.

    For each quantity, the third mapping has the smaller of two numbers of responses: before
    training, and at the latest round. After one round, there are no later metrics to compare with
    the metrics of round 1.
    """
    ends = _held_out(trial)
    before, after = measure(*ends)
    responses = dict.fromkeys((quantity.name for quantity in QUANTITIES), min(map(len, ends)))
    for quantity, metric in (
        (ENTROPY, "policy/entropy_nats"),
        (NLL, NLL_METRIC),
    ):
        # At any lag, the initial policy sampled the responses of round 1.
        first = trial.rows[0] if trial.rows and trial.rows[0]["training_iteration"] == 1 else {}
        late = trial.late_mean(metric) if trial.round > 1 else None
        before |= {quantity.name: first[metric]} if metric in first else {}
        after |= {} if late is None else {quantity.name: late}
        # All responses of the round count, even for the reference NLL: the sampler's NLL is known
        # for all of them, and only the difference between the two NLLs is estimated from a sample.
        responses[quantity.name] = schedule.responses_per_round(trial.config)
    return before, after, responses


def _error_of_nll(trial: TrialRecord) -> float:
    """Return the standard error of a trial's change in reference NLL."""
    name = f"{NLL_METRIC}{SE}"
    return math.hypot(*trial.column(name)[:1], error_of_mean(trial.late(name)))


def moved_in(changes: Mapping[str, Sequence[Change]]) -> list[str]:
    """For each arm, say in one line which quantities moved.

    The largest multiple of a threshold comes first.
    """
    if not any(change.known for own in changes.values() for change in own):
        return ["nothing was measured both before and after training"]

    def largest(own: Sequence[Change]) -> float:
        return max((size for change in own for size in change.sizes.values()), default=0.0)

    # If a quantity moved in one arm, an arm in which it perhaps moved must not look unchanged.
    titles = {change.quantity.title for own in changes.values() for change in own if change.moved}
    moved = {arm: [c for c in own if c.quantity.title in titles] for arm, own in changes.items()}
    lines = []
    for arm, own in sorted(moved.items(), key=lambda item: -largest(item[1]) if item[1] else 0):
        said = [text for c in sorted(own, key=lambda c: -largest([c])) for text in c.in_short()]
        lines += [f"{arm}: {'; '.join(said)}"] if said else []
    unknown = [arm for arm, own in changes.items() if not_known(own)]
    doubts = [f"not everything was measured in {', '.join(unknown)}"] if unknown else []
    few = [arm for arm, own in changes.items() if any(c.known and c.widened > 1 for c in own)]
    doubts += [f"thresholds are wider for {', '.join(few)} ({FEW})"] if few else []
    return [*(lines or ["no quantity moved by more than its threshold"]), *doubts]


def most_moved(changes: Sequence[Change]) -> int:
    """Return the place of the trial that most exceeds a threshold, or 0 if no trial moved."""
    sizes = [(size, place) for change in changes for place, size in change.sizes.items()]
    return max(sizes)[1] if sizes else 0


def not_known(changes: Sequence[Change]) -> list[str]:
    """Return the quantities for which some trial lacks a value before or after training."""
    return [change.quantity.title for change in changes if len(change.known) < len(change.before)]


# ---- Measures --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Response:
    """Held-out response."""

    text: str
    tokens: int
    finished: bool  # ended by the policy, not by the token limit


def measure(
    before: Sequence[Response], after: Sequence[Response]
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the quantities before and after training; empty if there are no responses."""
    first, last = _of_responses(before), _of_responses(after)
    runs_before, runs_after = _runs(before), _runs(after)
    # With more n-grams, the share of distinct n-grams falls even if the wording is equally varied.
    # So count the same number of n-grams before and after training.
    equal = min(len(runs_before), len(runs_after))
    if equal:
        first[WORDING.name] = len(set(runs_before[:equal])) / equal
        last[WORDING.name] = len(set(runs_after[:equal])) / equal
    return first, last


def _runs(responses: Sequence[Response]) -> list[Ngram]:
    return [run for r in responses for run in ngrams(words(r.text), WORDING_WORDS)]


def _of_responses(responses: Sequence[Response]) -> dict[str, float]:
    if not responses:
        return {}
    shares = [repeated_share(words(response.text)) for response in responses]
    repeated = [share for share in shares if share is not None]
    distinct = {" ".join(response.text.split()) for response in responses}
    return {
        LENGTH.name: statistics.fmean(response.tokens for response in responses),
        TRUNCATED.name: statistics.fmean(not response.finished for response in responses),
        DISTINCT.name: len(distinct) / len(responses),
        **({REPEATED.name: statistics.fmean(repeated)} if repeated else {}),
        **_commonest(responses),
    }


def _commonest(responses: Sequence[Response]) -> dict[str, float]:
    """Return the share of responses with the commonest 3-gram; empty if there is no 3-gram."""
    holders = Counter(run for r in responses for run in set(ngrams(words(r.text), WORDING_WORDS)))
    return {COMMONEST.name: max(holders.values()) / len(responses)} if holders else {}


def words(text: str) -> list[str]:
    """Return the words of a text in lower case."""
    return re.findall(r"\w+", text.lower())


def ngrams(words: Sequence[str], length: int) -> list[Ngram]:
    """Return every run of `length` consecutive words."""
    return [tuple(words[i : i + length]) for i in range(len(words) - length + 1)]


def repeated_share(words: Sequence[str]) -> float | None:
    """Return the share of repeated 4-grams, 1 - distinct / all; None for fewer than four words."""
    runs = ngrams(words, REPEATED_WORDS)
    return 1 - len(set(runs)) / len(runs) if runs else None


def _held_out(trial: TrialRecord) -> tuple[list[Response], list[Response]]:
    """Return the responses before training and at the latest evaluation after round 0.

    The last evaluation may have more prompts. Responses to prompts that round 0 did not have are
    left out, because some quantities depend on the number of responses.
    """
    table, _ = read_parts(trial, "evaluations")  # `read_files` has already reported damaged files
    by_round: dict[int, list[Mapping[str, Any]]] = {}
    for row in table.to_pylist():
        if is_whole(row):
            by_round.setdefault(row["round"], []).append(row)
    latest = max(by_round, default=0)
    before, after = by_round.get(0, []), by_round[latest] if latest else []
    prompts = {row["cursor"] for row in before}
    return _responses(before), _responses(
        row for row in after if not prompts or row["cursor"] in prompts
    )


def _responses(rows: Iterable[Mapping[str, Any]]) -> list[Response]:
    ordered = sorted(rows, key=lambda row: (row["cursor"], row["response_index"]))
    return [Response(row["response"], row["tokens"], row["finished"]) for row in ordered]
