"""The menu as text: a paragraph, a table with notes, and JSON data."""

from __future__ import annotations

import math
import os
import shlex
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from grpo_trainable import command_line
from grpo_trainable.command_line import align
from grpo_trainable.text import joined, plural, written
from grpo_trainable.tools.evaluation.settings import assignment
from reports import STORAGE, audit
from reports.contrasts import Contrast
from reports.intervals import MOST_SEEDS, POWER
from reports.margin_tests import ALPHA, BETTER, FIRST_LOOK, NO_WORSE, UNDECIDED, WORSE, Judgement
from reports.menu import (
    NO_VERDICT,
    Menu,
    MenuError,
    MenuRow,
    Noise,
    Price,
    menu_of,
    needs_max_seeds,
    price_of,
    recorded_options,
    refuse_stopped,
    refuse_waiting,
)
from reports.parquet_reader import TrialFiles
from reports.records import ExperimentRecord
from reports.summary import COUNTED, MARK, Comparison, on_equal_devices
from reports.verdicts import faster

if TYPE_CHECKING:
    from grpo_trainable.storage.object_store import AnyPath

REWARD, RATIO = "{:+.3f}", "{:.2f}x"
PARETO = "†"  # follows the name of an arm in the Pareto set
# The costs of more prompts and of more seeds count as the same if their ratio differs from 1 by at
# most this number.
ALIKE = 0.1
LITTLE = 0.05  # smaller shares of a variance do not count
MAX_SEEDS = 20  # --max-seeds in a suggested command, unless there are already more seeds
HEADER = (
    *("arm", "speed-up", "at equal cost", "reward difference", "verdict", "seeds"),
    *("power if equal", "to decide"),
)
MAY_BE_EMPTY = ("speed-up", "at equal cost", "power if equal", "to decide")
EMPTY = {"-", MARK}


def menu_or_reason(
    experiment: ExperimentRecord,
    comparison: Comparison,
    files: Mapping[str, TrialFiles],
    place: AnyPath,
) -> tuple[Menu | None, str | None]:
    """Return the menu with the recorded margin, or a line that says why there is none.

    Args:
        experiment: The experiment as it was read.
        comparison: The comparison of its arms.
        files: Figures from the trials' Parquet files, by trial name.
        place: The directory of the experiment, for the command that the line suggests.

    Returns:
        The menu and None, or None and the line. If the experiment has one arm and no margin, both
        are None.
    """
    try:
        options = recorded_options(experiment.description)
        if options.has_margin:
            return menu_of(experiment, comparison, files, options), None
        if len(comparison.arms) < 2:
            return None, None
        refuse_stopped(experiment)
        refuse_waiting(experiment)
    except MenuError as error:
        return None, f"No verdicts: {error}."
    which = "which arms lose less held-out reward than a margin that you choose, such as 0.03"
    seeds = max(len(trials) for trials in experiment.arms.values())
    if seeds < 2:
        return None, f"To see {which}, run at least {FIRST_LOOK} seeds, the same for every arm."
    parts = [*command_line.command("verdict"), str(place), "--margin", "0.03"]
    if not needs_max_seeds(experiment):
        return None, f"To see {which}: {shlex.join(parts)}"
    parts += ["--max-seeds", str(max(seeds, MAX_SEEDS))]
    return None, (
        f"To see {which}, give the maximum number of seeds, as you chose it before you first saw "
        f"results, for example: {shlex.join(parts)}"
    )


def paragraph(menu: Menu) -> list[str]:
    """Return the sentences that answer whether an arm can replace the baseline."""
    said = []
    if _all_disturbed(menu):
        said.append(
            "Speeds cannot be compared, because other processes used too much of the machine. To "
            "compare them, run the next experiment on an idle machine."
        )
    else:
        said += _faster(menu)
    said.append(
        f"Can another arm replace {menu.baseline.arm} if a loss of up to {menu.margin:.3g} in "
        f"held-out reward{_relative(menu)} is acceptable?"
    )
    for verdict, opening in (
        (BETTER, "Yes, and the reward is higher"),
        (NO_WORSE, "Yes, any loss is below the margin"),
        (WORSE, "No, the loss is above the margin"),
    ):
        arms = [_named(menu, row) for row in menu.others if row.verdict == verdict]
        said += [f"{opening}: {', '.join(arms)}."] if arms else []
    undecided = [row for row in menu.others if row.verdict == UNDECIDED]
    if undecided:
        brackets = any(row.judgement is not None for row in undecided)
        opening = f"Undecided{' (brackets: difference in reward)' if brackets else ''}"
        said.append(f"{opening}: {', '.join(map(_with_difference, undecided))}.")
        said += _clear_but_undecided(menu)
        said += _prices(menu)
    said += _without_verdict(menu)
    return [*said, *menu.about_exact_lag]


def _faster(menu: Menu) -> list[str]:
    """Name the faster arms; empty if it is unknown whether an arm is faster than the baseline."""
    timed = [row for row in menu.others if not row.exact_lag and not row.faults]
    speeds = {
        row.arm: row.speed
        for row in timed
        if row.speed is not None and not row.speed.counted_disturbed
    }
    is_faster = any(own.told_apart and own.more for own in speeds.values())
    if not speeds or (len(speeds) < len(timed) and not is_faster):
        return []
    costs = {row.arm: row.cost for row in timed if row.cost is not None}
    base = menu.baseline.arm
    return [
        faster(speeds, costs, base),
        *on_equal_devices(speeds, base, menu.experiment.arms),
    ]


def _clear_but_undecided(menu: Menu) -> list[str]:
    """Name the undecided arms whose rewards differ clearly, in a sentence for each direction."""
    said = []
    for more, side in ((True, "above"), (False, "below")):
        found = [
            row.arm
            for row in menu.others
            if row.reward is not None and _is_clear(row) and row.reward.more is more
        ]
        if not found:
            continue
        are, they = ("is", "it loses") if len(found) == 1 else ("are", "they lose")
        doubt = (
            "allow no verdict"
            if more
            else f"do not show whether {they} more than {menu.margin:.3g}"
        )
        said.append(
            f"By the report's list “Which arms differ”, {joined(found)} {are} "
            f"clearly {side} {menu.baseline.arm} in reward, but the stricter bounds of the menu "
            f"{doubt}."
        )
    return said


def table(menu: Menu) -> str:
    """Return the paragraph, the table, the notes and the arms that passed the audit, as text."""
    first, *rest = (_filled(part) for part in (" ".join(paragraph(menu)), *notes(menu)))
    passed = audit.passed(menu.audits, [row.arm for row in menu.rows])
    audited = ["", _filled(f"{passed} The report has the figures.")] if passed else []
    return "\n".join([first, "", align(shown(menu)), *rest, *audited])


def _filled(text: str) -> str:
    """Wrap a note, but not the command on its second line."""
    prose, newline, command = text.partition("\n")
    return textwrap.fill(prose, 100, break_on_hyphens=False) + newline + command


def rows(menu: Menu) -> list[tuple[str, ...]]:
    """Return the rows of the table, the baseline first."""
    return [_row(menu, row) for row in menu.rows]


def shown(menu: Menu) -> list[tuple[str, ...]]:
    """Return the header and the rows without the columns of `MAY_BE_EMPTY` that have no figure."""
    columns = zip(HEADER, *rows(menu), strict=True)
    kept = [own for own in columns if own[0] not in MAY_BE_EMPTY or not EMPTY.issuperset(own[1:])]
    return list(zip(*kept, strict=True))


def notes(menu: Menu) -> list[str]:
    """Return the notes below the table, one paragraph each."""
    arms = menu.design.arms
    several = (
        f" (Holm's correction over {arms} arms, so a difference need not be in the middle of its "
        "bounds)"
        if arms > 1
        else ""
    )
    if menu.design.anytime:
        looks = f"you test after each seed from {FIRST_LOOK} to {menu.design.seeds} (--max-seeds)"
    else:
        looks = f"you test once, after all planned seeds ({menu.design.seeds})"
    has_bounds = any(row.judgement and row.judgement.low is not None for row in menu.others)
    bounds = (
        f", with one-sided {1 - ALPHA:.0%} bounds{several}. The bounds are valid if {looks}"
        if has_bounds
        else ""
    )
    told = [
        f"Reward difference: the arm's held-out reward minus the reward of {menu.baseline.arm}, "
        f"mean over the seeds{bounds}. No worse: the lower bound is above "
        f"{written(-menu.margin, REWARD)}. Better: the lower bound is above 0. Worse: the upper "
        f"bound is below {written(-menu.margin, REWARD)}. Undecided: none of these."
        f"{_said_of_pareto_set(menu)}",
        *_said_of_undecided(menu),
    ]
    if any(_is_single(row) for row in menu.others):
        told.append(
            "One seed gives no verdict, and does not show how many seeds a verdict needs. Run at "
            f"least {FIRST_LOOK} seeds: {_in_own_tuner(menu, FIRST_LOOK)}."
            if menu.experiment.own_tuner
            else "One seed gives no verdict, and does not show how many seeds a verdict needs. Run "
            f"at least {FIRST_LOOK} seeds: launch/tune.py --extend --num-samples {FIRST_LOOK}, "
            "with the --name and --storage of this experiment."
        )
    told += _said_of_disturbed_rounds(menu)
    if any(MARK in cells for cells in shown(menu)):
        told.append(f"{MARK}: other processes disturbed too many rounds to compare this speed.")
    told += [
        f"{row.arm} has no completed seed in common with {menu.baseline.arm}."
        for row in menu.others
        if row.judgement is None and not row.faults
    ]
    if early := [f"{row.ended_early} of {row.arm}" for row in menu.rows if row.ended_early]:
        told.append(
            f"Trials that failed or were stopped do not count: {', '.join(early)}. If they ended "
            "because they trained badly, the reward of their arm looks too high."
        )
    noise = {
        row.arm: row.noise
        for row in menu.others
        if row.noise is not None and _is_undecided(row) and _may_be_reduced(row)
    }
    return [*told, *_said_of_noise(menu, noise), *_said_of_more_seeds(menu)]


def _said_of_undecided(menu: Menu) -> list[str]:
    """Explain the columns that only undecided arms have; empty if there is no such arm."""
    if "to decide" not in shown(menu)[0]:
        return []
    seeds = "further seeds" if menu.design.may_grow else "seeds of a new experiment"
    return [
        "Power if equal: the chance of the verdict “no worse” if the arm truly equals the "
        f"baseline. To decide: the number of {seeds} that would lead to a decision in "
        f"{POWER:.0%} of experiments if the arm truly differs by the observed difference, and the "
        "time that the trials of the arm and of the baseline with these seeds would take. Such "
        "times and device-hours include evaluations and checkpoints, but not the start of trials."
    ]


def _said_of_more_seeds(menu: Menu) -> list[str]:
    """Say how to run the seeds that the column “to decide” counts."""
    needed = _seeds_needed(menu)
    if not needed:
        return []
    most, experiment = max(needed.values()), menu.experiment
    if menu.design.may_grow:
        if experiment.own_tuner:
            missing = max(row.judgement.seeds_missing or 0 for row in menu.others if row.judgement)
            return [f"To run these seeds: {_in_own_tuner(menu, missing)}."]
        told = (
            f"To run these seeds: launch/tune.py --extend --num-samples {most}, with the --name "
            "and --storage of this experiment."
        )
        more = [row.arm for row in menu.others if needed.get(row.arm, 0) < most]
        if more:
            told += (
                f" This command includes {plural(most, 'seed')} of {joined(more)}, so it takes "
                "longer than the times under “to decide”."
            )
        return [told]
    told = (
        "A fixed number of seeds allows only one test, which has been made, so “to decide” counts "
        "the seeds of a new experiment."
    )
    if experiment.own_tuner:
        return [f"{told} To run these seeds: {_in_own_tuner(menu, most)}."]
    run = _arms_to_run(menu)
    repeated = _repeated(menu)
    also = f", also of {joined(repeated)} to check the difference in reward" if repeated else ""
    told += f" The following command runs {plural(most, 'seed')} of each of its arms{also}."
    price = _price_to_decide(menu)
    together = experiment.description.get("max_concurrent")
    if price is not None:
        told += f" One after another, its trials would take {_cost(price)}."
    if price is not None and isinstance(together, int) and together > 1:
        trials = most * (1 + len(run))
        waves = math.ceil(trials / together)
        overlapped = replace(price, minutes=price.minutes * waves / trials)
        told += f" It runs {together} at a time, so expect about {_time(overlapped)}."
    if price is not None and price.disturbed:
        told += " These times are rough, because other processes slowed some of the trials."
    told += _with_more_prompts(menu, needed)
    storage = "" if _in_default_storage(menu) else " (add --storage, as for this experiment)"
    return [f"{told} To run the new experiment{storage}:\n{_new_experiment(menu, run, most)}"]


def _seeds_needed(menu: Menu) -> dict[str, int]:
    """Return the total number of seeds that a decision needs, for each undecided arm."""
    return {
        row.arm: row.judgement.seeds_needed
        for row in menu.others
        if row.judgement is not None
        and row.judgement.seeds_missing
        and row.judgement.seeds_needed is not None
    }


def _with_more_prompts(menu: Menu, needed: Mapping[str, int]) -> str:
    """If more prompts in the last evaluation are cheaper, say how many seeds are then enough.

    Args:
        menu: The menu.
        needed: The number of seeds that a decision needs, by arm.
    """
    noise = {row.arm: row.noise for row in menu.others if row.arm in needed}
    pays = {
        arm: own
        for arm, own in noise.items()
        if own is not None and own.held_out is not None and own.cheaper == "prompts"
    }
    prompts = {own.more_prompts for own in pays.values()}
    if len(prompts) != 1:
        return ""
    most = max(needed.values())
    shares = {arm: own.relative_seeds for arm, own in pays.items()}
    fewer = max(2, *(math.ceil(seeds * shares.get(arm, 1)) for arm, seeds in needed.items()))
    if fewer == most:
        return ""
    return (
        f" With --set eval.final_prompts={prompts.pop()} in addition, {fewer} seeds would probably "
        "be enough."
    )


def _arms_to_run(menu: Menu) -> list[MenuRow]:
    """Return the arms, except the baseline, that a new experiment should have.

    A clear difference may be due to chance, so it is worth repeating.
    """
    needed, question = _seeds_needed(menu), menu.experiment.question
    run = [row for row in menu.others if row.arm in needed or _is_clear(row)]
    # A label that is not an arm of the space cannot be given to `--set arm=`.
    names = [menu.baseline.arm, *(row.arm for row in run)]
    known = question is not None and set(question.arms).issuperset(names)
    return run if known else list(menu.others)


def _new_experiment(menu: Menu, run: Sequence[MenuRow], seeds: int) -> str:
    """Return the command that repeats the experiment with new seeds.

    Args:
        menu: The menu.
        run: The arms to run in addition to the baseline.
        seeds: The number of seeds.
    """
    experiment, options = menu.experiment, menu.options
    stored = experiment.description
    fixed = _fixed(menu)
    # A fixed `arm` does not name the arms that extensions added.
    if len(run) < len(menu.others) or "arm" in fixed:
        names = [menu.baseline.arm, *(row.arm for row in run)]
        question = experiment.question
        if question is not None and set(question.arms).issuperset(names):
            fixed |= {"arm": ",".join(names)}
    margin = "margin" if options.margin is not None else "margin_relative"
    scheduler = stored.get("scheduler")
    given = {
        "space": stored.get("space_source", stored.get("space")),
        "preset": stored.get("preset"),
        "set": [assignment(key, value) for key, value in fixed.items()],
        "samples": stored.get("samples"),
        "scheduler": None if scheduler == "fifo" else scheduler,
        "max_concurrent": stored.get("max_concurrent"),
        margin: getattr(options, margin),
        "baseline": options.baseline,
        "tracker": stored.get("trackers"),
        "callback": stored.get("callbacks"),
        "num_samples": seeds,
        "seed": 1 + max(trial.config.seed for trial in experiment.trials),
        "name": f"{experiment.directory.name}_new",
    }
    words = command_line.command("tune")
    for option, value in given.items():
        for each in value if isinstance(value, list) else [] if value is None else [value]:
            words += [f"--{option.replace('_', '-')}", str(each)]
    return shlex.join(words)


def _fixed(menu: Menu) -> dict[str, Any]:
    """Return the settings that `--set` fixed."""
    fixed = menu.experiment.description.get("fixed")
    return dict(fixed) if isinstance(fixed, Mapping) else {}


def _in_default_storage(menu: Menu) -> bool:
    """Return True if a command without --storage would use the directory of this experiment."""
    storage = os.path.abspath(menu.experiment.directory.parent)
    return storage == os.path.abspath(os.path.expanduser(STORAGE))


def _in_own_tuner(menu: Menu, seeds: int) -> str:
    """Say how to run a number of new seeds with a user's own Tuner."""
    # Trials under the same name count together. This is a second test, which needs `--max-seeds`.
    name = "the same name" if menu.design.anytime else "another name"
    return (
        f"start a new Tuner with {name} and without a search algorithm, whose param_space has the "
        f'settings of the arms and "seed": tune.grid_search([…]) with {seeds} new seeds'
    )


def _said_of_disturbed_rounds(menu: Menu) -> list[str]:
    counted = [row.speed.counted_disturbed for row in menu.others if row.speed is not None]
    arms = dict.fromkeys(arm for text in counted if text for arm in text.split("; "))
    if not arms:
        return []
    return [
        f"{COUNTED}: this speed includes rounds that other processes disturbed "
        f"({'; '.join(arms)}). The percentage is the share of the machine's CPU time that other "
        "processes took."
    ]


def _said_of_pareto_set(menu: Menu) -> str:
    if not any(row.in_pareto_set for row in menu.rows):
        return ""
    told = (
        f" {PARETO}: no other arm is faster, cheaper and higher in reward at the same time, "
        "judging by unrounded figures, without their intervals (Pareto set)."
    )
    left_out = [
        row.arm
        for row in menu.rows
        if row is not menu.baseline and None in (row.speed, row.cost, row.judgement)
    ]
    if not left_out:
        return told
    return f"{told} Left out, because not all three can be compared: {', '.join(left_out)}."


def menu_data(menu: Menu) -> dict[str, Any]:
    """Return the menu as JSON data, with None for unknown values."""
    return {
        "baseline": menu.baseline.arm,
        "margin": menu.margin,
        "margin_relative": menu.options.margin_relative if menu.options.margin is None else None,
        "mode": "anytime" if menu.design.anytime else "fixed",
        "most_seeds": menu.design.seeds,
        "alpha": ALPHA,
        "status": menu.status,
        "arms": {row.arm: _row_data(row) for row in menu.rows},
        "price": _price_data(_price_to_decide(menu)),
        "audit": {arm: audit.audit_data(own) for arm, own in menu.audits.items()},
        "answer": paragraph(menu),
    }


# ---- Sentences -------------------------------------------------------------------------------


def _relative(menu: Menu) -> str:
    share = menu.options.margin_relative
    if menu.options.margin is not None or share is None:
        return ""
    return f" ({share:.1%} of the baseline's reward)"


def _all_disturbed(menu: Menu) -> bool:
    """Return True if other processes made it impossible to compare any speed."""
    return any(row.disturbed for row in menu.others) and not any(row.speed for row in menu.others)


def _named(menu: Menu, row: MenuRow) -> str:
    own = row.judgement
    assert own is not None
    speeds = [] if _all_disturbed(menu) else _speeds(row)
    if own.copy:
        same = f"it learned exactly the same as {menu.baseline.arm}"
        return f"{row.arm} ({'; '.join([same, *speeds])})"
    bound = ""
    if own.verdict == WORSE and own.high is not None:
        bound = f", a loss of at least {-own.high:.3f}"
    elif own.low is not None:
        bound = f", at worst {written(own.low, REWARD)}"
    figures = [f"reward difference {written(own.difference, REWARD)}{bound}", *speeds]
    return f"{row.arm} ({'; '.join(figures)})"


def _with_difference(row: MenuRow) -> str:
    own = row.judgement
    return row.arm if own is None else f"{row.arm} ({written(own.difference, REWARD)})"


def _speeds(row: MenuRow) -> list[str]:
    """Return the clear differences in speed and cost, or the reasons why there are none."""
    if row.exact_lag:
        return []
    if row.speed is None:
        return ["speeds cannot be compared"]
    if row.speed.counted_disturbed:
        return ["other processes disturbed the speeds"]
    clear, unclear = [], []
    for ratio, name, form in (
        (row.speed, "speed", "{:.2f} times as fast"),
        (row.cost, "samples per device-hour", "{:.2f} times as many samples per device-hour"),
    ):
        if ratio is not None and ratio.told_apart:
            clear.append(form.format(ratio.value))
        elif ratio is not None:
            unclear.append(name)
    return [*clear, f"no clear difference in {' or '.join(unclear)}"] if unclear else clear


def _prices(menu: Menu) -> list[str]:
    """Return sentences about the cost of deciding the undecided arms."""
    undecided = [
        (row.arm, row.judgement.seeds_missing)
        for row in menu.others
        if row.verdict == UNDECIDED and row.judgement is not None and not _is_single(row)
    ]
    near = [arm for arm, seeds in undecided if seeds is not None]
    far = [
        # Use the rounded difference, because the table shows that one.
        f"{row.arm} ({_from_margin(round(row.judgement.difference, 3) + menu.margin)})"
        for row in menu.others
        if row.judgement is not None and (row.arm, None) in undecided
    ]
    said, price = [], _price_to_decide(menu)
    if near and price is not None:
        # “Them” refers to the arms that the sentence “Undecided: …” names.
        named = joined(near) if far or len(near) == 1 else "them"
        cost = _cost(price)
        takes = f"{cost} more" if menu.design.may_grow else f"a new experiment of {cost}"
        also = [] if menu.design.may_grow or menu.experiment.own_tuner else _repeated(menu)
        repeats = f", which also repeats {joined(also)} to check the difference" if also else ""
        said.append(f"Deciding {named} would probably take {takes}{repeats}.")
    if far:
        arms = "it" if len(far) == 1 else "them"
        said.append(
            f"{joined(far)} would probably need more than {_most(menu)} seeds. To decide {arms}, "
            f"choose another margin in a new experiment: a larger one may show “{NO_WORSE}”, a "
            f"smaller one “{WORSE}”."
        )
    if any(map(_is_single, menu.others)):
        said.append("One seed gives no verdict.")
    return said


def _without_verdict(menu: Menu) -> list[str]:
    """Return a sentence for each arm without a verdict, and for a baseline that fails its audit."""
    said = []
    if menu.baseline.faults:
        said.append(f"The baseline fails its audit: {'; '.join(menu.baseline.faults)}.")
    return said + [
        f"No verdict on {row.arm}: {'; '.join(row.faults)}."
        for row in menu.others
        if row.verdict == NO_VERDICT
    ]


def _price_to_decide(menu: Menu) -> Price | None:
    """Return the price of deciding the arms whose number of missing seeds is known.

    If more seeds need a new experiment, this is the price of the experiment that the notes advise.
    """
    needed = _seeds_needed(menu)
    if menu.design.may_grow or not needed:
        return menu.price
    costs = [row.seed for row in (menu.baseline, *_arms_to_run(menu))]
    return price_of(costs, max(needed.values()))


def _repeated(menu: Menu) -> list[str]:
    """Return the arms that the command in the notes runs only to check their clear difference."""
    needed = _seeds_needed(menu)
    run = _arms_to_run(menu)
    return [row.arm for row in run if row.arm not in needed and _is_clear(row)]


def _most(menu: Menu) -> int:
    return menu.design.seeds if menu.design.anytime else MOST_SEEDS


def _may_be_reduced(row: MenuRow) -> bool:
    """Return True if more seeds can decide the arm, or if more prompts can do so more cheaply."""
    own, noise = row.judgement, row.noise
    assert own is not None
    assert noise is not None
    if own.seeds_missing is not None:
        return own.seeds_missing > 0
    cost = noise.relative_cost
    return not _is_single(row) and cost is not None and cost < 1 - ALIKE


def _from_margin(difference: float) -> str:
    """Say how far a difference in reward is from the margin, and on which side."""
    if abs(difference) < 0.0005:
        return "at the margin"
    return f"{abs(difference):.3f} {'within' if difference > 0 else 'beyond'} the margin"


def _said_of_noise(menu: Menu, noise: Mapping[str, Noise]) -> list[str]:
    """Say where the noise of each arm comes from, and how to reduce it."""
    narrow = {arm: own for arm, own in noise.items() if own.seed_sd < own.evaluation_sd}
    sources: dict[str, list[str]] = {}
    for arm, own in noise.items():
        if arm not in narrow:
            sources.setdefault(_source_of_noise(own), []).append(arm)
    said = [f"Noise of {joined(arms)}: {told}." for told, arms in sources.items()]
    said += _too_narrow(narrow) if "to decide" in shown(menu)[0] else []
    advice: dict[str, list[str]] = {}
    for arm, own in noise.items():
        if told := _less_noise(own):
            advice.setdefault(told, []).append(arm)
    for told, arms in advice.items():
        seeds = _range_of([noise[arm].relative_seeds for arm in arms])
        cost = _range_of([noise[arm].relative_cost or 0.0 for arm in arms])
        text = told.format(seeds=seeds, cost=cost)
        whose = f"{joined(arms)}: {text[0].lower()}{text[1:]}"
        said.append(text if len(noise) == 1 else whose)
    return said


def _range_of(shares: Sequence[float]) -> str:
    least, most = f"{min(shares):.0%}", f"{max(shares):.0%}"
    return least if least == most else f"{least} to {most}"


def _too_narrow(noise: Mapping[str, Noise]) -> list[str]:
    """Name the arms whose seeds agree better than the evaluation allows."""
    if not noise:
        return []
    own = joined([f"{noise.seed_sd:.3f}" for noise in noise.values()])
    least = joined([f"{noise.evaluation_sd:.3f}" for noise in noise.values()])
    one = len(noise) == 1
    its, figure = ("its", "figure") if one else ("their", "figures")
    deviations = "standard deviation" if one else "standard deviations"
    return [
        f"Noise of {joined(list(noise))}: by chance, the {deviations} between {its} seeds ({own}) "
        f"{'is' if one else 'are'} below what the noise of the evaluation alone would cause "
        f"({least}). So {its} bounds may be too narrow. The last two columns use the larger "
        f"{figure}."
    ]


def _source_of_noise(noise: Noise) -> str:
    share = noise.evaluation_share
    if share < LITTLE:
        return (
            "hardly any of the variance between seeds comes from the evaluation, so only more "
            "seeds reduce it"
        )
    most = share > 1 - LITTLE
    part = "nearly all" if most else f"roughly {share:.0%}"
    rest = "" if most else ", and only more seeds reduce the rest"
    return (
        f"{part} of the variance between seeds comes from the evaluation (prompts and sampled "
        f"responses){rest}"
    )


def _less_noise(noise: Noise) -> str:
    """Return advice on reducing noise. In it, `{cost}` and `{seeds}` stand for relative numbers.

    The advice is empty if only more seeds reduce the noise, or if the times of the trials are
    unknown.
    """
    cost, more = noise.relative_cost, noise.more_prompts
    if noise.evaluation_share < LITTLE:
        return ""
    if more == noise.prompts:
        how = "Raise eval.samples or run" if noise.evaluation_share > 0.5 else "Run"
        return f"{how} more seeds: the last evaluation already has all {more} held-out prompts."
    if cost is None:
        return ""
    if abs(cost - 1) <= ALIKE:
        return "For the same precision, more prompts cost about as much as more seeds."
    if cost > 1:
        return "For the same precision, more seeds cost less than more prompts."
    enough = ", if the task holds out enough" if noise.held_out is None else ""
    return (
        f"In a new experiment with eval.final_prompts={more} instead of {noise.prompts}{enough}, "
        "{seeds} of the seeds would give the same precision, at {cost} of the cost."
    )


# ---- Cells -----------------------------------------------------------------------------------


def _row(menu: Menu, row: MenuRow) -> tuple[str, ...]:
    arm = f"{row.arm} {PARETO}" if row.in_pareto_set else row.arm
    own = row.judgement
    if row is menu.baseline:
        ratios = (
            written(1.0, RATIO) if any(known) else "-"
            for known in ([o.speed for o in menu.others], [o.cost for o in menu.others])
        )
        return (arm, *ratios, "-", "baseline", "-", "-", "-")
    if own is None:
        nothing = ("-", row.verdict, "-" if row.faults else "0", "-", "-")
        return (arm, _ratio(row, row.speed), _ratio(row, row.cost), *nothing)
    return (
        arm,
        _ratio(row, row.speed),
        _ratio(row, row.cost),
        f"{written(own.difference, REWARD)}{_bounds(own)}",
        own.verdict,
        str(own.seeds),
        "-" if own.power is None or not _is_undecided(row) else f"{own.power:.0%}",
        _to_decide(menu, row, own),
    )


def _ratio(row: MenuRow, own: Contrast | None) -> str:
    if own is None:
        return MARK if row.disturbed else "-"
    interval = own.shown_interval("{:.2f}")
    mark = f" {COUNTED}" if own.counted_disturbed else ""
    return f"{written(own.value, RATIO)}{f' ({interval})' if interval else ''}{mark}"


def _bounds(own: Judgement) -> str:
    if own.low is None or own.high is None:
        return ""
    return f" ({written(own.low, REWARD)} to {written(own.high, REWARD)})"


def _to_decide(menu: Menu, row: MenuRow, own: Judgement) -> str:
    if own.seeds_missing == 0 or _is_single(row):
        return "-"
    if own.seeds_missing is None:
        return f"more than {_most(menu)} seeds"
    seeds = f"{plural(own.seeds_missing, 'seed')}"
    return seeds if row.price is None else f"{seeds}, {_time(row.price)}"


def _cost(price: Price) -> str:
    rough = "roughly " if price.disturbed else ""
    return f"{rough}{_time(price)} and {price.device_hours:.2g} device-hours"


def _time(price: Price) -> str:
    if price.minutes >= 120:
        return f"{price.minutes / 60:.1f} h"
    return f"{price.minutes:.0f} min" if price.minutes >= 1 else f"{60 * price.minutes:.0f} s"


def _is_undecided(row: MenuRow) -> bool:
    return row.judgement is not None and row.verdict == UNDECIDED


def _is_clear(row: MenuRow) -> bool:
    """Return True if an undecided arm differs clearly from the baseline in reward."""
    clear = row.reward is not None and bool(row.reward.told_apart)
    return clear and _is_undecided(row) and not _is_single(row)


def _is_single(row: MenuRow) -> bool:
    return row.judgement is not None and row.judgement.seeds == 1


# ---- JSON ------------------------------------------------------------------------------------


def _row_data(row: MenuRow) -> dict[str, Any]:
    own, noise = row.judgement, row.noise
    return {
        "speed_up": _ratio_data(row.speed),
        "equal_cost": _ratio_data(row.cost),
        "verdict": row.verdict if own is not None else None,
        "faults": list(row.faults),
        "difference": own and own.difference,
        "low": own and own.low,
        "high": own and own.high,
        "seeds": own.seeds if own else 0,
        "power": own and own.power,
        "seeds_needed": own and own.seeds_needed,
        "seeds_missing": own and own.seeds_missing,
        "price": _price_data(row.price),
        "evaluation_share": noise and noise.evaluation_share,
        "evaluation_sd": noise and noise.evaluation_sd,
        "cheaper": noise and noise.cheaper,
        "pareto": row.in_pareto_set,
    }


def _ratio_data(own: Contrast | None) -> dict[str, float | None] | None:
    if own is None:
        return None
    interval = own.interval
    return {
        "value": own.value,
        "low": interval and interval.low,
        "high": interval and interval.high,
    }


def _price_data(price: Price | None) -> dict[str, float] | None:
    return price and {"minutes": price.minutes, "device_hours": price.device_hours}
