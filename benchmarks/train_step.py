"""How fast the learner takes a gradient step, beside the floor that the machine's matrix products
set; and how much memory generator and learner hold in one process."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

import measure

MICROBATCH = 16
FLOP_FORMULA = (
    "6 × (body matmul parameters × positions of all rows, prompt included, padding not "
    "+ head parameters × response tokens)"
)
MEMORY_LIMIT_MB = 700


def flop(prompt_lengths: Sequence[int]) -> int:
    """Forward, and backward at twice its cost. The last token of a row is never an input."""
    from grpo_trainable.models.model_config import PRESETS

    config = PRESETS[measure.PRESET]
    body_positions = measure.GROUP_SIZE * sum(
        length + measure.NEW_TOKENS - 1 for length in prompt_lengths
    )
    head_positions = len(prompt_lengths) * measure.GROUP_SIZE * measure.NEW_TOKENS
    head_parameters = config.vocab_size * config.d_model
    return 6 * (config.matmul_parameters * body_positions + head_parameters * head_positions)


def config_of(args: argparse.Namespace, **changes: Any) -> Any:
    from grpo_trainable.config import GRPOConfig

    return GRPOConfig.from_dict(
        {
            "seed": args.seed,
            "model": {"preset": measure.PRESET},
            "rollout": {
                "prompts": measure.PROMPTS,
                "group_size": measure.GROUP_SIZE,
                "max_new_tokens": measure.NEW_TOKENS,
            },
            # So small that the one batch stays on-policy over all repeats.
            "optim": {"microbatch": MICROBATCH, "lr": 1e-6},
            "resources": {
                "generator_cpus": float(args.threads),
                "worker_cpus": float(args.threads),
            },
            **changes,
        }
    )


def step(args: argparse.Namespace) -> dict:
    """`Learner.update`: advantages, padding, forward, backward, clipping, AdamW. No KL."""
    from dataclasses import replace

    import torch

    from grpo_trainable.actors.learner import Learner
    from grpo_trainable.transports.in_process import InProcess

    learner = Learner(config_of(args, loss={"kl_monitor": False}), InProcess())
    generator = torch.Generator().manual_seed(args.seed)
    groups = [
        replace(group, rewards=torch.rand(measure.GROUP_SIZE, generator=generator))
        for group in measure.engine_of_random_weights(args.seed).generate(
            measure.sample_requests(args.seed), lambda: None
        )
    ]

    def update() -> None:
        (gradient_step,) = learner.update([groups]).steps
        assert not gradient_step.skipped
        assert gradient_step.clip_fraction < 0.05  # hardly a token without a gradient

    return measure.measured(
        update,
        flop=flop(measure.prompt_lengths(args.seed)),
        tokens=measure.RESPONSES * measure.NEW_TOKENS,
        threads=args.threads,
        repeats=args.repeats,
    )


def memory(args: argparse.Namespace) -> dict:
    """Generator (engine, task, scorer) and learner (policy, optimizer, reference), three rounds."""
    from grpo_trainable.actors.colocated import Colocated
    from grpo_trainable.models.directory import policy_tokenizer
    from grpo_trainable.prompts import Prompts, build_task
    from grpo_trainable.transports.in_process import InProcess

    config = config_of(args)
    worker = Colocated(config, InProcess())
    prompts = Prompts(config, build_task(config), policy_tokenizer(config.model))
    for round_ in range(3):
        worker.load(worker.publish().handle)
        first = round_ * measure.PROMPTS
        indices = range(first, first + measure.PROMPTS)
        chunk = worker.generate([prompts.request("train", index) for index in indices])
        worker.update([chunk.groups])
    worker.close()
    return measure.resident_mb()


def main() -> None:
    args = measure.arguments(__doc__, "train_step.json")
    if args.inside:
        print(json.dumps({"step": step, "memory": memory}[args.inside](args)))
        return
    result = measure.provenance(args)
    rows = [measure.in_fresh_process(args, "step", n) for n in measure.THREADS]
    held = measure.in_fresh_process(args, "memory", measure.THREADS[0])
    measure.print_rows(
        f"one gradient step on {measure.RESPONSES} rows × {measure.NEW_TOKENS} response tokens, "
        f"microbatches of {MICROBATCH}, {measure.PRESET}, float32",
        rows,
    )
    print(
        f"\ngenerator + learner with reference in one process: {held['resident_mb']:.0f} MB "
        f"resident, {held['peak_resident_mb']:.0f} MB at most (limit {MEMORY_LIMIT_MB})"
    )
    measure.write(
        args.out,
        {
            **result,
            "microbatch": MICROBATCH,
            "flop_formula": FLOP_FORMULA,
            "results": rows,
            "generator_and_learner": {**held, "limit_mb": MEMORY_LIMIT_MB},
        },
    )


if __name__ == "__main__":
    measure.run_benchmark(main)
