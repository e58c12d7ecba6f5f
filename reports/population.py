"""The lineage of a population: the settings of each member, and the members that it copied.

PBT makes a member with a low reward copy the policy and the settings of a better member, and then
change the settings. So members depend on each other, and no single configuration describes a
member.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from grpo_trainable.config import flatten, shown
from reports.records import Stretch, TrialRecord

HEADER = ("member", "rounds", "seed", "settings", "copied from", "held-out reward")
SAID = (
    "The members of a population copy each other: a member with a low held-out reward takes over "
    "the policy and the settings of a better one, then changes the settings. So members are not "
    "independent, and no interval is computed."
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
    """Yield each stretch of a trial with its last round."""
    stretches = trial.stretches or [Stretch(first=1, config=trial.config, copied_from=None)]
    ends = [stretch.first - 1 for stretch in stretches[1:]]
    yield from zip(stretches, [*ends, trial.round], strict=True)


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
    """Return the reward at the latest evaluation in a range of rounds, with its round."""
    found = [(round_, reward) for round_, reward, _ in trial.evaluated() if first <= round_ <= last]
    return f"{found[-1][1]:.3f} (round {found[-1][0]})" if found else "-"
