"""What changed that the reward did not ask for: the text before training, and at the end.

A reward can be won by another kind of text than the one it was meant for: one sentence in place of
four, the same sentence every time, a loop. None of that shows in the reward. Each quantity here is
measured at both ends, and named when it moved by more than its threshold, whichever way: whether
that is harmless is for the reader to say.

Words are runs of letters and digits in lower case, so no language is presupposed; where words are
written without spaces between them, a run is a phrase, and n-grams are longer than they seem.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reports.parquet_reader import is_whole, read_parts
from reports.records import TrialRecord

REPEATED_WORDS = 4  # length of the n-grams that a response may repeat
WORDING_WORDS = 3  # length of the n-grams that several responses may share

Ngram = tuple[str, ...]
Ends = tuple[float, float]  # values before training and at the end
Values = Mapping[str, float]  # name of a quantity -> value; an unknown quantity is left out


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """Something that is measured before training and at the end."""

    name: str  # its key in files
    title: str  # its heading in tables
    measured: str  # how
    form: str  # format of a value
    unit: str  # behind it in a sentence; empty for shares
    fell: str  # what a sentence says
    rose: str
    threshold: float  # smallest change that is named, either way
    relative: bool  # whether the threshold is a share of the value before
    because: str  # why the threshold is there

    def change(self, before: float, after: float) -> float:
        """The change from `before` to `after`, as the threshold judges it."""
        # Rounding, since 0.4 - 0.3 is more than 0.1 in floating point.
        if not self.relative:
            return round(after - before, 9)
        return round(after / before - 1, 9) if before else math.inf if after else 0.0

    def shown_change(self, ends: Sequence[Ends]) -> str:
        """The change from median to median: `-68 %`, `+0.12`, or `+12 points` of a share."""
        change = self.change(*_medians(ends))
        if self.relative:
            return f"{100 * change:+.0f} %" if math.isfinite(change) else "from nothing"
        return f"{100 * change:+.1f} points" if "%" in self.form else f"{change:+.2f}"

    @property
    def shown_threshold(self) -> str:
        """The threshold as text: `± 25 %`."""
        size = 100 * self.threshold if self.relative or "%" in self.form else self.threshold
        unit = "%" if self.relative else "points" if "%" in self.form else self.unit
        return f"± {size:g} {unit}"


LENGTH = Quantity(
    name="response_tokens",
    title="tokens a response",
    measured="mean length of the held-out responses",
    form="{:.1f}",
    unit="tokens",
    fell="responses became shorter",
    rose="responses became longer",
    threshold=0.25,
    relative=True,
    because="a text of four sentences has lost or gained one",
)
TRUNCATED = Quantity(
    name="truncated_share",
    title="cut off",
    measured="share of the held-out responses that rollout.max_new_tokens ended",
    form="{:.0%}",
    unit="",
    fell="fewer responses are cut off by the token limit",
    rose="more responses are cut off by the token limit",
    threshold=0.10,
    relative=False,
    because="one response in ten ends in another way",
)
ENTROPY = Quantity(
    name="entropy_nats",
    title="entropy, nats a token",
    measured="policy/entropy_nats of round 1 and of the last eighth of the rounds",
    form="{:.2f}",
    unit="nats a token",
    fell="the policy chooses among fewer tokens (entropy)",
    rose="the policy chooses among more tokens (entropy)",
    threshold=0.50,
    relative=True,
    because="learning sharpens every policy; half of its choice is more than that",
)
REPEATED = Quantity(
    name="repeated_4grams_share",
    title="repeated 4-grams",
    measured="1 - distinct / all runs of four words of a response, the mean over the held-out "
    "responses that have four words",
    form="{:.1%}",
    unit="",
    fell="responses repeat themselves less (4-grams)",
    rose="responses repeat themselves more (4-grams)",
    threshold=0.05,
    relative=False,
    because="text hardly repeats four words within a few sentences, a loop does nothing else",
)
DISTINCT = Quantity(
    name="distinct_responses_share",
    title="distinct responses",
    measured="share of the held-out responses left when equal ones are counted once, blanks aside",
    form="{:.0%}",
    unit="",
    fell="fewer responses are distinct",
    rose="more responses are distinct",
    threshold=0.10,
    relative=False,
    because="one response in ten is a copy of another",
)
WORDING = Quantity(
    name="distinct_3grams_share",
    title="distinct 3-grams",
    measured="distinct / all runs of three words in the held-out responses together, up to as "
    "many runs as both ends have",
    form="{:.0%}",
    unit="",
    fell="responses are worded more alike (3-grams)",
    rose="responses are worded less alike (3-grams)",
    threshold=0.15,
    relative=False,
    because="texts of one kind share phrases; a template shares all but a word",
)
COMMONEST = Quantity(
    name="commonest_3gram_share",
    title="commonest 3-gram",
    measured="share of the held-out responses that contain the most frequent run of three words, "
    "which may be another one at the end than at the start",
    form="{:.0%}",
    unit="",
    fell="fewer responses have a phrase in common (3-gram)",
    rose="more responses have a phrase in common (3-gram)",
    threshold=0.25,
    relative=False,
    because="one response in four more contains one and the same phrase, whatever its other words",
)
NLL = Quantity(
    name="reference_nll_nats",
    title="reference NLL",
    measured="response/reference_nll_nats of round 1 and of the last eighth of the rounds",
    form="{:.2f}",
    unit="nats a token",
    fell="the first policy finds the text more likely (reference NLL)",
    rose="the first policy finds the text less likely (reference NLL)",
    threshold=0.3,
    relative=False,
    because="a token is a quarter less likely (e^-0.3 = 0.74), or a third more (e^0.3 = 1.35)",
)
QUANTITIES = (LENGTH, TRUNCATED, ENTROPY, REPEATED, DISTINCT, WORDING, COMMONEST, NLL)


@dataclass(frozen=True, kw_only=True)
class Change:
    """One quantity of one arm; `before` and `after` have an entry a seed, None where not known."""

    quantity: Quantity
    before: Sequence[float | None]
    after: Sequence[float | None]

    @property
    def name(self) -> str:
        return self.quantity.name

    @property
    def threshold(self) -> float:
        return self.quantity.threshold

    @property
    def known(self) -> list[Ends]:
        """The pairs (before, after) of the seeds for which both are known."""
        pairs = zip(self.before, self.after, strict=True)
        return [(b, a) for b, a in pairs if b is not None and a is not None]

    @property
    def moved(self) -> bool:
        """Whether any seed moved by more than the threshold: one collapse in five seeds counts."""
        return any(self._beyond(sign) for sign in (-1, 1))

    def sentences(self) -> Iterator[str]:
        """Yields `responses became shorter, 38.9 -> 12.4 tokens (-68 %)`, with medians over the
        seeds that moved this way; seeds that rose and seeds that fell get a sentence each."""
        quantity, seeds = self.quantity, len(self.before)
        unit = f" {quantity.unit}" if quantity.unit else ""
        for sign, said in ((-1, quantity.fell), (1, quantity.rose)):
            if moved := self._beyond(sign):
                before, after = (quantity.form.format(end) for end in _medians(moved))
                some = f" in {len(moved)} of {seeds} seeds" if seeds > 1 else ""
                yield f"{said}, {before} -> {after}{unit} ({quantity.shown_change(moved)}){some}"

    def in_short(self) -> Iterator[str]:
        """Yields the same in short: `tokens a response -68 %`."""
        for sign in (-1, 1):
            if moved := self._beyond(sign):
                yield f"{self.quantity.title} {self.quantity.shown_change(moved)}"

    def _beyond(self, sign: int) -> list[Ends]:
        change = self.quantity.change
        return [ends for ends in self.known if sign * change(*ends) > self.threshold]


def _medians(ends: Sequence[Ends]) -> Ends:
    before, after = zip(*ends, strict=True)
    return statistics.median(before), statistics.median(after)


def of_arm(trials: Sequence[TrialRecord]) -> list[Change]:
    """The change of each of `QUANTITIES` over the trials of one arm, whose evaluations are read."""
    ends = [of_trial(trial) for trial in trials]
    return [
        Change(
            quantity=quantity,
            before=[before.get(quantity.name) for before, _ in ends],
            after=[after.get(quantity.name) for _, after in ends],
        )
        for quantity in QUANTITIES
    ]


def of_trial(trial: TrialRecord) -> tuple[Values, Values]:
    """The values before training and at the latest round."""
    before, after = measure(*_held_out(trial))
    for quantity, metric in (
        (ENTROPY, "policy/entropy_nats"),
        (NLL, "response/reference_nll_nats"),
    ):
        # The first policy sampled the responses of round 1, whatever the lag.
        first = trial.rows[0] if trial.rows and trial.rows[0]["training_iteration"] == 1 else {}
        late = trial.late_mean(metric)
        before |= {quantity.name: first[metric]} if metric in first else {}
        after |= {} if late is None else {quantity.name: late}
    return before, after


def moved_in(changes: Mapping[str, Sequence[Change]]) -> str:
    """Names, in one line, the quantities that moved and their arms."""
    moved = {arm: [said for c in own for said in c.in_short()] for arm, own in changes.items()}
    named = [f"{arm} ({', '.join(said)})" for arm, said in moved.items() if said]
    unknown = [arm for arm, own in changes.items() if not_known(own)]
    missing = [f"not everything is known of {', '.join(unknown)}"] if unknown else []
    return "; ".join([*(named or ["nothing beyond the thresholds"]), *missing])


def not_known(changes: Sequence[Change]) -> list[str]:
    """The quantities of an arm that lack an end in some of its seeds."""
    return [change.quantity.title for change in changes if len(change.known) < len(change.before)]


# ---- Measures --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Response:
    text: str
    tokens: int
    finished: bool  # ended by the policy, not by the token limit


def measure(
    before: Sequence[Response], after: Sequence[Response]
) -> tuple[dict[str, float], dict[str, float]]:
    """The quantities of the responses before and after; empty where there are no responses."""
    first, last = _of_responses(before), _of_responses(after)
    runs_before, runs_after = _runs(before), _runs(after)
    # The share of distinct n-grams falls with their number, however varied the wording is.
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
    """In how many responses the commonest 3-gram is; empty where none has three words."""
    holders = Counter(run for r in responses for run in set(ngrams(words(r.text), WORDING_WORDS)))
    return {COMMONEST.name: max(holders.values()) / len(responses)} if holders else {}


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def ngrams(words: Sequence[str], length: int) -> list[Ngram]:
    """Every run of `length` consecutive words."""
    return [tuple(words[i : i + length]) for i in range(len(words) - length + 1)]


def repeated_share(words: Sequence[str]) -> float | None:
    """The share of repeated 4-grams, 1 - distinct / all; None below four words."""
    runs = ngrams(words, REPEATED_WORDS)
    return 1 - len(set(runs)) / len(runs) if runs else None


def _held_out(trial: TrialRecord) -> tuple[list[Response], list[Response]]:
    """The responses before training, and those of the latest evaluation after it began."""
    table, _ = read_parts(trial, "evaluations")  # the report names damaged parts
    by_round: dict[int, list[Mapping[str, Any]]] = {}
    for row in table.to_pylist():
        if is_whole(row):
            by_round.setdefault(row["round"], []).append(row)
    latest = max(by_round, default=0)
    return _responses(by_round.get(0, ())), _responses(by_round[latest] if latest else ())


def _responses(rows: Iterable[Mapping[str, Any]]) -> list[Response]:
    ordered = sorted(rows, key=lambda row: (row["cursor"], row["response_index"]))
    return [Response(row["response"], row["tokens"], row["finished"]) for row in ordered]
