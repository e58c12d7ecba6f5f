"""Control: GRPO here and RLlib's PPO in the same environments of Gymnasium.

    python benchmarks/control.py                                  every environment, three seeds
    python benchmarks/control.py --env CartPole-v1 --seeds 1      to see that it works

Our trials are those of `launch/tune.py` with `task.name=control`; PPO is RLlib's, in a process of
its own, with its own network of the same size. Both use one thread, and are evaluated by the mean
reward of 20 held-out episodes in which they take their most likely action. Told are the seconds of
training, evaluations and start left out, and the steps of the environment until an evaluation
first reaches the target, and the last evaluation. It goes on where it was cut short. PPO needs the
extra `rllib`, the arm the extra `control`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from measure import ROOT, parser_of, provenance, run_benchmark, same_run, write
from trial_runs import finished_trial, rows_of

from grpo_trainable.command_line import align
from grpo_trainable.control import make_environment

if TYPE_CHECKING:
    from ray.rllib.algorithms.ppo import PPO

EPISODES = 20  # of an evaluation
LIMIT_S = 400.0  # of PPO's training, unless it reaches its target before


@dataclass(frozen=True, kw_only=True)
class Work:
    """An environment, what counts as solved, and the settings of both programs."""

    target: float
    ours: Mapping[str, Any]
    ppo: Mapping[str, Any]
    model: Mapping[str, Any]  # of RLlib's default module
    runners: Mapping[str, Any]
    filtered: bool = False  # whether PPO normalises observations, as RLlib's examples do


COMMON = {"k_mode": "minibatches", "eval.prompts": EPISODES, "callbacks.verbose": False}
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
        __doc__, "control.json", seed="the first", counts={"seeds": (3, "of each program")}
    )
    parser.add_argument("--env", action="append", choices=WORKS, help="only these environments")
    parser.add_argument("--ppo", help=argparse.SUPPRESS)  # the environment of one trial of PPO
    args = parser.parse_args()
    if args.ppo is not None:
        print(json.dumps(list(ppo_curve(args.ppo, args.seed))))
        return
    about = provenance(args)
    kept = json.loads(args.out.read_text()) if args.out.exists() else {}
    trials = kept["trials"] if same_run(kept, about) else []
    chosen = args.env or list(WORKS)
    for env in chosen:
        for seed in range(args.seed, args.seed + args.seeds):
            for program, run in (("grpo", our_curve), ("rllib_ppo", ppo_in_fresh_process)):
                key = {"env": env, "program": program, "seed": seed}
                if any(trial.items() >= key.items() for trial in trials):
                    continue
                trials.append({**key, **reached(run(env, seed), WORKS[env].target)})
                print(shown(trials[-1]), flush=True)
                write(args.out, {**about, **told(trials)}, quiet=True)
    print()
    print(align([HEADER, *table(told(trials)["summary"])]))
    write(args.out, {**about, **told(trials)})


# ---- The curves --------------------------------------------------------------------------------

# An evaluation: the seconds of training and steps of the environment before it, and its mean.
Curve = Sequence[Mapping[str, float]]


def our_curve(env: str, seed: int) -> Curve:
    settings = {**COMMON, "task.name": "control", "model.env": env, **WORKS[env].ours}
    options = [
        word for key, value in settings.items() for word in ("--set", f"{key}={plain(value)}")
    ]
    with finished_trial("colocated_k1", seed=seed, options=options) as directory:
        rows = rows_of(directory)
    curve, evaluated = [], 0.0  # the first evaluation is of no training
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


def plain(value: Any) -> str:
    return json.dumps(value) if isinstance(value, bool) else str(value)


def ppo_in_fresh_process(env: str, seed: int) -> Curve:
    command = [sys.executable, str(ROOT / "benchmarks" / "control.py"), "--ppo", env]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--seed", str(seed)],
        env=environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    if done.returncode != 0:
        sys.exit(f"PPO in {env} with seed {seed}: status {done.returncode}\n{done.stdout}")
    return json.loads(done.stdout.splitlines()[-1])


def ppo_curve(env: str, seed: int) -> Iterator[Mapping[str, float]]:
    """Evaluates after every iteration, until the target is reached or the time is up."""
    import ray
    import torch

    ray.init(address="local", num_cpus=2, num_gpus=0, include_dashboard=False, log_to_driver=False)
    algo = build_ppo(env, seed)
    torch.set_num_threads(1)  # RLlib sets none where the learner is in this process
    seconds, mean = 0.0, -float("inf")
    while seconds < LIMIT_S and mean < WORKS[env].target:
        start = time.perf_counter()
        row = algo.train()
        seconds += time.perf_counter() - start
        mean = algo.evaluate()["env_runners"]["episode_return_mean"]
        steps = row["env_runners"]["num_env_steps_sampled_lifetime"]
        yield {"seconds": seconds, "steps": float(steps), "mean": float(mean)}
    algo.stop()
    ray.shutdown()


def build_ppo(env: str, seed: int) -> PPO:
    from ray.rllib.algorithms.ppo import PPOConfig
    from ray.rllib.connectors.env_to_module import MeanStdFilter
    from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
    from ray.tune.registry import register_env

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
    """The environment with images of numbers between 0 and 1, which RLlib's network takes."""
    import gymnasium
    import numpy as np

    if env.observation_space.dtype != np.uint8:
        return env
    space = gymnasium.spaces.Box(0.0, 1.0, env.observation_space.shape, np.float32)
    return gymnasium.wrappers.TransformObservation(
        env, lambda image: (image / 255.0).astype(np.float32), space
    )


# ---- What came of it ---------------------------------------------------------------------------


def reached(curve: Curve, target: float) -> dict[str, Any]:
    """When an evaluation first reached the target, and the whole curve."""
    first = next((point for point in curve if point["mean"] >= target), None)
    return {
        "seconds": first and first["seconds"],
        "steps": first and first["steps"],
        "first": curve[0]["mean"],
        "last": curve[-1]["mean"],
        "best": max(point["mean"] for point in curve),
        "curve": list(curve),
    }


def told(trials: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The trials, and for each environment and program how many reached the target and the medians
    of those."""
    summary = []
    for env, work in WORKS.items():
        for program in ("grpo", "rllib_ppo"):
            own = [t for t in trials if (t["env"], t["program"]) == (env, program)]
            solved = [t for t in own if t["seconds"] is not None]
            if not own:
                continue
            row = {"env": env, "program": program, "target": work.target, "trials": len(own)}
            row["reached"] = len(solved)
            for name in ("seconds", "steps"):
                row[name] = statistics.median(t[name] for t in solved) if solved else None
                row[f"most_{name}"] = max((t[name] for t in solved), default=None)
            row["best"] = statistics.median(t["best"] for t in own)
            summary.append(row)
    works = {
        env: {
            "target": w.target,
            "grpo": {**COMMON, **w.ours},
            "ppo": {**w.ppo},
            "model": {**w.model},
        }
        for env, w in WORKS.items()
    }
    return {"workload": works, "trials": list(trials), "summary": summary}


HEADER = ["environment", "program", "target", "reached", "seconds (most)", "steps (most)", "best"]


def table(summary: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    return [
        [
            *(row["env"], row["program"], f"{row['target']:g}"),
            f"{row['reached']} of {row['trials']}",
            _most(row, "seconds"),
            _most(row, "steps"),
            f"{row['best']:.1f}",
        ]
        for row in summary
    ]


def _most(row: Mapping[str, Any], name: str) -> str:
    return "-" if row[name] is None else f"{row[name]:,.0f} ({row[f'most_{name}']:,.0f})"


def shown(trial: Mapping[str, Any]) -> str:
    when = "not reached"
    if trial["seconds"] is not None:
        when = f"reached after {trial['seconds']:.1f} s, {trial['steps']:,.0f} steps"
    ends = f"{trial['first']:.1f} -> {trial['last']:.1f}, best {trial['best']:.1f}"
    return f"{trial['env']} {trial['program']} seed {trial['seed']}: {when}; {ends}"


if __name__ == "__main__":
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    run_benchmark(main)
