"""How fast responses are sampled, beside the floor that the machine's matrix products set."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

import measure

FLOP_FORMULA = (
    "2 × (body matmul parameters × positions run through the body "
    "+ head parameters × positions projected), prompts once per group"
)


def flop(prompt_lengths: Sequence[int]) -> int:
    """The least that must be computed: the last token of a response is never fed back, and the
    first one's logits are the same for the responses to one prompt."""
    from grpo_trainable.models.model_config import PRESETS

    config = PRESETS[measure.PRESET]
    decoded = len(prompt_lengths) * measure.GROUP_SIZE * (measure.NEW_TOKENS - 1)
    body_positions = sum(prompt_lengths) + decoded
    head_positions = len(prompt_lengths) + decoded
    head_parameters = config.vocab_size * config.d_model
    return 2 * (config.matmul_parameters * body_positions + head_parameters * head_positions)


def inside(args: argparse.Namespace) -> dict:
    from grpo_trainable.actors.process import keep_freed_memory

    keep_freed_memory()
    engine = measure.engine_of_random_weights(args.seed)
    requests = measure.sample_requests(args.seed)
    tokens = measure.RESPONSES * measure.NEW_TOKENS
    groups = engine.generate(requests, lambda: None)
    assert sum(group.num_tokens for group in groups) == tokens
    return measure.measured(
        lambda: engine.generate(requests, lambda: None),
        flop=flop(measure.prompt_lengths(args.seed)),
        tokens=tokens,
        threads=args.threads,
        repeats=args.repeats,
    )


def main() -> None:
    args = measure.arguments(__doc__, "generation.json")
    if args.inside:
        print(json.dumps(inside(args)))
        return
    result = measure.provenance(args)
    rows = [measure.in_fresh_process(args, "generation", n) for n in measure.THREADS]
    measure.print_rows(
        f"{measure.RESPONSES} responses × {measure.NEW_TOKENS} tokens, {measure.PRESET}, float32",
        rows,
    )
    measure.write(args.out, {**result, "flop_formula": FLOP_FORMULA, "results": rows})


if __name__ == "__main__":
    measure.run_benchmark(main)
