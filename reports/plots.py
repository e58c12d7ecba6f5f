"""The report's plots: the content of each, how to read it, and why it may be missing."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

from grpo_trainable.config import GRPOConfig, schedule
from grpo_trainable.telemetry.metrics import SE
from grpo_trainable.text import joined
from reports.canvas import HEIGHT, Plot, Section, panel_rows
from reports.charts import (
    FIRST_ROUNDS,
    Bar,
    MenuPoint,
    bars,
    draw_lag_histogram,
    draw_menu,
    draw_stage_areas,
    draw_stage_bars,
    draw_versions,
    lines,
)
from reports.contrasts import Contrast
from reports.menu import Menu
from reports.parquet_reader import StepPoint, TrialFiles
from reports.records import CLIPPED, ExperimentRecord, TrialRecord
from reports.series import (
    Arms,
    Series,
    curve,
    frontier,
    held_out_parts,
    lag_shares,
    metric,
    stage_seconds,
)
from reports.summary import (
    DEVICE,
    MARK,
    NONE_BY_KL,
    OLDER_RESPONSES,
    Comparison,
    comparable_by_kl,
    saves_no_time,
)

LEAST_JOINED = 3  # smallest number of evaluations that a line joins
STANDARD_ERRORS = 2.0  # half the width of the band around an estimated metric
BANDS = (
    "A line is the median over the trials of an arm. A band reaches from the lowest to the highest "
    "trial."
)
CLIPPED_TOKENS = (
    "The share of the tokens whose ratio the loss clipped. Most losses give such a token no "
    "gradient."
)
NO_WALL_CLOCK = "No wall-clock time was recorded."
NOT_KNOWN = "not known"
NOT_COMPARABLE = f"{MARK} not comparable"
EXACT = "exact lag"  # shown in place of a speed-up


def sections(
    experiment: ExperimentRecord, comparison: Comparison, files: Mapping[str, TrialFiles]
) -> list[Section]:
    """Return every plot in the order of the page. `files` has the Parquet figures by trial name."""
    arms = experiment.arms
    return [
        Section(
            title="What was learned",
            plots=_learning(arms, comparison),
            note=BANDS if any(len(trials) > 1 for trials in arms.values()) else "",
        ),
        *_titled("What was learned in each task", _tasks(arms)),
        *_titled("What was learned in each part of the reward", _parts(arms)),
        Section(title="Speed and cost", plots=_costs(comparison), legend=False),
        Section(title="Where the time goes", plots=_stages(arms, comparison), legend=False),
        *_titled("How far the policy drifted", _drift(arms)),
        *_titled("How stale the rollouts were", _lags(arms, comparison, files)),
        *_titled("What changed within a round", _steps(arms, files)),
        *_titled("How often rollouts were used", _reuse(arms)),
    ]


def menu_section(menu: Menu, arms: Sequence[str]) -> Section:
    """Return the plot of the menu.

    Args:
        menu: The menu.
        arms: All arms, in the order of their colours.
    """
    points = [MenuPoint(arms.index(menu.baseline.arm), Bar(1, 1, 1), Bar(0, 0, 0))]
    for row in menu.others:
        if row.speed is not None and row.judgement is not None:
            own = row.judgement
            low, high = (own.difference if end is None else end for end in (own.low, own.high))
            points.append(
                MenuPoint(arms.index(row.arm), _bar(row.speed), Bar(own.difference, low, high))
            )
    shown = ", ".join(
        f"{arms[point.arm]} {point.reward.middle:+.3f} at {point.speed.middle:.2f}x"
        for point in points
    )
    plot = Plot(
        name="menu",
        title="Reward difference against speed-up",
        look=f"All values are relative to {menu.baseline.arm}. Arms further right are faster, and "
        f"arms higher up have a higher reward. The band is the margin of {menu.margin:.3g}. An arm "
        "is no worse if its whole vertical line is above the lower edge of the band, and worse if "
        "the whole line is below that edge. Lines are cut off if they are much longer than the "
        "margin. Arms without a comparable speed or without a verdict are not shown.",
        draw=lambda figure, theme: draw_menu(figure, theme, points, menu.margin),
        alt=f"Reward difference of each arm against its speed-up: {shown}.",
        missing=None if len(points) > 1 else "No other arm has a comparable speed and a verdict.",
    )
    return Section(title="The menu as a plot", plots=[plot])


def _titled(title: str, plots: list[Plot]) -> list[Section]:
    """Return a section with these plots, or no section if there are no plots."""
    return [Section(title=title, plots=plots)] if plots else []


def _learning(arms: Arms, comparison: Comparison) -> list[Plot]:
    def samples(trial: TrialRecord, row: Mapping[str, float]) -> float | None:
        trained = row.get("count/trained") if row else 0.0
        return None if trained is None else trained * trial.config.rollout.group_size

    def held_out_by(x: Callable[[TrialRecord, int, Mapping[str, float]], float | None]) -> Series:
        def series(trial: TrialRecord) -> Iterable[tuple[int, float, float]]:
            for round_, reward, row in trial.evaluated():
                place = x(trial, round_, row)
                if place is not None:
                    yield round_, place, reward

        return series

    missing = "No held-out evaluation was recorded."
    noise = " Small gaps can be noise: see “Which arms differ”." if len(arms) > 1 else ""
    reward = "held-out reward"
    two_points = _not_joined(arms, held_out_by(lambda t, n, row: n))
    timed = _timed(arms, comparison)
    faster = (
        "Compare arms here if waiting time matters most: of two arms with equal rewards, the one "
        "further to the left learned faster. "
        if sum(map(comparison.comparable, comparison.arms)) > 1 and not comparison.exact_lags
        else ""
    )
    wall_clock = lines(
        timed,
        name="reward_wall_clock",
        title="Held-out reward over wall-clock time",
        look=f"{_beware(comparison)}{faster}The clock starts with round 1 and excludes evaluation "
        "and checkpoints.",
        x_label="wall-clock, seconds",
        y_label=reward,
        series=held_out_by(lambda t, n, row: row.get("time/wall_clock_s", 0.0)),
        joined=LEAST_JOINED,
        missing=missing,
    )
    return [
        lines(
            arms,
            name="reward_rounds",
            title="Held-out reward over rounds",
            look="The reward on prompts that are never trained on. Higher is better. Do not "
            "compare arms here if they train on different numbers of samples per round. If curves "
            f"coincide, the wider line lies behind the narrower one.{two_points}",
            x_label="round",
            y_label=reward,
            series=held_out_by(lambda t, n, row: n),
            joined=LEAST_JOINED,
            missing=missing,
        ),
        lines(
            arms,
            name="reward_samples",
            title="Held-out reward over samples",
            look="This is the fair comparison of what arms learn: a lower arm learns less from the "
            f"same samples.{noise}",
            x_label="responses trained on",
            y_label=reward,
            series=held_out_by(lambda t, n, row: samples(t, row)),
            joined=LEAST_JOINED,
            missing=missing,
        ),
        wall_clock,
        lines(
            arms,
            name="reward_train",
            title="Training reward",
            look="The mean reward of the round's responses. This training reward should rise "
            "together with the held-out reward. If only the training reward rises, the policy is "
            "memorising its prompts. With a lag, an older policy writes these responses, so the "
            "training reward trails behind.",
            x_label="round",
            y_label="mean reward of the round",
            series=metric("reward/train_mean"),
            missing="No round recorded reward/train_mean.",
        ),
    ]


def _tasks(arms: Arms) -> list[Plot]:
    """Return a plot for each task of a mix (`task.mix`); none if no trial has a mix."""
    trials = [trial for of_arm in arms.values() for trial in of_arm]
    labels = dict.fromkeys(label for trial in trials for label in trial.config.parts)
    return [
        lines(
            arms,
            name=f"task_{label}",
            title=f"Task {label}",
            look="Solid: the reward on held-out prompts of this task. Dotted: the reward in "
            "training. If the reward of one task falls while others rise, the policy forgets that "
            "task: raise the task's weight in task.mix.",
            x_label="round",
            y_label="mean reward",
            series=_held_out_of(f"eval/{label}/reward"),
            dotted=metric(f"task/{label}/reward_mean"),
            legend_of=("held out", "in training"),
            missing=f"No round recorded eval/{label}/reward_mean.",
        )
        for label in labels
    ]


def _parts(arms: Arms) -> list[Plot]:
    """Return a plot for each part of the reward; none if no trial logged a part."""
    names = held_out_parts([trial for of_arm in arms.values() for trial in of_arm])
    return [
        lines(
            arms,
            name=f"part_{place}",
            title=f"Part {name}",
            look="Solid: this part of the reward on held-out prompts, without its weight. Dotted: "
            "the part in training. If one part falls while others rise, the policy gives up one "
            "goal for the others: change task.reward_weights.",
            x_label="round",
            y_label="mean of the part",
            series=_held_out_of(f"eval_part/{name}"),
            dotted=metric(f"part/{name}_mean"),
            legend_of=("held out", "in training"),
            missing=f"No round recorded eval_part/{name}_mean.",
        )
        for place, name in enumerate(names)
    ]


def _held_out_of(quantity: str) -> Series:
    """Return the series of a held-out quantity by round, including round 0.

    Args:
        quantity: The start that the names of two metrics share. One name ends with `_mean`, the
            other with `_first`.
    """

    def series(trial: TrialRecord) -> Iterable[tuple[int, float, float]]:
        for round_, _, row in trial.evaluated():
            mean = row.get(f"{quantity}_mean") if row else trial.last(f"{quantity}_first")
            if mean is not None:
                yield round_, round_, mean

    return series


def _not_joined(arms: Arms, series: Series) -> str:
    """Return a remark if the points of an arm are too few to be joined by a line."""
    if all(len(curve(trials, series)) >= LEAST_JOINED for trials in arms.values()):
        return ""
    said = " An arm with only two points has no line, because the path between them is unknown."
    several = any(len(trials) > 1 for trials in arms.values())
    return said + " Vertical lines reach from the lowest to the highest trial." * several


def _timed(arms: Arms, comparison: Comparison) -> Arms:
    """Return the trials that are included in `Comparison.totals`."""
    return {
        arm: [
            trial
            for trial in trials
            if trial.pace is None or trial.pace.comparable or not comparison.comparable(arm)
        ]
        for arm, trials in arms.items()
    }


def _beware(comparison: Comparison) -> str:
    """Return a warning to put before a text, if other processes disturbed the times of an arm."""
    disturbed = [arm for arm in comparison.arms if not comparison.comparable(arm)]
    named = "all arms" if len(disturbed) == len(comparison.arms) else ", ".join(disturbed)
    left_out = (
        f"Not comparable, because other processes used the machine: {named}. " if disturbed else ""
    )
    excluded = [
        arm
        for arm, own in comparison.arms.items()
        if arm not in disturbed and not all(trial.comparable for trial in own)
    ]
    if excluded:
        left_out += f"Disturbed trials of {joined(excluded)} are left out. "
    counted = _counted(comparison)
    return left_out + (f"{counted.strip()} " if counted else "")


def _counted(comparison: Comparison) -> str:
    """Return a remark for plots of speed if they include disturbed rounds."""
    counted = comparison.counts_disturbed
    return f" {counted[:1].upper()}{counted[1:]}" if counted else ""


def _costs(comparison: Comparison) -> list[Plot]:
    hours = bars(
        {arm: _device_hours(comparison, arm) for arm in comparison.arms},
        name="device_hours",
        title="Device-hours",
        look="The cost without evaluation and checkpoints: wall-clock time × reserved GPUs. If the "
        "arm has no GPU, the cost is wall-clock time × the CPUs that its actors reserve. A shorter "
        "bar means lower cost. The bar is the median over the trials, and the whisker reaches from "
        "the lowest to the highest trial. Trials that other processes disturbed too much are "
        "left out, but single disturbed rounds make a bar longer. Compare only arms that trained "
        "on the same number of samples.",
        unit="device-hours",
        form="{:.3g}",
        line=None,
        missing=_no_bar(comparison),
    )
    return [*(_ratios(comparison) if comparison.has_ratios else ()), hours]


def _ratios(comparison: Comparison) -> list[Plot]:
    relative = f"relative to {comparison.baseline} (the line at 1)"
    return [
        bars(
            _ratio_bars(comparison, comparison.speed),
            name="speed_up",
            title="Speed-up",
            look=f"Samples per second {relative}. Use this plot if the devices would otherwise "
            "stand idle: a longer bar means higher speed. Whiskers show the 95% interval. If the "
            "interval includes 1, there is no clear difference. A question mark means that the arm "
            "is not comparable, because other processes used the machine."
            f"{_counted(comparison)}",
            unit="times as fast",
            form="{:.2f}x",
            line=1.0,
            missing=_no_bar(comparison, exact=comparison.exact_lags),
        ),
        bars(
            _ratio_bars(comparison, comparison.cost),
            name="equal_cost",
            title="Speed-up at equal cost",
            look=f"Samples per device-hour {relative}. Use this plot if the devices could do other "
            f"work: a longer bar means cheaper samples. {DEVICE} Whiskers show the 95% interval."
            f"{_counted(comparison)}",
            unit="times as many samples",
            form="{:.2f}x",
            line=1.0,
            missing=_no_bar(comparison, exact=comparison.exact_lags),
        ),
    ]


def _ratio_bars(comparison: Comparison, contrasts: Mapping[str, Contrast]) -> dict[str, Bar | str]:
    found: dict[str, Bar | str] = dict.fromkeys(comparison.arms, NOT_KNOWN)
    if comparison.baseline is not None:
        # A bar of the baseline alone would hide the reason why no other arm has a ratio.
        usable = bool(comparison.speed) or not comparison.not_comparable
        found[comparison.baseline] = Bar(1.0, 1.0, 1.0) if usable else NOT_COMPARABLE
    found |= dict.fromkeys(comparison.exact_lags, EXACT)
    found |= {arm: _bar(own) for arm, own in contrasts.items()}
    return found | dict.fromkeys(comparison.not_comparable, NOT_COMPARABLE)


def _bar(own: Contrast) -> Bar:
    ends = (own.interval.low, own.interval.high) if own.interval else (own.value, own.value)
    return Bar(own.value, *ends)


def _device_hours(comparison: Comparison, arm: str) -> Bar | str:
    values = [hours for hours in comparison.totals(arm, lambda t: t.device_hours) if hours]
    if not comparison.comparable(arm):
        return NOT_COMPARABLE
    return Bar(statistics.median(values), min(values), max(values)) if values else NOT_KNOWN


def _no_bar(comparison: Comparison, exact: Sequence[str] = ()) -> str:
    """Return the reason why no arm has a bar.

    Args:
        comparison: The comparison of the arms.
        exact: The arms that have no bar anyway, because their lag is exact.
    """
    others = [arm for arm in comparison.arms if arm not in exact]
    disturbed = [arm for arm in others if not comparison.comparable(arm)]
    saves = saves_no_time(exact)
    if not disturbed and comparison.not_comparable:
        return f"Other processes disturbed an arm or the baseline in too many seeds.{saves}"
    if not disturbed:
        return NO_WALL_CLOCK
    named = "every arm" if len(disturbed) == len(comparison.arms) else ", ".join(disturbed)
    return f"Other processes on the machine disturbed {named}.{saves}"


def _scores_fresh_responses(config: GRPOConfig) -> bool:
    """Return True if only fresh responses need log-probs of the policy before the round.

    With a lag, only the sample of the KL monitor needs them.
    """
    sampled = config.loss.kl_monitor and schedule.monitored_responses(config) is not None
    several = config.k > 1 and config.k_mode != "same_batch"
    return several and sampled and config.importance_cap is None


def _waits_for_evaluations(arms: Arms) -> str:
    """Name the arms whose median wait of the learner includes an evaluation; "" if there are none.

    The first round waits for the evaluation of the initial policy, and a later round for the
    evaluation after the round before it.
    """
    often = [
        arm
        for arm, trials in arms.items()
        if trials[0].config.placement != "colocated" and trials[0].config.eval.every <= 2
    ]
    if not often:
        return ""
    return (
        f". In at least half of the rounds of {joined(often)}, the learner also waited for an "
        "evaluation, so its bar includes this wait"
    )


def _stages(arms: Arms, comparison: Comparison) -> list[Plot]:
    arms = _timed(arms, comparison)
    height = max(HEIGHT, panel_rows(len(arms)) * 1.3 + 0.9)
    trials = [trial for own in arms.values() for trial in own]
    colocated = [trial.config.placement == "colocated" for trial in trials]
    both = (
        "both patterned bars show the same time, in which neither generator nor learner works, "
        "for instance between rounds"
    )
    waits = both.capitalize()
    if not all(colocated):
        waits = "Patterned bars show how long the generator or the learner waits"
        waits += _waits_for_evaluations(arms)
        waits += f". For a colocated arm, {both}" if any(colocated) else ""
    spikes = (
        " Other processes can also cause spikes."
        if any(trial.pace is not None and trial.pace.disturbed for trial in trials)
        else ""
    )
    passes = (
        " The stage “reference” has the passes without gradients. With several steps on different "
        "responses (k), it takes longer at lag 0, because the loss then needs log-probs of the "
        "policy before the round."
        if {trial.config.lag > 0 for trial in trials if _scores_fresh_responses(trial.config)}
        == {False, True}
        else ""
    )
    overlap = (
        " In its first round, an arm with a lag waits for its first responses. Then it samples for "
        "the next rounds, so its last rounds sample little or nothing."
        if any(trial.config.lag and trial.config.lag_mode != "exact" for trial in trials)
        else ""
    )
    exact = (
        " With an exact lag of L, round 1 samples L + 1 batches, and the last L rounds sample none."
        if comparison.exact_lags
        else ""
    )
    seconds = {arm: stage_seconds(own, responses=100) for arm, own in arms.items()}
    timed = any(any(stages.values()) for stages in seconds.values())
    missing = None if timed else "No round recorded time/…_s."
    alt = "; ".join(
        f"{arm}: " + ", ".join(f"{name} {spent:.2g} s" for name, spent in stages.items() if spent)
        for arm, stages in seconds.items()
    )
    return [
        Plot(
            name="stages",
            title="Seconds for 100 responses, by stage",
            look=f"{_beware(comparison)}The median time of each stage (for eval, the mean). The "
            "longest stage is the one to speed up. The vertical tick marks the median total time "
            "for 100 responses, excluding evaluation. The eval segment therefore extends beyond "
            "the tick. Speeds in the tables are lower: they also count the time between rounds, "
            "and rounds that are slower than the median, such as the first round of an arm with a "
            "lag, in which nothing overlaps with the first responses. If other segments also "
            "extend far beyond the tick, stages overlap. Ignore a small excess: each "
            f"time is a separate median over the rounds. {waits}.{passes} "
            "Checkpoints are written between rounds, so only the table of arms shows their time.",
            draw=lambda figure, theme: draw_stage_bars(figure, theme, seconds),
            alt=f"Stacked bars, median seconds for 100 responses. {alt}.",
            height=height,
            missing=missing,
        ),
        Plot(
            name="stages_over_rounds",
            title="Seconds of each round, by stage",
            look=f"{_beware(comparison)}One panel per arm, with the medians over its trials. "
            "An evaluation belongs to the round at its peak, and the evaluation before training "
            "belongs to round 1. "
            "Layers other than eval should be steady. If one grows or spikes, see that round in a "
            f"trace (under Next steps).{overlap}{spikes}{exact}",
            draw=lambda figure, theme: draw_stage_areas(figure, theme, arms),
            alt="Stacked areas of the seconds of each stage, one panel per arm: "
            f"{', '.join(arms)}.",
            height=height,
            missing=missing,
        ),
    ]


def _drift(arms: Arms) -> list[Plot]:
    monitored = any(trial.config.loss.kl_monitor for trials in arms.values() for trial in trials)
    no_kl = (
        "No round recorded a KL (kl/…)."
        if monitored
        else "KL was not monitored (loss.kl_monitor=false)."
    )
    comparable = comparable_by_kl(arms)
    better = (
        " More held-out reward at equal KL is better, and so is less KL at equal reward."
        if NONE_BY_KL not in comparable
        else ""
    )
    plots = []
    # “From” a policy means KL(that policy ‖ trained policy). The responses are samples from that
    # policy, so the metric, k1, estimates the negative of this KL.
    for name, title, sign, look in (
        (
            "reference",
            "KL to the reference",
            1.0,
            "KL(policy ‖ reference): the distance of the policy from the initial policy. "
            f"{OLDER_RESPONSES}{comparable} Solid: the estimator k1, which can be negative. "
            "Dotted: the estimator k3, which is never negative but jumps at a single unlikely "
            "token. (Neither is the setting k.) The y axis covers the range of the solid lines, so "
            "dotted lines can leave the plot. If this range is wide, the axis is linear near 0 and "
            f"logarithmic elsewhere.{_sampled(arms)}",
        ),
        (
            "previous",
            "KL from the policy before the round",
            -1.0,
            "KL(policy before the round ‖ policy after it): the distance that the policy moves in "
            "one round. A spike means that the steps of a round were too large.",
        ),
        (
            "behaviour",
            "KL from the weights that sampled the responses",
            -1.0,
            "KL(sampler ‖ policy): the distance of the policy from the weights that sampled the "
            "responses, after the last gradient step of the round. It usually grows with lag and "
            "with the number of gradient steps per round.",
        ),
    ):
        same = (
            f" Solid: kl/{name}_nats with its sign reversed. Lines, axis and band are as in “KL to "
            "the reference”."
        )
        plots.append(
            lines(
                arms,
                name=f"kl_{name}",
                title=title,
                look=look + same * (sign < 0),
                x_label="round",
                y_label="nats per response",
                series=metric(f"kl/{name}_nats", sign),
                margin=metric(f"kl/{name}_nats{SE}", STANDARD_ERRORS),
                dotted=metric(f"kl/{name}_k3_nats"),
                legend_of=("KL estimator k1", "KL estimator k3"),
                linear_within=1.0 if name == "reference" else 0.1,
                missing=no_kl,
            )
        )
    plots.append(
        lines(
            arms,
            name="frontier",
            title="Reward against drift",
            look="The trade-off between reward and distance from the reference. Each point is an "
            "evaluation, at the KL of its round. (The tables show the mean KL of several rounds.)"
            f"{comparable}{better}{_not_joined(arms, frontier)} The KL is never "
            "negative, but its estimate can be: a point far below 0 means that the policy has "
            "moved far from the weights that sampled.",
            x_label="KL to the reference, nats per response",
            y_label="held-out reward",
            series=frontier,
            joined=LEAST_JOINED,
            missing=no_kl,
        )
    )
    if _clip(arms):
        losses = {trial.config.loss.type for trials in arms.values() for trial in trials}
        narrow = " For gspo, a larger share is normal, because its clip range is narrow."
        plots.append(
            lines(
                arms,
                name="clip_fraction",
                title="Clipped tokens",
                look=f"{CLIPPED_TOKENS} If the share is above 0.3, the rollouts are too old or the "
                "steps are too large, and part of the samples is wasted: lower the learning rate, "
                f"k or lag.{narrow * ('gspo' in losses)}",
                x_label="round",
                y_label="share of clipped tokens",
                series=metric(CLIPPED),
                missing=f"No round recorded {CLIPPED}.",
            )
        )
    plots.append(
        lines(
            arms,
            name="reference_nll",
            title="Are the responses still language?",
            look="The reference NLL: how unlikely the initial policy finds each token of the "
            "current responses. A steep rise means that the text is falling apart, even if the "
            "reward rises."
            f"{_sampled(arms)}",
            x_label="round",
            y_label="nats per token",
            series=metric("response/reference_nll_nats"),
            margin=metric(f"response/reference_nll_nats{SE}", STANDARD_ERRORS),
            missing="No round recorded response/reference_nll_nats." if monitored else no_kl,
        )
    )
    plots.append(
        lines(
            arms,
            name="response_length",
            title="Response length",
            look="The mean length of the responses in training. If the length changes although the "
            "task gives no reason, the policy may be gaming the reward.",
            x_label="round",
            y_label="tokens",
            series=metric("response/length_mean"),
            missing="No round recorded response/length_mean.",
        )
    )
    return plots


def _clip(arms: Arms) -> bool:
    """Return True if the loss of some arm can clip tokens."""
    return any(trial.has(CLIPPED) for trials in arms.values() for trial in trials)


def _beside_kl_of_rounds(arms: Arms) -> str:
    """Say how the KL by gradient step differs from the KL of a round, if that one is monitored."""
    monitored = [t.config for own in arms.values() for t in own if t.config.loss.kl_monitor]
    if not monitored:
        return ""
    numbers = {schedule.monitored_responses(config) for config in monitored}
    few = sorted(number for number in numbers if number is not None)
    on = f", on only {' or '.join(map(str, few))} responses, so they are noisier" if few else ""
    return (
        " The table's “KL from sampler” and the plot of the KL from the weights that sampled the "
        f"responses are measured after the last step of a round{on}."
    )


def _sampled(arms: Arms) -> str:
    """Return a remark for plots of metrics that are measured on a sample of the responses."""
    sampled = [
        arm
        for arm, trials in arms.items()
        if any(any(trial.column(f"kl/reference_nats{SE}")) for trial in trials)
    ]
    if not sampled:
        return ""
    measured = {schedule.monitored_responses(arms[arm][0].config) for arm in sampled}
    numbers = " or ".join(sorted(map(str, measured)))
    several = any(len(trials) > 1 for trials in arms.values())
    further = "further" if several else "to either side"
    reach = f"{STANDARD_ERRORS:g} standard errors {further}"
    whose = "" if len(sampled) == len(arms) else f" of {joined(sampled)}"
    return (
        f" The figures{whose} are measured on {numbers} responses of each round, drawn at random, "
        f"so {'the bands reach' if len(sampled) > 1 else 'its band reaches'} {reach}. "
        "These errors do not cover the choice of the round's prompts and responses."
    )


def _lags(arms: Arms, comparison: Comparison, files: Mapping[str, TrialFiles]) -> list[Plot]:
    shares = {
        arm: lag_shares([files[trial.name].lags for trial in trials])
        for arm, trials in arms.items()
    }
    timed = _timed(arms, comparison)
    changed = {arm: files[trials[0].name] for arm, trials in timed.items()}
    configs = [trial.config for trials in arms.values() for trial in trials]
    has_bounded = any(config.lag and config.lag_mode != "exact" for config in configs)
    slow = " If an asynchronous arm is mostly at lag 0, its generators are slower than its learner."
    histogram = "; ".join(
        f"{arm}: " + ", ".join(f"lag {lag} {share:.0%}" for lag, share in sorted(lags.items()))
        for arm, lags in shares.items()
        if lags
    )
    return [
        lines(
            arms,
            name="lag",
            title="Lag over the rounds",
            look="How many rounds old a group is when it is first trained on. Solid: the largest "
            "lag of the round's groups, which must not exceed the setting “lag”. Dotted: their "
            "mean lag. Equal lines are drawn slightly apart.",
            x_label="round",
            y_label="rounds behind",
            series=metric("lag/max"),
            dotted=metric("lag/mean"),
            legend_of=("largest", "mean"),
            apart=0.02,
            whole=True,
            missing="No round recorded lag/max.",
        ),
        Plot(
            name="versions",
            title="Policy versions over time",
            look=f"One trial of each arm, in its first {FIRST_ROUNDS} rounds. The seconds include "
            "evaluations and disturbed rounds. A version counts the gradient steps so far. "
            "Solid: the version of the learner. Dotted: the version of the generator. A gap "
            "between the lines shows how long new weights take to arrive. Lines that coincide do "
            "not mean that rollouts are fresh: an arm with a lag trains on responses that were "
            "sampled before the generator's weights changed. “Lag over the rounds” shows how stale "
            "these responses were.",
            draw=lambda figure, theme: draw_versions(figure, theme, changed),
            alt="Version of the learner and of the generator over seconds, one panel per arm: "
            f"{', '.join(changed)}.",
            height=max(HEIGHT, panel_rows(len(arms)) * 1.5 + 0.9),
            missing=None
            if any(files.changes for files in changed.values())
            else "No version changes were recorded (versions/ is missing or empty).",
        ),
        Plot(
            name="lag_histogram",
            title="Lag of the groups",
            look="The share of groups that were first trained on at each lag. At lag 0, a "
            f"round trains on responses of the weights that it starts with.{slow * has_bounded}",
            draw=lambda figure, theme: draw_lag_histogram(figure, theme, shares),
            alt=f"Bars. {histogram}.",
            missing=None
            if any(shares.values())
            else "No rollouts were kept (rollouts/ is missing or empty).",
        ),
    ]


def _steps(arms: Arms, files: Mapping[str, TrialFiles]) -> list[Plot]:
    """Return the plots by gradient step; none if every round has one step."""
    if all(trial.config.k == 1 for trials in arms.values() for trial in trials):
        return []

    def by_step(value: Callable[[TrialRecord, StepPoint], float | None]) -> Series:
        def series(trial: TrialRecord) -> Iterable[tuple[int, float, float]]:
            for step, point in files[trial.name].steps.items():
                if (y := value(trial, point)) is not None:
                    yield step, step, y

        return series

    bends = (
        " If the line bends upwards, the policy drifts faster with each further step of a round."
        if any(trial.config.k > 2 for trials in arms.values() for trial in trials)
        else ""
    )
    missing = "No gradient steps were recorded (steps/ is missing or empty)."
    plots = [
        lines(
            arms,
            name="step_kl",
            title="KL from the sampling weights, by gradient step",
            look="The KL before each gradient step of a round, on all responses of that step. Each "
            f"point is the median over the rounds.{bends}{_beside_kl_of_rounds(arms)}",
            x_label="gradient step of the round",
            y_label="nats per response",
            series=by_step(lambda trial, point: point.kl_sampler_nats),
            missing=missing,
        ),
    ]
    if _clip(arms):
        plots.append(
            lines(
                arms,
                name="step_clip",
                title="Clipped tokens, by gradient step",
                look=f"{CLIPPED_TOKENS} If the share climbs, each further step of a round gains "
                "less. Each point is the median over the rounds.",
                x_label="gradient step of the round",
                y_label="share of clipped tokens",
                series=by_step(
                    lambda trial, point: point.clip_fraction if trial.has(CLIPPED) else None
                ),
                missing=missing,
            )
        )
    return plots


def _reuse(arms: Arms) -> list[Plot]:
    """Return the plots of reuse; none if no arm has a replay buffer."""
    if all(trial.config.buffer_capacity == 1 for trials in arms.values() for trial in trials):
        return []
    return [
        lines(
            arms,
            name="uses",
            title="Uses of a group",
            look="How many times the groups of a round have been trained on, including this round. "
            "1 means no reuse.",
            x_label="round",
            y_label="uses, mean",
            series=metric("buffer/uses_mean"),
            missing="No round recorded buffer/uses_mean.",
        ),
        lines(
            arms,
            name="age",
            title="Age of the trained groups",
            look="The age of the weights that sampled a group. Solid: the largest age in the "
            "round, which must not exceed buffer.max_age. Dotted: the mean.",
            x_label="round",
            y_label="rounds behind",
            series=metric("buffer/age_max"),
            dotted=metric("buffer/age_mean"),
            legend_of=("largest", "mean"),
            missing="No round recorded buffer/age_max.",
        ),
    ]
