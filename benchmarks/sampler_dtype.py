"""How much faster the engine `torch` samples with `model.sampler_dtype=bfloat16`.

Two engines with the same random weights answer the same requests in turns, one in float32 and one
with matrices in bfloat16. Responses have one length, so that both compute as many tokens. Beside
the seconds: by how many nats a token's log-prob differs from the learner's, in the mean.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import measure


def inside(args: argparse.Namespace) -> dict[str, Any]:
    from grpo_trainable.actors.process import keep_freed_memory
    from grpo_trainable.engines.agreement import mean_difference
    from grpo_trainable.models.narrow import narrow
    from grpo_trainable.models.transformer import TransformerLM

    keep_freed_memory()
    wide, narrowed = (measure.engine_of_random_weights(args.seed) for _ in range(2))
    narrow(narrowed.model)
    learner = TransformerLM(wide.model.config, args.seed)
    requests = measure.sample_requests(args.seed)
    differences = {
        name: mean_difference(engine, learner, requests, 0)
        for name, engine in (("float32", wide), ("bfloat16", narrowed))
    }
    works = {
        "float32": lambda: wide.generate(requests, lambda: None),
        "bfloat16": lambda: narrowed.generate(requests, lambda: None),
    }
    measured = measure.in_turns(works, repeats=args.repeats)
    return {"threads": args.threads, **measured, "nats_from_learner": differences}


def main() -> None:
    args = measure.arguments(__doc__, "sampler_dtype.json")
    if args.inside:
        print(json.dumps(inside(args)))
        return
    origin = measure.provenance(args)
    rows = []
    for threads in measure.THREADS:
        rows.append(measure.in_fresh_process(args, "both", threads))
        print(shown(rows[-1]), flush=True)
    measure.write(args.out, {**origin, "results": rows})


def shown(row: dict[str, Any]) -> str:
    speed_up, medians, nats = row["speed_up"], row["seconds_medians"], row["nats_from_learner"]
    return (
        f"{row['threads']} threads: {medians['float32']:.3f} s float32, "
        f"{medians['bfloat16']:.3f} s bfloat16, {speed_up['median']:.2f} x "
        f"({speed_up['min']:.2f}-{speed_up['max']:.2f}); "
        f"{nats['float32']:.2g} and {nats['bfloat16']:.2g} nats a token from the learner"
    )


if __name__ == "__main__":
    measure.run_benchmark(main)
