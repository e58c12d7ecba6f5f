"""Run experiments that take hours, in slices of at most 20 minutes at low priority.

    python benchmarks/campaigns.py                    every slice that is not finished
    python benchmarks/campaigns.py atlas --slices 2   the next two slices of the atlas

Campaigns:
  atlas   which objective tolerates staleness: each slice trains one objective at the exact lags
          0, 4 and 8
  critic  what a value for each state buys: each slice trains GRPO and one or two algorithms that
          estimate such values, PPO with a critic or VinePPO
  advantages  how far the advantages of PPO, VinePPO and GRPO are from the true ones: each slice
          trains PPO with one seed and measures the errors at four checkpoints
  control GRPO and PPO beside RLlib's PPO in CartPole, in Pendulum, and with the robot arm that the
          policy sees through a camera: each slice trains all three with one seed
  games   does GRPO learn to use hints and tools: each slice trains one game of the policy `games`,
          with one gradient step per batch and with four
  smollm2  does a real model learn as much here as in TRL: each slice trains SmolLM2-135M-Instruct
          with one seed, here or in TRL's environment

The results are rewards after equal numbers of samples, so other work may run at the same time. Each
campaign has one JSON file, which lists the planned slices and holds the finished ones. After an
interruption, the same command continues. At most one slice is lost. If the commit has not changed,
the finished trials of that slice are kept, except in smollm2.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import off_policy
import real_model
from measure import (
    RESULTS,
    ROOT,
    checked,
    measurements,
    parser_of,
    provenance,
    read,
    run_benchmark,
    write,
)

from grpo_trainable.command_line import UsageError, number
from reports.experiment import read_experiment
from search_spaces.spaces import OBJECTIVE_LAGS, OBJECTIVES

STORAGE = Path.home() / "ray_results" / "campaigns"
MARGIN = 0.03  # the largest acceptable loss of held-out reward


@dataclass(frozen=True)
class Slice:
    """A part of a campaign: some arms of a search space."""

    name: str
    space: str
    arms: tuple[str, ...]  # the first one is the baseline
    options: str  # of launch/tune.py

    def run(self, directory: Path) -> dict[str, Any]:
        """Run or continue the trials in `directory`, and return their result."""
        arms = ("--set", f"arm={','.join(self.arms)}")
        return off_policy.measured(self.space, directory, [*arms, *shlex.split(self.options)])


@dataclass(frozen=True)
class WithAdvantageErrors(Slice):
    """A slice that also measures the errors of advantages at the checkpoints of its trials."""

    def run(self, directory: Path) -> dict[str, Any]:
        """Run the trials, and measure the errors at each of their checkpoints."""
        result = super().run(directory)
        import advantage_errors

        trials = read_experiment(directory).trials
        errors = {t.arm: advantage_errors.of_trial(t.config, t.directory) for t in trials}
        return {**result, "advantage_errors": errors}


@dataclass(frozen=True)
class WithCurves(Slice):
    """A slice that also returns the learning curves of its trials in an environment."""

    def run(self, directory: Path) -> dict[str, Any]:
        """Run the trials."""
        result = super().run(directory)
        import control

        trials = read_experiment(directory).trials
        return {**result, "curves": {trial.arm: control.of_trial(trial) for trial in trials}}


@dataclass(frozen=True)
class BesideRLlib(WithCurves):
    """A slice that also trains RLlib's PPO, for as many steps as the longest of its own trials."""

    environment: str = ""  # a key of `control.TRAINING`

    def run(self, directory: Path) -> dict[str, Any]:
        """Run the trials and RLlib's PPO."""
        result = super().run(directory)
        import control

        curves = result["curves"]
        steps = max(curve[-1][0] for curve in curves.values())
        seed = read_experiment(directory).trials[0].config.seed
        rllib = control.of_rllib(self.environment, seed, steps)
        return {**result, "curves": {**curves, "rllib_ppo": rllib}}


@dataclass(frozen=True)
class BesideTokenEnv(Slice):
    """A slice that also trains RLlib's PPO on the task, with as many responses as its trials."""

    def run(self, directory: Path) -> dict[str, Any]:
        """Run the trials and RLlib's PPO."""
        result = super().run(directory)
        import token_env

        trials = read_experiment(directory).trials
        curves = {trial.arm: token_env.of_trial(trial) for trial in trials}
        responses = int(max(curve[-1][0] for curve in curves.values()))
        rllib = token_env.of_rllib(trials[0].config, responses)
        return {**result, "curves": curves | {"rllib_ppo": rllib}}


@dataclass(frozen=True)
class RealModel:
    """A slice that trains SmolLM2-135M-Instruct with one seed, here or in TRL."""

    name: str
    trainer: str  # an engine and an arm, or `trl`
    seed: int

    def run(self, directory: Path) -> dict[str, Any]:
        """Evaluate, train and evaluate again. An interrupted slice does not keep its trial."""
        return real_model.one_training(self.trainer, real_model.Sizes(rounds=12, seed=self.seed))


SEEDS = f"--num-samples 3 --margin {MARGIN}"
# Two trials at the same time. The actors of each trial reserve 0.1 + 0.9 of the two cores.
TOGETHER = "--max-concurrent 2 --set resources.worker_cpus=0.9"
EVALUATIONS = (
    f"{TOGETHER} --set eval.every=64 --set eval.prompts=32 --set eval.samples=8 "
    "--set eval.final_prompts=224"
)
STORIES = f"{EVALUATIONS} --set optim.lr={off_policy.LR}"
# The slices of the campaign `critic`, and the arms of each.
CRITICS = {
    "ppo": ("grpo", "ppo", "ppo_lambda95"),
    "shared": ("grpo", "ppo_shared"),
    "learning_rate": ("grpo", "ppo_slow_critic", "ppo_fast_critic"),
    "four_steps": ("grpo_k4", "ppo_k4"),
    "vineppo": ("grpo", "vineppo"),
}
# Environment -> options of launch/tune.py for the campaign `control`.
CONTROL = {
    "cartpole": "--samples 2048",
    "pendulum": "--samples 2048 --set model.env=Pendulum-v1 --set rollout.max_new_tokens=200 "
    "--set loss.gamma=0.95",
    "arm": "--samples 8192 --set model.env=grpo_trainable.control.arm:Arm "
    "--set rollout.max_new_tokens=25 --set loss.gamma=0.95",
}
CONTROL_TRIALS = f"{TOGETHER} --set task.name=control --set eval.prompts=32"
# Game -> options for the campaign `games`: the total number of the game's held-out prompts, and the
# number of episodes for each prompt.
GAMES = {
    "guess": "--set eval.prompts=10 --set eval.samples=64",
    "calculator": "--set eval.prompts=64 --set eval.samples=8",
}
# Part of a slice's name -> the trainer, for the campaign `smollm2`.
TRAINERS = {"here": "hf colocated_k1_two_cores", "trl": "trl"}
CAMPAIGNS: dict[str, tuple[Slice | RealModel, ...]] = {
    "atlas": tuple(
        Slice(
            objective,
            "objectives_by_lag",
            tuple(f"{objective}_lag{lag}" for lag in OBJECTIVE_LAGS),
            f"--samples 4096 {SEEDS} {STORIES}",
        )
        for objective in OBJECTIVES
    ),
    "critic": tuple(
        Slice(name, "critic", arms, f"--samples 8192 {SEEDS} {STORIES}")
        for name, arms in CRITICS.items()
    ),
    "advantages": tuple(
        WithAdvantageErrors(
            f"seed{seed}",
            "critic",
            ("ppo", "ppo_fast_critic"),
            f"--samples 8192 --seed {seed} {STORIES} --checkpoint-every 32 "
            "--set checkpoint.keep=none",
        )
        for seed in range(3)
    ),
    "control": (
        *(
            BesideRLlib(
                f"{environment}_seed{seed}",
                "control",
                ("grpo", "ppo"),
                f"{options} --seed {seed} {CONTROL_TRIALS}",
                environment,
            )
            for seed in range(3)
            for environment, options in CONTROL.items()
        ),
        *(
            WithCurves(
                f"{environment}_steps_seed{seed}",
                "control",
                ("grpo_steps", "ppo_steps"),
                f"{CONTROL[environment]} --seed {seed} {CONTROL_TRIALS}",
            )
            for seed in range(3)
            for environment in ("pendulum", "arm")
        ),
    ),
    "token_env": tuple(
        BesideTokenEnv(
            f"seed{seed}",
            "critic",
            ("grpo", "ppo"),
            f"--samples 2048 --seed {seed} {STORIES} --set rollout.max_new_tokens=24",
        )
        for seed in range(3)
    ),
    "games": tuple(
        Slice(
            game,
            "gradient_steps",
            ("k1", "minibatches_k4"),
            f"--samples 16384 {SEEDS} {TOGETHER} --set task.name={game} "
            f"--set eval.every=32 {held_out}",
        )
        for game, held_out in GAMES.items()
    ),
    "smollm2": tuple(
        RealModel(f"{name}_seed{seed}", trainer, seed)
        for seed in range(3)
        for name, trainer in TRAINERS.items()
    ),
}


def main() -> None:
    parser = parser_of(__doc__, seed="only recorded; each slice states its own seeds")
    parser.add_argument("names", nargs="*", metavar="CAMPAIGN", help="campaigns to continue (all)")
    parser.add_argument("--slices", type=number(int, 1), help="number of slices to run (all)")
    parser.add_argument(
        "--only", metavar="SLICE", help="run this slice, even if it was finished at another commit"
    )
    parser.add_argument(
        "--storage", type=Path, default=STORAGE, help=f"storage path of the trials ({STORAGE})"
    )
    args = parser.parse_args()
    if unknown := [name for name in args.names if name not in CAMPAIGNS]:
        raise UsageError(f"{unknown[0]}: unknown campaign; valid: {', '.join(CAMPAIGNS)}")
    names = args.names or list(CAMPAIGNS)
    asked = [(name, own) for name in names for own in to_run(name, args.only)]
    if args.only is not None and not asked:
        raise UsageError(f"{args.only}: not a slice of {', '.join(names)}")
    if any(isinstance(own, RealModel) for _, own in asked[: args.slices]):
        real_model.refuse_without_trl()
    os.nice(19)
    # Ray would raise the niceness further, and the trials would hang while any other work runs.
    os.environ.setdefault("RAY_worker_niceness", "0")
    for name, own in asked[: args.slices]:
        origin = provenance(args)
        command = f"python benchmarks/campaigns.py {name} --only {own.name}"
        directory = args.storage / origin["commit"][:12] / f"{name}_{own.name}"
        finish(name, own, {**origin, "command": command}, directory)
        print(progress(name), flush=True)
        if name in PICTURES:
            PICTURES[name](measurements(read(file_of(name))))


def to_run(name: str, only: str | None) -> list[Slice | RealModel]:
    """Return the unfinished slices of a campaign, or the slice that `only` names."""
    if only is not None:
        return [own for own in CAMPAIGNS[name] if own.name == only]
    done = measurements(read(file_of(name)))
    return [own for own in CAMPAIGNS[name] if own.name not in done]


def finish(name: str, own: Slice | RealModel, origin: dict[str, Any], directory: Path) -> None:
    """Run a slice, and add its result to the file of the campaign."""
    result = checked({**origin, **own.run(directory)})
    planned = [one.name for one in CAMPAIGNS[name]]
    done = {**measurements(read(file_of(name))), own.name: result}
    write(file_of(name), {"planned": planned, "finished": len(done), **done}, quiet=True)


def file_of(name: str) -> Path:
    """Return the JSON file of a campaign."""
    return RESULTS / f"campaign_{name}.json"


def progress(name: str) -> str:
    """Return one line about the finished and the planned slices of a campaign."""
    done = measurements(read(file_of(name)))
    left = [own.name for own in CAMPAIGNS[name] if own.name not in done]
    told = f"{name}: {len(CAMPAIGNS[name]) - len(left)} of {len(CAMPAIGNS[name])} slices"
    return f"{told}; left: {', '.join(left)}" if left else told


# ---- Pictures --------------------------------------------------------------------------------


def draw_atlas(slices: Mapping[str, Mapping[str, Any]]) -> None:
    """Plot each objective's change in held-out reward at each lag, with the change's interval."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    from reports.canvas import Plot, Theme, axes_of, colour, legend, marker, render_all

    label = "change of held-out reward from lag 0"
    lags = OBJECTIVE_LAGS[1:]

    def draw(figure: Figure, theme: Theme) -> None:
        axes = axes_of(figure, theme, x_label=label, y_label="", names=list(slices), below=0.3)
        axes.axvspan(-MARGIN, 0, color=theme.text, alpha=0.12, linewidth=0)
        arms = [arm for own in slices.values() for arm in own["menu"]["arms"].values()]
        changes = [arm["difference"] for arm in arms if arm["difference"] is not None]
        # One objective with a wide interval must not squeeze the intervals of all others.
        axes.set_xlim(min(changes) - 0.1, max(changes) + 0.2)
        for row, (objective, own) in enumerate(slices.items()):
            for i, lag in enumerate(lags):
                found = own["menu"]["arms"][f"{objective}_lag{lag}"]
                if found["difference"] is None:  # the arm failed its audit
                    continue
                y = row + (i - 0.5) * 0.3
                axes.plot([found["low"], found["high"]], [y, y], color=colour(i), linewidth=1.6)
                axes.plot(found["difference"], y, color=colour(i), marker=marker(i), markersize=6)
        handles = [
            Line2D([], [], color=colour(i), marker=marker(i), label=f"lag {lag}")
            for i, lag in enumerate(lags)
        ]
        legend(figure, theme, handles, columns=2)

    height = 1.3 + 0.3 * len(slices)
    plot = Plot(name="atlas", title="Objectives by lag", look="", draw=draw, height=height)
    images = render_all([plot], files=True)
    (ROOT / "docs" / "results" / "atlas.png").write_bytes(images["atlas-file"])


PICTURES = {"atlas": draw_atlas}


if __name__ == "__main__":
    run_benchmark(main)
