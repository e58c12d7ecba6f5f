"""A search space: named arms, resolved to complete configs before anything starts."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from grpo_trainable.config import (
    CHECKS,
    ConfigError,
    GRPOConfig,
    flatten,
    of_other_placement,
    schedule,
    set_dotted,
    shown,
)
from grpo_trainable.text import did_you_mean, plural
from search_spaces.columns import ALWAYS, Column

NAME = r"\w[\w.+-]*"  # names become parts of directory names
MAX_LABEL = 64  # maximum number of characters in the label of a trial
CHANGED = "+"  # begins the part of a label that names a changed setting
LENGTH = ("rounds", "eval.every")  # settings whose changes are not part of a label


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """A question and its arms. `arms` maps each label to the arm's settings, by dotted key.

    Raises:
        ValueError: A name cannot be part of a directory's name, there are no arms, an arm is not a
            mapping, or two columns have the same name.
    """

    name: str
    question: str  # one line
    arms: Mapping[str, Mapping[str, Any]]
    columns: Sequence[Column] = ()  # columns that the report shows in addition to the reward
    # Function of an arm's label: returns what this machine lacks to run the arm, or None.
    missing: Callable[[str], str | None] = lambda arm: None

    def __post_init__(self) -> None:
        is_grid = isinstance(self.arms, Mapping)
        if not is_grid or not all(isinstance(keys, Mapping) for keys in self.arms.values()):
            raise ValueError(f"search space {self.name}: arms must map labels to their settings")
        for name in (self.name, *self.arms):
            if not re.fullmatch(NAME, name):
                raise ValueError(
                    f"{name!r}: names of spaces and arms may only contain letters, digits and "
                    ". _ + -"
                )
        if not self.arms:
            raise ValueError(f"search space {self.name} has no arms; add at least one")
        names = [column.name for column in self.columns]
        for name in names:
            if name in ALWAYS:
                raise ValueError(
                    f"search space {self.name}: the column {name} is built in; choose another name"
                )
            if names.count(name) > 1:
                raise ValueError(f"search space {self.name}: two columns are named {name}")

    @property
    def asked(self) -> Question:
        """The question, arms and columns, in the form that a report needs."""
        return Question(text=self.question, arms=tuple(self.arms), columns=tuple(self.columns))

    def not_available(self) -> dict[str, str]:
        """Return the arms that cannot run on this machine, each with the reason."""
        missing = {arm: self.missing(arm) for arm in self.arms}
        return {arm: reason for arm, reason in missing.items() if reason is not None}

    def trials(
        self,
        fixed: Mapping[str, Any],
        seeds: Sequence[int],
        without: Collection[str] = (),
        samples: int | None = None,
    ) -> list[GRPOConfig]:
        """Return the config of every trial, in the order of the arms, then of the seeds.

        If `fixed` changes a setting of an arm, the label says so: arm `colocated_k1` with k=4 has
        the label `colocated_k1+k_4`. Trials that are equal except for their label are merged. The
        merged trial has the label of an arm that `fixed` does not change, if there is one.

        Args:
            fixed: Settings that override the settings of all arms. A setting of `resources` that
                only one placement reads is given only to the arms with this placement, if there are
                any.
            seeds: The seeds of each arm.
            without: Arms to leave out, unless `fixed` names arms.
            samples: The number of responses in each trial, in place of a number of rounds.

        Raises:
            ConfigError: A trial is invalid, `fixed` names an arm that the space does not have, or
                `samples` is not a whole number of rounds for some arm.
        """
        arms = self._chosen_arms(fixed, without)
        concerning = {arm: self._concerning(arm, arms, fixed) for arm in arms}
        trials = [self._trial(arm, seed, concerning[arm]) for arm in arms for seed in seeds]
        if samples is not None:
            lengths = at_equal_samples(trials, samples, evaluate="eval.every" not in fixed)
            # Build the trials again, because defaults may depend on the number of rounds.
            trials = [
                self._trial(trial.arm, trial.seed, {**concerning[trial.arm], **length})
                for trial, length in zip(trials, lengths, strict=True)
            ]
        merged: dict[str, list[GRPOConfig]] = {}
        for trial in trials:
            same = {**flatten(trial.to_dict()), "arm": None}
            merged.setdefault(repr(sorted(same.items())), []).append(trial)
        return [self._labelled(equal, fixed) for equal in merged.values()]

    def _labelled(self, equal: Sequence[GRPOConfig], fixed: Mapping[str, Any]) -> GRPOConfig:
        """Return one of several equal trials. Its label names the changed settings of its arm."""
        changed = {
            trial.arm: [
                f"{CHANGED}{key.rpartition('.')[2]}_{_for_label(fixed[key])}"
                for key, value in self.arms[trial.arm].items()
                if key not in LENGTH and fixed.get(key, value) != value
            ]
            for trial in equal
        }
        trial = min(equal, key=lambda trial: len(changed[trial.arm]))
        label = "".join([trial.arm, *changed[trial.arm]])[:MAX_LABEL]
        return trial if label == trial.arm else replace(trial, arm=label)

    def arm_of(self, label: str) -> str:
        """Return the arm of a trial with this label."""
        named = (arm for arm in self.arms if label == arm or label.startswith(f"{arm}{CHANGED}"))
        return max(named, key=len)

    def _trial(self, arm: str, seed: int, fixed: Mapping[str, Any]) -> GRPOConfig:
        data: dict[str, Any] = {}
        for key, value in {"seed": seed, **self.arms[arm], **fixed, "arm": arm}.items():
            set_dotted(data, key, value)
        try:
            return GRPOConfig.from_dict(data)
        except ConfigError as error:
            raise ConfigError(f"{error} (arm {arm} of {self.name})") from None

    def _concerning(
        self, arm: str, arms: Sequence[str], fixed: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return `fixed` without the resources that only arms with another placement reserve.

        So one command can give a machine's GPUs to arms of both placements.
        """

        def reserves(name: str, key: str) -> bool:
            chosen = {**self.arms[name], **fixed}
            return not of_other_placement(key, chosen.get("placement", CHECKS["placement"].default))

        return {
            key: value
            for key, value in fixed.items()
            if reserves(arm, key) or not any(reserves(other, key) for other in arms)
        }

    def named(self, fixed: Mapping[str, Any]) -> list[str]:
        """Return the arms that `fixed` names, such as `sync,async_k1`, in the space's order.

        Raises:
            ConfigError: `fixed` names an arm that the space does not have.
        """
        wanted = [arm.strip() for arm in str(fixed["arm"]).split(",")] if "arm" in fixed else []
        for arm in wanted:
            self.refuse_unknown(arm, f"arm={arm}")
        return [arm for arm in self.arms if arm in wanted]

    def refuse_unknown(self, arm: str, given: str) -> None:
        """Raise a ConfigError that begins with `given`, if `arm` is not an arm of this space."""
        if arm not in self.arms:
            hint = did_you_mean(arm, self.arms) or f"valid: {', '.join(self.arms)}"
            raise ConfigError(f"{given}: not an arm of {self.name}; {hint}")

    def _chosen_arms(self, fixed: Mapping[str, Any], without: Collection[str]) -> list[str]:
        return self.named(fixed) or [arm for arm in self.arms if arm not in without]


def _for_label(value: Any) -> str:
    """Return a setting's value in characters that the label of a trial may have."""
    return re.sub(r"[^\w.-]", "-", shown(value).rpartition("/")[2]).strip("-")


def at_equal_samples(
    trials: Sequence[GRPOConfig], samples: int, *, evaluate: bool
) -> list[dict[str, int]]:
    """Return the settings that give each trial `samples` responses.

    Args:
        trials: The trials to change.
        samples: The number of responses in each trial.
        evaluate: Also evaluate all trials after equal numbers of responses. The number of
            evaluations stays the same, unless a round of some arm is longer than the interval
            between two evaluations. In that case, there are fewer evaluations.

    Raises:
        ConfigError: `samples` responses are not a whole number of rounds for some trial.
    """
    common = math.lcm(*(schedule.responses_per_round(trial) for trial in trials))
    if samples % common:
        below, above = samples // common * common, -(-samples // common) * common
        rounds = sorted({schedule.responses_per_round(trial) for trial in trials})
        seeds = (
            f"; for {plural(samples, 'seed')} of each arm use --num-samples {samples}"
            if samples < rounds[0]
            else ""
        )
        raise ConfigError(
            f"{plural(samples, 'sample')}: the arms have {', '.join(map(str, rounds))} responses "
            "per round, and each needs a whole number of rounds; nearest valid: "
            f"{f'{below} and ' if below else ''}{above}{seeds}"
        )
    evaluations = min(max(1, trial.rounds // trial.eval.every) for trial in trials)
    between = math.ceil(samples / evaluations / common) * common
    return [
        {
            "rounds": samples // schedule.responses_per_round(trial),
            **({"eval.every": between // schedule.responses_per_round(trial)} if evaluate else {}),
        }
        for trial in trials
    ]


def in_blocks(trials: Sequence[GRPOConfig]) -> list[GRPOConfig]:
    """Return the same trials in randomised blocks: all trials of one seed, then of the next seed.

    The order of the arms within a block is random but depends only on the seed. So if the machine
    slows down, no arm is affected more than the others.
    """
    blocks: dict[int, list[GRPOConfig]] = {}
    for trial in trials:
        blocks.setdefault(trial.seed, []).append(trial)
    for seed, block in blocks.items():
        random.Random(f"block {seed}").shuffle(block)
    return [trial for block in blocks.values() for trial in block]


# ---- The part of a space that a report needs -----------------------------------------------------


MAX_FACTOR = 1e38  # a metric times this factor is still a finite number


@dataclass(frozen=True, kw_only=True)
class Question:
    """The question of a space with its arms and columns, as stored for reports."""

    text: str  # one line
    arms: Sequence[str]  # in the order in which tables list them
    columns: Sequence[Column]

    def to_dict(self) -> dict[str, Any]:
        """Return the question as plain data."""
        columns = [asdict(column) for column in self.columns]
        return {"text": self.text, "arms": list(self.arms), "columns": columns}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Question:
        """Return the question in `data`, after checking it: anybody may have written the data.

        Raises:
            ValueError: The data is not a question. The error is one line.
        """
        try:
            columns = tuple(Column(**column) for column in data["columns"])
            arms = tuple(data["arms"])
            texts = (data["text"], *arms)
            texts += tuple(text for c in columns for text in (c.name, c.title))
            if not all(isinstance(text, str) for text in texts):
                raise TypeError("its text, an arm, or a column's name or title is not a string")
            if not all(isinstance(column.factor, int | float) for column in columns):
                raise TypeError("a factor is not a number")
            if not all(abs(column.factor) < MAX_FACTOR for column in columns):
                raise TypeError(f"a factor is not below {MAX_FACTOR:g}")
            return cls(text=data["text"], arms=arms, columns=columns)
        except (TypeError, KeyError) as error:
            raise ValueError(f"not a question ({type(error).__name__}: {error})") from None
