"""GRPO here and PPO in RLlib: the same policy and task, at equal samples.

    python benchmarks/grpo_vs_ppo.py                               three seeds of each
    python benchmarks/grpo_vs_ppo.py --samples 192 --seeds 1       to see that it works

GRPO runs as the arms of `grpo_vs_ppo_space.py`: one gradient step on 64 responses, and four, each
on a part of them, as PPO takes. PPO is RLlib's, on `TokenEnv` with our policy and a value head as
its module: no KV cache, a token is a step of the environment. All start from the policy that ships,
sample at one temperature with one learning rate, use one thread, and are measured by the same
evaluation on the same held-out prompts. PPO's trials are written beside GRPO's, so that one report
has all curves. A response of PPO's counts once it is complete: when it stops, some are not, which
the tokens do count. PPO needs the extra `rllib`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from measure import ROOT, parser_of, provenance, run_benchmark, write

from grpo_trainable.config import GRPOConfig, schedule
from reports.report import write_report

if TYPE_CHECKING:
    from ray.rllib.algorithms.ppo import PPO

PPO_ARM = "rllib_ppo"
SPACE = ROOT / "benchmarks" / "grpo_vs_ppo_space.py"
NAME = "grpo_vs_ppo"
STORAGE = Path.home() / "ray_results"
EVERY = 256  # responses between evaluations, as in the space

# The settings of both: the defaults of a trial, but for what PPO has to know in its own words.
OURS = GRPOConfig()
RESPONSES = schedule.responses_per_round(OURS)

# RLlib's, where not its defaults. A response has one reward, at its end, so nothing is discounted.
PPO_SETTINGS: dict[str, Any] = {
    "lr": OURS.optim.lr,
    "grad_clip": OURS.optim.grad_clip,
    "train_batch_size_per_learner": 32 * RESPONSES,  # tokens: about a round's responses
    "minibatch_size": 512,
    "num_epochs": 1,
    "gamma": 1.0,
    "lambda_": 1.0,
    "use_kl_loss": False,
    "clip_param": 0.2,
    "vf_loss_coeff": 0.1,
    "entropy_coeff": 0.0,
}


def main() -> None:
    parser = parser_of(
        __doc__,
        "grpo_vs_ppo.json",
        seed="the first",
        counts={"seeds": (3, "of each"), "samples": (1536, "responses that a trial trains on")},
    )
    parser.add_argument("--storage", type=Path, default=STORAGE, help=f"directory ({STORAGE})")
    parser.add_argument("--ppo", type=Path, help=argparse.SUPPRESS)  # the directory of one trial
    args = parser.parse_args()
    if args.ppo is not None:
        run_ppo(args.ppo, args.seed, args.samples)
        return
    directory = args.storage / NAME
    run_grpo(args)
    for seed in range(args.seed, args.seed + args.seeds):
        run_ppo_in_fresh_process(directory / f"RLlib_PPO_seed={seed}", seed, args.samples)
    trials = [summary(path) for path in sorted(directory.glob("*/result.json"))]
    for trial in trials:
        print(show(trial))
    report = write_report(directory)
    print(f"all curves: {report}")
    settings = {"ppo": PPO_SETTINGS, "samples": args.samples}
    write(args.out, {**provenance(args), "workload": settings, "trials": trials})


def run_grpo(args: argparse.Namespace) -> None:
    command = [
        *(sys.executable, str(ROOT / "launch" / "tune.py"), "--space", str(SPACE)),
        *("--samples", str(args.samples)),
        *("--num-samples", str(args.seeds), "--seed", str(args.seed)),
        *("--name", NAME, "--storage", str(args.storage)),
    ]
    done = subprocess.run(command, cwd=ROOT)
    if done.returncode != 0:
        sys.exit(f"GRPO: status {done.returncode}")


# ---- PPO ---------------------------------------------------------------------------------------


def run_ppo_in_fresh_process(directory: Path, seed: int, samples: int) -> None:
    command = [
        *(sys.executable, str(Path(__file__).resolve()), "--ppo", str(directory)),
        *("--seed", str(seed), "--samples", str(samples)),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, cwd=ROOT)
    if done.returncode != 0:
        sys.exit(f"PPO with seed {seed}: status {done.returncode}")


def run_ppo(directory: Path, seed: int, samples: int) -> None:
    """One trial, written as a trial of ours is: `params.json` and a row a line in `result.json`."""
    import ray

    ray.init(address="local", num_cpus=2, num_gpus=0, include_dashboard=False, log_to_driver=False)
    algo = build_ppo(seed)
    rows = train_ppo(algo, seed, samples)
    algo.stop()
    ray.shutdown()
    directory.mkdir(parents=True)
    params = {"arm": PPO_ARM, "seed": seed, "rounds": len(rows), "eval": {"every": len(rows)}}
    (directory / "params.json").write_text(json.dumps(params))
    (directory / "result.json").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def build_ppo(seed: int) -> PPO:
    from ray.rllib.algorithms.ppo import PPOConfig

    from grpo_trainable.rllib import TokenEnv, language_model_spec

    config = (
        PPOConfig()
        .environment(TokenEnv, env_config={"seed": seed})
        # Whole responses (batch_mode) would be sampled from one seed each time.
        .env_runners(num_env_runners=0, num_envs_per_env_runner=RESPONSES)
        .training(**PPO_SETTINGS)
        .rl_module(rl_module_spec=language_model_spec({"seed": seed}))
        .reporting(metrics_num_episodes_for_smoothing=RESPONSES)
        .debugging(seed=seed)
    )
    return config.build_algo()


def train_ppo(algo: PPO, seed: int, samples: int) -> list[dict[str, Any]]:
    """A row for each iteration, under the names of docs/metrics.md, until `samples` responses are
    complete."""
    measured, evaluated_at = {0: held_out(algo, seed)}, 0
    rows: list[dict[str, Any]] = []
    seconds = cpu_s = 0.0
    while not rows or not rows[-1]["done"]:
        start, cpu_start = time.perf_counter(), time.process_time()
        result = algo.train()
        seconds += time.perf_counter() - start
        cpu_s += time.process_time() - cpu_start
        row = {**ppo_row(result), "time/wall_clock_s": seconds, "cpu_s": cpu_s}
        row["done"] = samples_of(row) >= samples
        if row["done"] or samples_of(row) >= evaluated_at + EVERY:
            evaluated_at = int(samples_of(row) // EVERY) * EVERY
            measured[row["training_iteration"]] = held_out(algo, seed)
        latest = max(measured)
        row |= {"reward/eval_first": measured[0], "reward/eval_mean": measured[latest]}
        rows.append({**row, "eval/round": float(latest), "timestamp": time.time()})
        print(
            f"PPO seed {seed}: {samples_of(row):.0f} responses, {seconds:.0f} s ({cpu_s:.0f} of a "
            f"CPU), training reward {row['reward/train_mean']:.3f}, held out "
            f"{measured[latest]:.3f}",
            flush=True,
        )
    return rows


def ppo_row(result: Mapping[str, Any]) -> dict[str, Any]:
    """What an iteration of RLlib's says, under our names; groups stand for as many responses."""
    runners = result["env_runners"]
    responses = float(runners["num_episodes_lifetime"])
    return {
        "training_iteration": int(result["training_iteration"]),
        "reward/train_mean": float(runners["episode_return_mean"]),
        "response/length_mean": float(runners["episode_len_mean"]),
        "count/trained": responses / OURS.rollout.group_size,
        "count/requested": responses / OURS.rollout.group_size,
        "env_runners/num_episodes_lifetime": responses,
        "num_env_steps_sampled_lifetime": float(runners["num_env_steps_sampled_lifetime"]),
    }


def held_out(algo: PPO, seed: int) -> float:
    """The mean held-out reward of PPO's policy, as a trial of that seed would measure it."""
    from grpo_trainable.checksums import storage_checksum
    from grpo_trainable.evaluation.evaluator import Evaluator
    from grpo_trainable.evaluation.policy import load_evaluated_policy

    config = replace(OURS, seed=seed)
    tensors = {name: t.detach().clone() for name, t in algo.get_module().policy.weights().items()}
    untrained = load_evaluated_policy(config, trained=None)
    weights = replace(untrained.weights, tensors=tensors, checksum=storage_checksum(tensors))
    with closing(Evaluator(config, replace(untrained, weights=weights))) as evaluator:
        return statistics.fmean(own.reward for batch in evaluator.batches() for own in batch)


# ---- What came out -----------------------------------------------------------------------------


def summary(result: Path) -> dict[str, Any]:
    rows = [json.loads(line) for line in result.read_text().splitlines()]
    params = json.loads((result.parent / "params.json").read_text())
    return {
        "arm": params["arm"],
        "seed": params["seed"],
        "samples": samples_of(rows[-1]),
        "tokens": rows[-1]["num_env_steps_sampled_lifetime"],
        "seconds": rows[-1]["time/wall_clock_s"],
        "cpu_s": rows[-1].get("cpu_s"),  # PPO is one process
        "first": rows[0]["reward/eval_first"],
        "last": rows[-1]["reward/eval_mean"],
        "held_out": {
            int(samples_of(row)): row["reward/eval_mean"]
            for row in rows
            if row["eval/round"] == row["training_iteration"]
        },
        "training": {int(samples_of(row)): row["reward/train_mean"] for row in rows},
    }


def samples_of(row: Mapping[str, Any]) -> float:
    return row["count/trained"] * OURS.rollout.group_size


def show(trial: Mapping[str, Any]) -> str:
    return (
        f"{trial['arm']:<13} seed {trial['seed']}: held-out {trial['first']:.3f} -> "
        f"{trial['last']:.3f} in {trial['samples']:.0f} responses, {trial['tokens']:.0f} tokens, "
        f"{trial['seconds']:.0f} s"
    )


if __name__ == "__main__":
    run_benchmark(main)
