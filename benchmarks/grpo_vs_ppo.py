"""Compare GRPO in this package with PPO in RLlib, in the same Gymnasium environments.

    python benchmarks/grpo_vs_ppo.py                             everything, three seeds: hours
    python benchmarks/grpo_vs_ppo.py --env CartPole-v1 --seeds 1  a quick check of this benchmark

GRPO runs in trials of `launch/tune.py` with `task.name=control`. PPO runs in a separate process,
with RLlib's default network in the same size. Both programs use one thread. An evaluation is the
mean reward of 20 held-out episodes in which the policy takes the most likely actions. A row of the
table gives the seconds of training (without start-up and evaluations) and the number of steps until
an evaluation reaches the target. If the command is interrupted, the same command continues it. PPO
needs the extra `rllib`. The robot arm needs the extra `control`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from measure import (
    assignments,
    finished_trial,
    parser_of,
    printed_by,
    provenance,
    read,
    rows_of,
    run_benchmark,
    same_run,
    write,
)

from grpo_trainable.command_line import align

if TYPE_CHECKING:
    from ray.rllib.algorithms.ppo import PPO

EPISODES = 20  # number of episodes in an evaluation
LIMIT_S = 400.0  # PPO trains for this long, unless it reaches the target earlier


@dataclass(frozen=True, kw_only=True)
class Work:
    """An environment, the reward at which it counts as solved, and settings for both programs."""

    target: float
    ours: Mapping[str, Any]
    ppo: Mapping[str, Any]
    runners: Mapping[str, Any]
    model: Mapping[str, Any]  # settings of RLlib's default module
    filtered: bool = False  # True: PPO normalises observations, as RLlib's examples do


COMMON = {"k_mode": "minibatches", "eval.prompts": EPISODES, "callbacks.verbose": "false"}
LAYERS = {"fcnet_hiddens": [64, 64], "fcnet_activation": "tanh", "vf_share_layers": False}
WORKS: dict[str, Work] = {
    "CartPole-v1": Work(
        target=450.0,
        ours={"k": 16, "optim.epochs": 4, "rounds": 40, "eval.every": 2},
        ppo={
            **{"lr": 1e-3, "train_batch_size_per_learner": 2048, "minibatch_size": 256},
            **{"num_epochs": 8, "clip_param": 0.2, "vf_loss_coeff": 0.5, "vf_clip_param": 1e9},
            **{"use_kl_loss": False, "grad_clip": 0.5, "lambda_": 0.95, "gamma": 0.99},
        },
        model=LAYERS,
        runners={"num_envs_per_env_runner": 8},
    ),
    "Pendulum-v1": Work(
        target=-300.0,
        ours={
            **{"k": 16, "optim.epochs": 4, "rounds": 100, "eval.every": 5},
            **{"rollout.max_new_tokens": 200, "loss.gamma": 0.95, "optim.lr": 1e-3},
        },
        # rllib/examples/algorithms/ppo/pendulum_ppo.py
        ppo={
            **{"lr": 2e-4, "train_batch_size_per_learner": 1024, "minibatch_size": 128},
            **{"num_epochs": 30, "clip_param": 0.3, "vf_loss_coeff": 1.0, "vf_clip_param": 10.0},
            **{"lambda_": 0.5, "gamma": 0.95},
        },
        model={"fcnet_activation": "relu"},
        runners={"num_envs_per_env_runner": 20},
        filtered=True,
    ),
    "grpo_trainable.control.arm:Arm": Work(
        target=0.0,
        ours={
            **{"k": 16, "optim.epochs": 4, "rounds": 80, "eval.every": 5},
            **{"rollout.max_new_tokens": 25, "loss.gamma": 0.9, "optim.lr": 1e-3},
        },
        ppo={
            **{"lr": 5e-4, "train_batch_size_per_learner": 3200, "minibatch_size": 400},
            **{"num_epochs": 6, "clip_param": 0.2, "vf_loss_coeff": 0.25, "vf_clip_param": 1e9},
            **{"use_kl_loss": False, "grad_clip": 0.5, "lambda_": 0.9, "gamma": 0.95},
        },
        model={
            **{"conv_filters": [[16, 4, 2], [32, 4, 2], [32, 3, 2]], "conv_activation": "relu"},
            **{"head_fcnet_hiddens": [128], "vf_share_layers": True},
        },
        runners={"num_envs_per_env_runner": 16, "rollout_fragment_length": "auto"},
    ),
}


def main() -> None:
    parser = parser_of(
        __doc__,
        "grpo_vs_ppo.json",
        seed="the first seed",
        counts={"seeds": (3, "number of seeds of each program")},
    )
    parser.add_argument("--env", action="append", choices=WORKS, help="only this environment")
    parser.add_argument("--ppo", help=argparse.SUPPRESS)  # environment of one PPO trial
    args = parser.parse_args()
    if args.ppo is not None:
        print(json.dumps(list(ppo_curve(args.ppo, args.seed))))
        return
    about = {**provenance(args), "workload": {name: asdict(own) for name, own in WORKS.items()}}
    kept = read(args.out)
    trials = kept["trials"] if same_run(kept, about) else []
    for work in args.env or WORKS:
        for seed in range(args.seed, args.seed + args.seeds):
            for program, run in (("grpo", our_curve), ("rllib_ppo", ppo_in_fresh_process)):
                key = {"env": work, "program": program, "seed": seed}
                if any(trial.items() >= key.items() for trial in trials):
                    continue
                trials.append({**key, **reached(run(work, seed), WORKS[work].target)})
                print(shown(trials[-1]), flush=True)
                write(args.out, {**about, "trials": trials}, quiet=True)
    print()
    print(align([HEADER, *table(trials)]))
    write(args.out, {**about, "trials": trials})


# ---- The curves --------------------------------------------------------------------------------

# For each evaluation: seconds of training and environment steps before it, and its mean reward.
Curve = Sequence[Mapping[str, float]]


def our_curve(work: str, seed: int) -> Curve:
    options = assignments({"task.name": "control", "model.env": work, **COMMON, **WORKS[work].ours})
    with finished_trial("colocated_k1", seed=seed, options=options) as directory:
        return curve_of(rows_of(directory))


def curve_of(rows: Sequence[Mapping[str, Any]]) -> Curve:
    """Return the evaluations of a trial, without the one before training."""
    curve, evaluated = [], 0.0
    for row in rows:
        if row["eval/round"] > evaluated:
            evaluated = row["eval/round"]
            curve.append(
                {
                    "seconds": row["time/wall_clock_s"],
                    "steps": row["num_env_steps_sampled_lifetime"],
                    "mean": row["reward/eval_mean"],
                }
            )
    return curve


def ppo_in_fresh_process(work: str, seed: int) -> Curve:
    return printed_by([sys.executable, __file__, "--ppo", work, "--seed", str(seed)], threads=1)


def ppo_curve(work: str, seed: int) -> Iterator[Mapping[str, float]]:
    """Train PPO until the target or the time limit, and yield an evaluation per iteration."""
    import ray
    import torch

    ray.init(address="local", num_cpus=2, num_gpus=0, include_dashboard=False, log_to_driver=False)
    algo = build_ppo(work, seed)
    torch.set_num_threads(1)  # RLlib does not set this for a learner in this process
    seconds, mean = 0.0, -float("inf")
    while seconds < LIMIT_S and mean < WORKS[work].target:
        start = time.perf_counter()
        row = algo.train()
        seconds += time.perf_counter() - start
        mean = float(algo.evaluate()["env_runners"]["episode_return_mean"])
        steps = row["env_runners"]["num_env_steps_sampled_lifetime"]
        yield {"seconds": seconds, "steps": float(steps), "mean": mean}
    algo.stop()
    ray.shutdown()


def build_ppo(env: str, seed: int) -> PPO:
    from ray.rllib.algorithms.ppo import PPOConfig
    from ray.rllib.connectors.env_to_module import MeanStdFilter
    from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
    from ray.tune.registry import register_env

    from grpo_trainable.control.spaces import make_environment

    work = WORKS[env]
    register_env("control", lambda _: with_floats(make_environment(env)))
    config = (
        PPOConfig()
        .environment("control")
        .env_runners(num_env_runners=0, **work.runners)
        .training(**work.ppo)
        .rl_module(model_config=DefaultModelConfig(**work.model))
        .evaluation(
            evaluation_interval=None,
            evaluation_duration=EPISODES,
            evaluation_duration_unit="episodes",
            evaluation_num_env_runners=0,
            evaluation_config={"explore": False},
        )
        .debugging(seed=seed, log_level="ERROR")
    )
    if work.filtered:
        config = config.env_runners(
            env_to_module_connector=lambda env, spaces, device: MeanStdFilter()
        )
    return config.build_algo()


def with_floats(env: Any) -> Any:
    """Scale the images of an environment to values from 0 to 1, as RLlib's network requires."""
    import gymnasium
    import numpy as np

    if env.observation_space.dtype != np.uint8:
        return env
    space = gymnasium.spaces.Box(0.0, 1.0, env.observation_space.shape, np.float32)
    return gymnasium.wrappers.TransformObservation(
        env, lambda image: (image / 255.0).astype(np.float32), space
    )


# ---- The results -------------------------------------------------------------------------------


def reached(curve: Curve, target: float) -> dict[str, Any]:
    """Return the seconds and steps until an evaluation reached the target, and the whole curve."""
    first = next((point for point in curve if point["mean"] >= target), None)
    return {
        "seconds": first and first["seconds"],
        "steps": first and first["steps"],
        "best": max(point["mean"] for point in curve),
        "curve": list(curve),
    }


HEADER = ["environment", "program", "target", "reached", "seconds (most)", "steps (most)", "best"]


def table(trials: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return a row per environment and program, with the number of trials that reached the target.

    The medians of seconds and steps are over these trials.
    """
    rows = []
    for work, program in dict.fromkeys((t["env"], t["program"]) for t in trials):
        own = [t for t in trials if (t["env"], t["program"]) == (work, program)]
        solved = [t for t in own if t["seconds"] is not None]
        target, best = WORKS[work].target, statistics.median(t["best"] for t in own)
        medians = (_median([t[name] for t in solved]) for name in ("seconds", "steps"))
        counts = f"{len(solved)} of {len(own)}"
        rows.append([work, program, f"{target:g}", counts, *medians, f"{best:.3g}"])
    return rows


def _median(values: Sequence[float]) -> str:
    return f"{statistics.median(values):,.0f} ({max(values):,.0f})" if values else "-"


def shown(trial: Mapping[str, Any]) -> str:
    seconds, name = trial["seconds"], f"{trial['env']} {trial['program']} seed {trial['seed']}"
    when = "not reached" if seconds is None else f"reached after {seconds:.1f} s"
    return f"{name}: {when}; best {trial['best']:.3g}"


if __name__ == "__main__":
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    run_benchmark(main)
