"""Does the work of a trial's process grow with the number of generators?

The process of a trial requests chunks of one prompt from 1 to 64 generators, receives them, passes
them through the staleness gate and the replay buffer, and hands them to the learner. Actors are
virtual and use no CPU time (`grpo_trainable/simulation`). The CPU seconds of this process's thread
are therefore the work of the pipeline, without Ray's calls. This work limits the number of
generators that one trial can use.
"""

from __future__ import annotations

import statistics
import time

from measure import parser_of, provenance, run_benchmark, write

from grpo_trainable.config import GRPOConfig
from grpo_trainable.simulation.trial import virtual_trial

CHUNKS = 4  # number of chunks, of one prompt each, per generator and round
RESPONSES = 8  # responses to a prompt
WARM_UP = 2  # rounds
SPARE = 4  # rounds at the end, which request fewer and fewer chunks
GENERATORS = (1, 2, 4, 8, 16, 32, 64)


def config_of(generators: int, rounds: int) -> GRPOConfig:
    return GRPOConfig.from_dict(
        {
            "placement": "disaggregated",
            "rounds": WARM_UP + rounds + SPARE,
            "lag": 1,
            "rollout": {
                "prompts": generators * CHUNKS,
                "unit_prompts": 1,
                "group_size": RESPONSES,
            },
            "eval": {"every": 10**6, "prompts": 1, "samples": 1},
            "resources": {"num_generators": generators},
        }
    )


def seconds_a_chunk(generators: int, chunks: int, seed: int) -> float:
    """Return the CPU seconds of this thread per chunk."""
    rounds = max(2, chunks // (generators * CHUNKS))
    trial = virtual_trial(config_of(generators, rounds), seed=seed, max_waits=10**9)
    trial.pipeline.send_first_weights()
    for _ in range(WARM_UP):
        trial.pipeline.run_round()
    began = time.thread_time()
    for _ in range(rounds):
        trial.pipeline.run_round()
    return (time.thread_time() - began) / (rounds * generators * CHUNKS)


def main() -> None:
    counts = {
        "repeats": (3, "number of repeats for each number of generators"),
        "chunks": (512, "number of chunks in each repeat"),
    }
    args = parser_of(__doc__, "scale.json", counts=counts).parse_args()
    rows = []
    for generators in GENERATORS:
        found = [
            seconds_a_chunk(generators, args.chunks, args.seed + repeat)
            for repeat in range(args.repeats)
        ]
        rows.append({"generators": generators, "thread_s_a_chunk": found})
        print(
            f"{generators:>2} generators: {1e3 * statistics.median(found):.2f} ms of CPU time "
            f"per chunk ({1e3 * min(found):.2f}-{1e3 * max(found):.2f})",
            flush=True,
        )
    workload = {"chunks": args.chunks, "responses": RESPONSES}
    write(args.out, {**provenance(args), "workload": workload, "rows": rows})


if __name__ == "__main__":
    run_benchmark(main)
