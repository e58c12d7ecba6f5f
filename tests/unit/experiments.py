"""Small experiment directories, written as the launcher and Tune write them."""

from __future__ import annotations

import json
import math
import pickle
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from grpo_trainable.config import GRPOConfig, resources
from search_spaces import SPACES

SPACE = SPACES["async_vs_sync"]
DESCRIPTION = {
    "space": SPACE.name,
    "fixed": {},
    "num_samples": 1,
    "seed": 0,
    "scheduler": "fifo",
    "grpo_trainable": "0.1.0",
    "packages": {"python": "3.11.7", "torch": "2.13.0", "ray": "2.60.0"},
    "machine": {"cpus": 2, "gpus": 0, "platform": "Linux-6.1-x86_64"},
    "started": "2026-11-20T15:00:00+00:00",
}


def write_experiment(directory: Path, **changes: Any) -> Path:
    """Write an experiment without trials. A change to None removes a key from experiment.json."""
    directory.mkdir(parents=True)
    description = {k: v for k, v in {**DESCRIPTION, **changes}.items() if v is not None}
    (directory / "experiment.json").write_text(json.dumps(description))
    return directory


def config(arm: str = "colocated_k1", seed: int = 0, **fixed: Any) -> dict[str, Any]:
    """Return a config in the form of params.json. `fixed` holds values by dotted key."""
    (trial,) = SPACE.trials({"arm": arm, **fixed}, [seed])
    return trial.to_dict()


def write_trial(
    experiment: Path,
    params: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    *,
    error: str | None = None,
) -> Path:
    directory = experiment / f"{params['arm']}-{params['seed']}-abc_0000{params['seed']}"
    directory.mkdir()
    (directory / "params.json").write_text(json.dumps(params))
    if rows:
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (directory / "result.json").write_text(text)
    if error is not None:
        (directory / "error.txt").write_text(error)
    return directory


def of_tune(
    directory: Path, name: str, params: dict[str, Any], rows: list[Any], **options: Any
) -> None:
    """Write a trial whose directory has the name that Tune gives it."""
    write_trial(directory, {**params, "arm": "custom"}, rows, **options).rename(directory / name)


def write_state_of_tune(
    directory: Path, statuses: Mapping[str, str], planned: int, date: str, *, finished: bool = False
) -> None:
    """Write the state of Tune and of its searcher, of which a report reads only these parts.

    Args:
        directory: The experiment.
        statuses: Name of a trial's directory -> status of the trial.
        planned: The number of trials that the searcher will create.
        date: The local time at which the run began.
        finished: True if the searcher will create no more trials.
    """
    trials = [
        [json.dumps({"status": status, "relative_logdir": name}), "{}"]
        for name, status in statuses.items()
    ]
    started = time.mktime(time.strptime(date, "%Y-%m-%d_%H-%M-%S"))
    state = {"trial_data": trials, "stats": {"start_time": started}}
    (directory / f"experiment_state-{date}.json").write_text(json.dumps(state))
    searcher = directory / f"basic-variant-state-{date}.json"
    searcher.write_bytes(pickle.dumps({"_total_samples": planned, "_finished": finished}))


def write_part(trial: Path, kind: str, number: int, rows: Sequence[Mapping[str, Any]]) -> Path:
    path = trial / kind / f"part-{number:08d}.parquet"
    path.parent.mkdir(exist_ok=True)
    pq.write_table(pa.Table.from_pylist([dict(row) for row in rows]), path)
    return path


def gradient_step(round_: int, step: int, kl: float | None, clipped: float = 0.1) -> dict[str, Any]:
    return {"round": round_, "step": step, "clip_fraction": clipped, "kl_behaviour_nats": kl}


def row(round_: int, **metrics: float) -> dict[str, Any]:
    """Return a row of one round with the metrics that every row has.

    Write two underscores for the slash in a metric's name.
    """
    given = {name.replace("__", "/"): value for name, value in metrics.items()}
    return {
        "training_iteration": round_,
        "time_total_s": 1.5 * round_,
        "timestamp": 1_795_000_000 + round_,
        "done": False,
        "count/trained": 16.0 * round_,
        "time/wall_clock_s": max(0.0, 2.0 * (round_ - 2)),
        "time/eval_s": 0.0,
        "time/checkpoint_s": 0.0,
        "cost/device_hours": 0.001 * round_,
        "reward/train_mean": 0.4,
        "reward/eval_mean": 0.5,
        "reward/eval_first": 0.3,
        "eval/round": 0.0,
        "lag/max": 0.0,
        "lag/mean": 0.0,
        **given,
    }


def rollout(round_: int, cursor: int, *, lag: int = 0, first_use: bool = True) -> dict[str, Any]:
    """Return one response."""
    return {"round": round_, "cursor": cursor, "lag": lag, "first_use": first_use, "reward": 1.0}


def evaluation(
    round_: int,
    cursor: int,
    response: str,
    reward: float,
    *,
    prompt: str = "",
    index: int = 0,
    tokens: int = 20,
    finished: bool = True,
) -> dict[str, Any]:
    return {
        "round": round_,
        "cursor": cursor,
        "response_index": index,
        "prompt": prompt or f"prompt {cursor}",
        "response": response,
        "reward": reward,
        "tokens": tokens,
        "finished": finished,
    }


def change(at: float, side: str, version: int) -> dict[str, Any]:
    return {"at": at, "side": side, "actor": f"{side}-0", "version": version, "round": version}


# ---- Every arm with invented measurements ----------------------------------------------------


def write_full(directory: Path, arms: Sequence[str] = tuple(SPACE.arms), seeds: int = 2) -> Path:
    """Write every arm of the space with smooth invented measurements and all files."""
    write_experiment(directory, num_samples=seeds)
    for place, arm in enumerate(arms):
        for seed in range(seeds):
            _write_full_trial(directory, config(arm, seed), place)
    return directory


def _write_full_trial(experiment: Path, params: dict[str, Any], place: int) -> None:
    settings = GRPOConfig.from_dict(params)
    rounds, k, every = settings.rounds, settings.k, settings.eval.every
    asynchronous = settings.lag > 0
    speed = 1 + 0.06 * place + 0.5 * asynchronous

    def wave(round_: int, amount: float) -> float:
        return amount * math.sin(1.3 * round_ + 2 * settings.seed + place)

    def held_out(round_: int) -> float:
        learned = 1 - math.exp(-3.5 * round_ * k / 64 / (1 + 0.05 * place))
        return 0.36 + 0.55 * learned + 0.02 * settings.seed

    rows, evaluated, wall_clock_s = [], 0, 0.0
    for n in range(1, rounds + 1):
        evaluated = n if n % every == 0 or n == rounds else evaluated
        rollout_s, optimize_s = (1.1 * k + wave(n, 0.1)) / speed, (0.9 * k + wave(n, 0.05)) / speed
        step_s = max(rollout_s, optimize_s) if asynchronous else rollout_s + optimize_s
        step_s += 0.2
        wall_clock_s += step_s if n >= 3 else 0
        kl = 6 * (1 - math.exp(-4 * n / rounds)) * (1 + 0.05 * place) + wave(n, 0.2)
        lag = float(min(n - 1, settings.lag))
        rows.append(
            row(
                n,
                count__trained=16.0 * k * n,
                time__wall_clock_s=wall_clock_s,
                time__disturbed_fraction=0.01,
                cost__device_hours=wall_clock_s / 3600 * resources.devices(settings),
                time__rollout_s=rollout_s,
                time__reward_s=0.03 * k,
                time__optimize_s=optimize_s,
                time__reference_s=0.12 * k,
                time__sync_s=0.05,
                time__eval_s=2.0 if n == evaluated else 0.0,
                time__other_s=0.04,
                time__step_s=step_s,
                time__generator_idle_s=0.1 if asynchronous else optimize_s,
                time__learner_idle_s=0.3 if asynchronous else rollout_s,
                reward__train_mean=held_out(n) - 0.02 + wave(n, 0.03),
                reward__eval_mean=held_out(evaluated),
                reward__eval_first=held_out(0),
                eval__round=float(evaluated),
                lag__max=lag,
                lag__mean=lag * 0.8,
                buffer__uses_mean=1.0,
                buffer__age_max=lag,
                buffer__age_mean=lag * 0.8,
                kl__reference_nats=kl,
                kl__reference_k3_nats=kl * 0.8,
                kl__previous_nats=0.1 * k + wave(n, 0.05),
                kl__previous_k3_nats=0.12 * k,
                kl__behaviour_nats=0.1 * k * (1 + lag) + wave(n, 0.04),
                kl__behaviour_k3_nats=0.1 * k * (1 + lag),
                loss__clip_fraction=0.01 * k,
                policy__entropy_nats=1.1 - 0.3 * n / rounds,
                response__length_mean=38 - 8 * n / rounds + wave(n, 1),
                response__reference_nll_nats=1.2 + 0.3 * n / rounds + wave(n, 0.03),
            )
        )
    rows[-1]["done"] = True
    trial = write_trial(experiment, params, rows)
    (trial / "trace.json").write_text("[]")
    start = 1_795_000_000.0
    for n in range(1, rounds + 1):
        lag = min(n - 1, settings.lag)
        write_part(
            trial,
            "rollouts",
            n,
            [rollout(n, 16 * n + g, lag=lag) for g in range(16) for _ in range(4)],
        )
        write_part(trial, "steps", n, [gradient_step(n, i, 0.1 * i) for i in range(1, k + 1)])
        at = start + 2.2 * k * n / speed
        changes = [change(at, "learner", k * n), change(at + 0.4 * k / speed, "generator", k * n)]
        before = [change(start, "learner", 0), change(start + 0.1, "generator", 0)]
        write_part(trial, "versions", n, [*(before if n == 1 else []), *changes])
        if n == 1 or n % every == 0 or n == rounds:
            when = [0] if n == 1 else []
            when += [n] if n % every == 0 or n == rounds else []
            write_part(
                trial,
                "evaluations",
                n,
                [
                    evaluation(
                        r,
                        cursor,
                        f"Once there was a {'dog' if r == 0 else 'lamp'}. It was round {r}. "
                        "They went to the park and played until the sun went down.",
                        float(r > 0),
                        prompt=f"Write a story with the word lamp{cursor}.\n",
                    )
                    for r in when
                    for cursor in range(6)
                ],
            )
