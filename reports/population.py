"""The lineage of a population: the settings of each member, and the members that it copied.

PBT makes a member with a low reward copy the policy and the settings of a better member, and then
change the settings. So members depend on each other, and no single configuration describes a
member.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from grpo_trainable.config import flatten, schedule, shown
from reports.records import Stretch, TrialRecord

HEADER = ("member", "rounds", "seed", "settings", "copied from", "held-out reward")
SAID = (
    "The members of a population copy each other: a member with a low held-out reward takes over "
    "the policy and the settings of a better one, then changes the settings. So members are not "
    "independent, and no interval is computed. A member that copies another member at a later "
    "round skips the rounds in between. In the table of arms, a member's samples are only those "
    "that it trained on itself. After a copy, its wall-clock time, device-hours and speed, and its "
    "samples on the axes of plots, count the copied member's rounds up to the copy instead of its "
    "own."
)


def lineage(trials: Sequence[TrialRecord]) -> list[tuple[str, ...]]:
    """Return a row for each stretch of each member, with one cell for each title of `HEADER`.

    A stretch is a range of rounds with the same settings.
    """
    labels = {trial.name: trial.label for trial in trials}
    varied = varied_settings(trials)

    def row(trial: TrialRecord, stretch: Stretch, last: int) -> tuple[str, ...]:
        settings = settings_of(stretch, varied).items()
        return (
            trial.label,
            f"{stretch.first}-{last}" if stretch.first < last else f"{last}",
            f"{stretch.config.seed}",
            ", ".join(f"{key}={short_value(value)}" for key, value in settings) or "-",
            _origin(stretch, labels),
            _reward(trial, stretch.first, last),
        )

    return [row(trial, *place) for trial in trials for place in stretches_of(trial)]


def stretches_of(trial: TrialRecord) -> Iterator[tuple[Stretch, int]]:
    """Yield each stretch of a trial with its last round.

    If a member copied a trial that was at a later round, the member has no rows for the rounds that
    it skipped.
    """
    stretches = trial.stretches or [Stretch(first=1, config=trial.config, copied_from=None)]
    ends = [trial.round_before(stretch.first) for stretch in stretches[1:]]
    yield from zip(stretches, [*ends, trial.round], strict=True)


def groups_of_donors(trial: TrialRecord, members: Mapping[str, TrialRecord]) -> float | None:
    """Count the groups in `count/trained` that copied trials, but not this one, have trained on.

    A copy replaces the member's count with the count of the copied trial, the donor. With
    asynchronous PBT, the donor may have trained on more groups or fewer.

    Args:
        trial: The member.
        members: name -> member, for all members of the population.

    Returns:
        The number of groups. It is None if the member got groups from an unknown donor, or if a
        donor's row at the copied round is missing or was replaced after the copy.
    """
    groups = 0.0
    for number, stretch in enumerate(trial.stretches):
        own = trial.groups_after(trial.round_before(stretch.first))
        if stretch.copied_from is None:
            after = trial.groups_after(stretch.first)
            most = schedule.prompts_per_round(stretch.config)
            if number and (own is None or after is None or after - own > most):
                return None
            continue
        donor = members.get(stretch.copied_from)
        copied = donor and donor.groups_after(stretch.first - 1)
        if donor is None or copied is None or own is None:
            return None
        if _reported(donor, stretch.first - 1) > _reported(trial, stretch.first):
            return None
        groups += copied - own
    return groups


def _reported(trial: TrialRecord, round_: int) -> float:
    """Return the time of a round's row, in seconds since 1970, or 0 if it is unknown."""
    row = trial.row_of(round_)
    return 0.0 if row is None else row.get("timestamp", 0.0)


def varied_settings(trials: Sequence[TrialRecord]) -> list[str]:
    """Return the settings, other than arm and seed, that differ between stretches."""
    every = [flatten(s.config.to_dict()) for trial in trials for s in trial.stretches]
    keys = dict.fromkeys(key for flat in every for key in flat if key not in ("arm", "seed"))
    return [key for key in keys if any(flat.get(key) != every[0].get(key) for flat in every)]


def settings_of(stretch: Stretch, keys: Sequence[str]) -> dict[str, Any]:
    """Return the values of some settings in a stretch."""
    flat = flatten(stretch.config.to_dict())
    return {key: flat.get(key) for key in keys}


def short_value(value: Any) -> str:
    """Return the value of a setting, with three digits if it is a float."""
    return f"{value:.3g}" if isinstance(value, float) else shown(value)


def _origin(stretch: Stretch, labels: Mapping[str, str]) -> str:
    """Return the member copied at the start of a stretch, or a dash for the first stretch."""
    if stretch.first == 1:
        return "-"
    donor = labels.get(stretch.copied_from or "", "a member that is not known,")
    return f"{donor} after round {stretch.first - 1}"


def _reward(trial: TrialRecord, first: int, last: int) -> str:
    """Return the reward and the round of the latest evaluation in a range of rounds."""
    found = [(round_, reward) for round_, reward, _ in trial.evaluated() if first <= round_ <= last]
    return f"{found[-1][1]:.3f} (round {found[-1][0]})" if found else "-"
