"""Audit of each arm before any verdict: was the arm trained as its settings ask?

An audit covers the complete trials of an arm: those that have run all their rounds. An arm with a
fault has no verdict, because its reward says nothing about the settings under test.
docs/howto/verdict.md explains the checks.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_trainable.config import GRPOConfig, schedule
from grpo_trainable.telemetry.metrics import TIMED
from grpo_trainable.text import plural
from reports.parquet_reader import TrialFiles
from reports.records import ExperimentRecord, TrialRecord
from reports.series import lag_shares
from reports.summary import EQUAL_SAMPLES, median

LEAST_LAG = 0.5  # the lag of some group must exceed this share of the nominal lag
# Largest accepted difference between the mean length of the responses trained on and the mean
# length of all responses drawn (sampled), as a share of the mean length drawn.
LENGTH_CHANGE = 0.1
STANDARD_ERRORS = 2.0  # a difference in length below this number of standard errors may be chance

# Settings that decide where and how fast an arm runs, or how it is evaluated, but not what it
# learns. Arms that differ only in these settings may be equal bit for bit, as the arms `sync` and
# `colocated_k1` are.
OF_EXECUTION = (
    *("arm", "seed", "placement", "transport", "engine", "resources.", "callbacks."),
    *("checkpoint.", "eval.", "rollout.unit_prompts", "rollout.slots", "model.packing"),
    *("model.gradient_checkpointing", "optim.microbatch", "optim.microbatch_tokens"),
)
# Prefixes of metrics that show when and where work was done, not what was learned.
OF_WORK = (*TIMED, "fleet/", "count/", "buffer/", "version/")

CHECKS = (
    *("arm", "audit", "lag", "delivered lag", "without gradient", "tokens trained / drawn"),
    "equal to",
)
CHECKS_NOTE = (
    "Delivered lag: the mean over the groups, and in the second line of the cell the smallest and "
    "the largest lag. At a lag of L, the first L rounds have smaller lags. "
    "Without gradient: the share of the rounds that did not change the policy. Tokens: the mean "
    "length of the responses that were trained on, and of all responses that were drawn (sampled). "
    "Equal to: arms that learned the same, bit for bit, although they differ in settings that "
    "should change what an arm learns."
)
CONSEQUENCES = ("arm", "effective sample size", "discarded", "clipped", "weights bounded")
CONSEQUENCES_NOTE = (
    "These figures never fail an arm. They are means over the rounds of all seeds, and “-” "
    "means that an arm's objective does not clip ratios or does not bound weights. Effective "
    "sample size: computed from the importance weights of a gradient step, as a share of the "
    "step's responses. Discarded: the share of the requested groups that were dropped. Clipped: "
    "the share of the tokens whose ratios were clipped. Weights bounded: the share of the tokens "
    "whose importance weights were cut to a bound or set to 0."
)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Reason why an arm fails its audit."""

    check: str  # "lag", "gradient", "length", "identical", "samples" or "weights"
    reason: str  # a sentence without its period


@dataclass(frozen=True, kw_only=True)
class Audit:
    """Figures that show how an arm's complete trials were trained. Unknown figures are None."""

    arm: str
    seeds: Sequence[int]  # seeds of the complete trials; empty if there is nothing to audit yet
    lag: int  # nominal lag: the setting `lag`
    lags: Mapping[int, float]  # delivered lag -> share of the groups; empty if unknown
    ess_fraction: float | None  # effective sample size, as a share of a step's responses
    discarded: float | None  # share of the requested groups that were dropped
    trained_tokens: float | None  # mean length of the responses that rounds trained on
    drawn_tokens: float | None  # mean length of all responses sampled for those rounds
    clipped: float | None  # share of the tokens that were clipped
    weights_bounded: float | None  # share of the tokens whose importance weights were bounded
    without_gradient: float | None  # share of the rounds that did not change the policy
    identical: Sequence[str]  # arms that learned the same, although their settings differ
    faults: Sequence[Fault]


def audit_arms(
    experiment: ExperimentRecord, files: Mapping[str, TrialFiles], baseline: str | None
) -> dict[str, Audit]:
    """Audit every arm that has finished a round.

    Args:
        experiment: The experiment as it was read.
        files: Trial name -> figures from the trial's Parquet files.
        baseline: The arm that the others are compared with; None if there is none yet.
    """
    arms = experiment.complete_arms
    identical = _identical(arms)
    base = arms[baseline] if baseline else []
    found = {}
    for arm, trials in arms.items():
        trained, drawn = _lengths(trials)
        equal = identical[arm]
        # If the baseline, or an arm that should equal it, learned the same as another arm, only the
        # other arm has a fault.
        treated = not base or _differences(experiment.arms[arm][0].config, base[0].config)
        faults = [
            _lag_fault(trials),
            _gradient_fault(trials),
            _length_fault(trials),
            _identical_fault(trials, equal, arms) if treated else None,
            _samples_fault(trials, base),
            _weights_fault(trials, base),
        ]
        found[arm] = Audit(
            arm=arm,
            seeds=[trial.config.seed for trial in trials],
            lag=experiment.arms[arm][0].config.lag,
            lags=lag_shares(files[trial.name].lags for trial in trials),
            ess_fraction=_mean(trials, "off_policy/ess_fraction"),
            discarded=_average([_discarded(trial) for trial in trials]),
            trained_tokens=_average(trained),
            drawn_tokens=_average(drawn),
            clipped=_mean(trials, "loss/clip_fraction"),
            weights_bounded=_mean(trials, "loss/weights_bounded_fraction"),
            without_gradient=_average([_without_gradient(trial) for trial in trials]),
            identical=equal,
            faults=[fault for fault in faults if fault is not None],
        )
    return found


# ---- Lag -------------------------------------------------------------------------------------


def least_rounds(lag: int) -> int:
    """Return the smallest number of rounds in which a trial can deliver the nominal lag.

    Even with lag_mode=exact, the lag is always smaller than the number of rounds.
    """
    return math.floor(LEAST_LAG * lag) + 2 if lag else 1


def _lag_fault(trials: Sequence[TrialRecord]) -> Fault | None:
    """Return a fault if a trial's lag never exceeded `LEAST_LAG` times the nominal lag."""
    largest = {t.config.seed: max(t.column("lag/max"), default=math.inf) for t in trials}
    short = [t for t in trials if largest[t.config.seed] <= LEAST_LAG * t.config.lag]
    short = [trial for trial in short if trial.config.lag]
    if not short:
        return None
    config = short[0].config
    most = int(max(largest[trial.config.seed] for trial in short))
    few = config.rounds < least_rounds(config.lag)
    advice = "train more rounds" if few else "use lag_mode=exact"
    return Fault(
        check="lag",
        reason=f"lag={config.lag} was not delivered: no group was more than "
        f"{plural(most, 'round')} old in {_seeds(short)}; {advice}",
    )


# ---- Gradients -------------------------------------------------------------------------------


def _without_gradient(trial: TrialRecord) -> float | None:
    """Return the share of rounds whose gradient was zero, or that took no gradient step."""
    if trial.last("version/learner") == 0:
        return 1.0
    norms = trial.column("optim/grad_norm")
    return 1 - sum(norm > 0 for norm in norms) / len(trial.rows) if norms else None


def _gradient_fault(trials: Sequence[TrialRecord]) -> Fault | None:
    still = [trial for trial in trials if _without_gradient(trial) == 1]
    if not still:
        return None
    return Fault(
        check="gradient",
        reason=f"the policy never changed: all gradients were zero in {_seeds(still)}",
    )


# ---- Samples ---------------------------------------------------------------------------------


def _discarded(trial: TrialRecord) -> float | None:
    requested, dropped = trial.last("count/requested"), trial.last("count/dropped")
    return dropped / requested if requested and dropped is not None else None


def _lengths(trials: Sequence[TrialRecord]) -> tuple[list[float], list[float]]:
    """For each round, return the mean lengths of the responses trained on and the responses drawn.

    Only rounds with both lengths count. With replay, a round also trains on responses of earlier
    rounds, so its two lengths cannot be compared and are left out.
    """
    names = "response/length_mean", "response/drawn_length_mean"
    pairs = [
        [row[name] for name in names]
        for trial in trials
        if trial.config.buffer_capacity == 1
        for row in trial.rows
        if all(name in row for name in names)
    ]
    return [trained for trained, _ in pairs], [drawn for _, drawn in pairs]


def _length_fault(trials: Sequence[TrialRecord]) -> Fault | None:
    """Return a fault if discarded groups had longer or shorter responses than other groups.

    Values of `rollout.zero_advantage` other than `keep` ask for a selection of groups, so a
    difference in length is intended.
    """
    trained, drawn = _lengths(trials)
    if len(drawn) < 2 or trials[0].config.rollout.zero_advantage != "keep":
        return None
    differences = [own - all_ for own, all_ in zip(trained, drawn, strict=True)]
    mean, before = statistics.fmean(differences), statistics.fmean(drawn)
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    if abs(mean) <= max(LENGTH_CHANGE * before, STANDARD_ERRORS * error):
        return None
    kind = "long" if mean < 0 else "short"
    return Fault(
        check="length",
        reason=f"{kind} responses were discarded: the responses trained on had an average of "
        f"{before + mean:.1f} tokens, and all responses drawn had {before:.1f}",
    )


def _samples_fault(trials: Sequence[TrialRecord], base: Sequence[TrialRecord]) -> Fault | None:
    """Return a fault if an arm and the baseline trained on unequal numbers of samples."""
    own, theirs = (median([_samples(trial) for trial in own]) for own in (trials, base))
    if own is None or theirs is None or max(own, theirs) <= (1 + EQUAL_SAMPLES) * min(own, theirs):
        return None
    return Fault(
        check="samples",
        reason=f"it trained on {own:.0f} samples, and {base[0].arm} on {theirs:.0f}; --samples N "
        "trains every arm on N responses",
    )


def _weights_fault(trials: Sequence[TrialRecord], base: Sequence[TrialRecord]) -> Fault | None:
    """Return a fault if an arm and the baseline weight the parts of the reward differently."""
    weights = [trial.config.task.part_weights for trial in (*base, *trials)]
    if not base or all(own == weights[0] for own in weights):
        return None
    return Fault(
        check="weights",
        reason="its task.reward_weights differ from those of "
        f"{base[0].arm}, so their rewards measure different things",
    )


def _samples(trial: TrialRecord) -> float | None:
    """Count the responses that were trained on, and those that the settings deliberately leave out.

    Unless `rollout.zero_advantage` is `keep`, a trial leaves out groups with equal rewards. With
    replay, a trial draws groups from the buffer and may never draw some of them. Both kinds of
    groups are counted, because leaving them out is intended.
    """
    groups, config = trial.last("count/trained"), trial.config
    if groups is None:
        return None
    names = []
    if config.rollout.zero_advantage != "keep":
        names.append("count/dropped_zero_advantage")
    if config.buffer_capacity > 1:
        names += ["count/dropped_stale", "count/waiting"]
    left_out = sum(trial.last(name) or 0.0 for name in names)
    # Resampling draws more groups than planned, so the planned number is the limit.
    planned = config.rounds * schedule.prompts_per_round(config)
    return max(groups, min(groups + left_out, planned)) * config.rollout.group_size


# ---- Identical arms --------------------------------------------------------------------------

Learned = list[dict[str, float]]


def _identical(arms: Mapping[str, Sequence[TrialRecord]]) -> dict[str, list[str]]:
    """Map each arm to others that learned the same as it, despite settings that should matter.

    Two arms learned the same if all their metrics, except those in `OF_WORK`, agree bit for bit in
    every round of every shared seed.
    """
    learned = {arm: {t.config.seed: _learned(t) for t in trials} for arm, trials in arms.items()}
    found: dict[str, list[str]] = {arm: [] for arm in arms}
    for arm, own in learned.items():
        for other, theirs in learned.items():
            shared = own.keys() & theirs.keys()
            if (
                arm != other
                and shared
                and all(own[seed] and own[seed] == theirs[seed] for seed in shared)
                and _differences(arms[arm][0].config, arms[other][0].config)
            ):
                found[arm].append(other)
    return found


def _learned(trial: TrialRecord) -> Learned:
    """Return a trial's rows without metrics of time and work.

    The list is empty if no row has a gradient norm.
    """
    if not trial.column("optim/grad_norm"):
        return []  # the other metrics do not show what was learned
    return [
        {name: row[name] for name in row if "/" in name and not name.startswith(OF_WORK)}
        for row in trial.rows
    ]


def _differences(one: GRPOConfig, other: GRPOConfig) -> list[str]:
    """Return the settings that differ between two arms and should change what the arms learn."""
    first, second = one.in_effect, other.in_effect
    without_effect = {"lag_mode"} if one.lag == other.lag == 0 else set()
    without_effect |= {"k_mode"} if one.k == other.k == 1 else set()
    return [
        key
        for key in sorted(first.keys() | second.keys())
        if first.get(key) != second.get(key)
        and key not in (*OF_EXECUTION, *without_effect)
        and not key.startswith(tuple(name for name in OF_EXECUTION if name.endswith(".")))
    ]


def _identical_fault(
    trials: Sequence[TrialRecord],
    others: Sequence[str],
    arms: Mapping[str, Sequence[TrialRecord]],
) -> Fault | None:
    if not others:
        return None
    keys = _differences(trials[0].config, arms[others[0]][0].config)
    differ = "differs" if len(keys) == 1 else "differ"
    return Fault(
        check="identical",
        reason=f"it learned the same as {' and '.join(others)}, bit for bit, although "
        f"{', '.join(keys)} {differ}",
    )


# ---- Text and JSON ---------------------------------------------------------------------------


def check_rows(audits: Mapping[str, Audit]) -> list[tuple[str, ...]]:
    """Return the rows of the table of checks, with one cell for each title of `CHECKS`."""
    return [_check_row(audit) for audit in audits.values()]


def consequence_rows(audits: Mapping[str, Audit]) -> list[tuple[str, ...]]:
    """Return the rows of the table of consequences, with one cell per title of `CONSEQUENCES`."""
    shares = {
        arm: (audit.ess_fraction, audit.discarded, audit.clipped, audit.weights_bounded)
        for arm, audit in audits.items()
    }
    return [(arm, *map(_percent, own)) for arm, own in shares.items()]


def passed(audits: Mapping[str, Audit], arms: Collection[str]) -> str:
    """Return a sentence about the arms that passed, or an empty string if none did.

    Args:
        audits: The audit of each arm that has begun.
        arms: All arms, in the order in which the sentence names them.
    """
    sound = [arm for arm in arms if arm in audits and audits[arm].seeds and not audits[arm].faults]
    if not sound:
        return ""
    whose = "its" if len(sound) in (1, len(arms)) else "their"
    who = "Every arm" if len(sound) == len(arms) else ", ".join(sound)
    return f"{who} passed {whose} audit (lag, gradients, lengths, no unexpected copies, samples)."


def reasons(audits: Mapping[str, Audit]) -> list[str]:
    """Return a sentence for each fault of each arm."""
    return [f"{a.arm} fails its audit: {f.reason}." for a in audits.values() for f in a.faults]


def audit_data(audit: Audit) -> dict[str, Any]:
    """Return an audit as JSON data, with None for unknown values."""
    return {
        "passed": not audit.faults if audit.seeds else None,
        "seeds": list(audit.seeds),
        "faults": [{"check": fault.check, "reason": fault.reason} for fault in audit.faults],
        "lag": audit.lag,
        "lags": {str(lag): share for lag, share in audit.lags.items()} or None,
        "ess_fraction": audit.ess_fraction,
        "discarded": audit.discarded,
        "trained_tokens": audit.trained_tokens,
        "drawn_tokens": audit.drawn_tokens,
        "clipped": audit.clipped,
        "weights_bounded": audit.weights_bounded,
        "without_gradient": audit.without_gradient,
        "identical": list(audit.identical),
    }


def _check_row(audit: Audit) -> tuple[str, ...]:
    lengths = [audit.trained_tokens, audit.drawn_tokens]
    failed = ", ".join(fault.check for fault in audit.faults)
    verdict = f"failed: {failed}" if failed else "passed" if audit.seeds else "-"
    return (
        audit.arm,
        verdict,
        str(audit.lag),
        _shown_lags(audit.lags),
        _percent(audit.without_gradient),
        "-" if None in lengths else " / ".join(f"{length:.1f}" for length in lengths),
        ", ".join(audit.identical) or "-",
    )


def _shown_lags(lags: Mapping[int, float]) -> str:
    """Return the mean lag, with its range if lags differ: `0.90 (0 to 1)`."""
    if not lags:
        return "-"
    mean = sum(lag * share for lag, share in lags.items())
    return f"{mean:.2f}" + (f" ({min(lags)} to {max(lags)})" if len(lags) > 1 else "")


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _seeds(trials: Sequence[TrialRecord]) -> str:
    seeds = [str(trial.config.seed) for trial in trials]
    return f"seed{'s' * (len(seeds) > 1)} {', '.join(seeds)}"


def _mean(trials: Sequence[TrialRecord], name: str) -> float | None:
    """Return the mean of a metric over the rounds of all trials."""
    return _average([own for trial in trials if trial.has(name) for own in trial.column(name)])


def _average(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None
