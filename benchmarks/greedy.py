"""How many problems does the shipped arithmetic policy solve when it always takes the most likely
token, and how many when it samples?

The difference is what it knows and does not show: GRPO can gain that much by making the policy sure
of what it prefers already. Figures and intervals are those of `launch/evaluate.py --task math`.
"""

from __future__ import annotations

import os
from contextlib import closing
from dataclasses import asdict
from typing import Any

from measure import parser_of, provenance, run_benchmark, write

from grpo_trainable.evaluation.checkpoint import TrainedPolicy
from grpo_trainable.evaluation.evaluator import Evaluator
from grpo_trainable.evaluation.policy import load_evaluated_policy
from grpo_trainable.evaluation.settings import evaluation_config
from reports.evaluations.measures import measures
from reports.evaluations.record import EvaluationRecord

PROBLEMS = 512  # of an evaluation, as in arithmetic.py
HOW: dict[str, dict[str, float]] = {
    "greedy": {"--temperature": 0.0, "--samples": 1},
    "sampled": {"--temperature": 1.0, "--samples": 8},
}
SHOWN = ("pass@1", "pass@8", "format_reward", "response_tokens")


def main() -> None:
    args = parser_of(__doc__, "greedy.json", seed="of sampling").parse_args()
    found = {how: figures(None, how, seed=args.seed) for how in HOW}
    for how, own in found.items():
        said = [f"{name} {own[name]['value']:.3f}" for name in SHOWN if name in own]
        print(f"{how:<8} {', '.join(said)}", flush=True)
    workload = {"policy": "arithmetic", "task": "math", "problems": PROBLEMS, "how": HOW}
    write(args.out, {**provenance(args), "workload": workload, **found})


def figures(trained: TrainedPolicy | None, how: str, *, seed: int) -> dict[str, Any]:
    """The figures of a checkpoint's policy, or of the shipped one, on the held-out problems.

    `how`: a key of `HOW`.
    """
    options = {"--task": "math", "--prompts": PROBLEMS, "--seed": seed, **HOW[how]}
    config = evaluation_config(trained, [], options, os.getcwd())
    policy = load_evaluated_policy(config, trained)
    with closing(Evaluator(config, policy)) as evaluator:
        generations = [own for batch in evaluator.batches() for own in batch]
    record = EvaluationRecord(
        name=how,
        policy=policy.to_dict(),
        config=config.to_dict(),
        generations=generations,
        origin={},
    )
    return {name: asdict(measure.figure()) for name, measure in measures(record).items()}


if __name__ == "__main__":
    run_benchmark(main)
