"""How much faster the learner takes a gradient step with `model.packing`, and in how much memory.

Two learners take steps on the same made-up groups in turns, one with padded rows and one with
packed ones: with responses of one length, with a long tail of lengths (log-normal with σ = 1, the
longest four times the mean), and with that tail behind a long prompt.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

import measure

MICROBATCH = 16
GROUPS, GROUP_SIZE = 8, 8
# Name -> tokens of the prompt, mean tokens of a response, σ of their logarithm.
WORKLOADS = {
    "equal": (12, 48, 0.0),
    "long tail": (12, 32, 1.0),
    "long prompt": (96, 32, 1.0),
}
LONGEST = 4  # times the mean
KINDS = {"padded": False, "packed": True}


def lengths(mean: int, sigma: float, seed: int) -> list[int]:
    """Of all responses, in tokens."""
    import numpy as np

    drawn = np.random.default_rng(seed).lognormal(-sigma * sigma / 2, sigma, GROUPS * GROUP_SIZE)
    return [int(n) for n in (drawn * mean).round().clip(1, LONGEST * mean)]


def made_up_groups(workload: str, seed: int) -> list[Any]:
    import torch

    from grpo_trainable.rollout import RolloutGroup

    prompt, mean, sigma = WORKLOADS[workload]
    random = torch.Generator().manual_seed(seed)
    tokens = torch.tensor(lengths(mean, sigma, seed)).view(GROUPS, GROUP_SIZE)
    groups = []
    for index, own in enumerate(tokens):
        mask = torch.arange(int(own.max())) < own[:, None]
        zeros = torch.zeros(mask.shape)
        groups.append(
            RolloutGroup(
                prompt_index=index,
                prompt_ids=torch.randint(5, 1000, (prompt,), generator=random),
                response_ids=torch.randint(5, 1000, mask.shape, generator=random),
                response_mask=mask,
                behaviour_log_probs=zeros,
                rewards=torch.rand(GROUP_SIZE, generator=random),
                finished=torch.ones(GROUP_SIZE, dtype=torch.bool),
                token_versions=zeros.int(),
                token_rounds=zeros.int(),
            )
        )
    return groups


def updates(workload: str, packing: bool, args: argparse.Namespace) -> Callable[[], object]:
    """One gradient step on the workload's groups, whenever it is called."""
    from grpo_trainable.actors.learner import Learner
    from grpo_trainable.config import GRPOConfig
    from grpo_trainable.transports.in_process import InProcess

    _, mean, _ = WORKLOADS[workload]
    config = GRPOConfig.from_dict(
        {
            "model": {"preset": measure.PRESET, "packing": packing},
            "rollout": {
                "prompts": GROUPS,
                "group_size": GROUP_SIZE,
                "max_new_tokens": LONGEST * mean,
            },
            # No token is clipped where there is no ratio, wherever its text comes from.
            "loss": {"type": "reinforce_with_baseline", "kl_monitor": False},
            "optim": {"microbatch": MICROBATCH, "lr": 1e-6},
            "resources": {"worker_cpus": float(args.threads)},
        }
    )
    learner, groups = Learner(config, InProcess()), made_up_groups(workload, args.seed)
    return lambda: learner.update([groups])


def inside(args: argparse.Namespace) -> dict[str, Any]:
    """Both kinds in turns; or the memory of one of them, in a process of its own."""
    workload, _, kind = args.inside.partition("/")
    if kind:
        work = updates(workload, KINDS[kind], args)
        for _ in range(3):
            work()
        return measure.resident_mb()
    works = {kind: updates(workload, packing, args) for kind, packing in KINDS.items()}
    measured = measure.in_turns(works, repeats=args.repeats)
    return {"workload": workload, "threads": args.threads, **measured}


def main() -> None:
    args = measure.arguments(__doc__, "packing.json")
    if args.inside:
        print(json.dumps(inside(args)))
        return
    origin = measure.provenance(args)
    rows = []
    for workload in WORKLOADS:
        for threads in measure.THREADS:
            rows.append(measure.in_fresh_process(args, workload, threads))
            rows[-1]["peak_resident_mb"] = {
                kind: measure.in_fresh_process(args, f"{workload}/{kind}", threads)[
                    "peak_resident_mb"
                ]
                for kind in KINDS
            }
            print(shown(rows[-1]), flush=True)
    workload = {
        "preset": measure.PRESET,
        "groups": GROUPS,
        "group_size": GROUP_SIZE,
        "microbatch": MICROBATCH,
        "longest": LONGEST,
        "prompt_mean_sigma": WORKLOADS,
    }
    measure.write(args.out, {**origin, "workload": workload, "results": rows})


def shown(row: dict[str, Any]) -> str:
    speed_up, medians, memory = row["speed_up"], row["seconds_medians"], row["peak_resident_mb"]
    return (
        f"{row['workload']:<12} {row['threads']} threads: {medians['padded']:.3f} s padded, "
        f"{medians['packed']:.3f} s packed, {speed_up['median']:.2f} x "
        f"({speed_up['min']:.2f}-{speed_up['max']:.2f}); {memory['padded']:.0f} and "
        f"{memory['packed']:.0f} MB"
    )


if __name__ == "__main__":
    measure.run_benchmark(main)
