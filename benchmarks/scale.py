"""What grows with the number of generators: the driver's work, and the way of the weights.

driver       The product's pipeline asks 1 to 64 generators for chunks, over virtual actors
             (`grpo_trainable/simulation`), and 1 to 8 over real Ray actors that answer at once with
             groups of a given length. CPU seconds of the driver for each chunk: of its thread,
             which limits how many generators it can serve, and of its process, in which Ray's own
             threads are at work whether anything is asked or not.
broadcast    How long a snapshot takes to machines that fetch it whole or in parts, by a model of
             links that flows share equally, beside what `broadcast.py` has measured; and what that
             gives for a policy of 1.5 billion parameters in bfloat16 at 100 Gbit/s.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from measure import RESULTS, parser_of, provenance, run_benchmark, write

from grpo_trainable.config import GRPOConfig
from grpo_trainable.messages import Loaded, Published, Scored, Updated
from grpo_trainable.rollout import Request, RolloutGroup
from grpo_trainable.simulation.groups import group_of
from grpo_trainable.simulation.roles import VirtualGenerator, VirtualLearner, VirtualRequests
from grpo_trainable.simulation.trial import virtual_trial
from grpo_trainable.transports.parts import PARTS

# ---- The driver ------------------------------------------------------------------------------

CHUNKS = 4  # a round for each generator, of one prompt
RESPONSES = 8  # responses to a prompt
WARM_UP = 2  # rounds
SPARE = 4  # rounds at the end, in which less and less is asked for
ACTORS = {"virtual": (1, 2, 4, 8, 16, 32, 64), "real": (1, 2, 4, 8)}  # numbers of generators


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


def timed(pipeline: Any, generators: int, rounds: int) -> tuple[float, float]:
    """CPU seconds of this thread and of this process for each chunk."""
    for _ in range(WARM_UP):
        pipeline.run_round()
    thread, process = time.thread_time(), time.process_time()
    for _ in range(rounds):
        pipeline.run_round()
    chunks = rounds * generators * CHUNKS
    return (time.thread_time() - thread) / chunks, (time.process_time() - process) / chunks


def over_virtual_actors(generators: int, chunks: int, seed: int) -> tuple[float, float]:
    rounds = max(2, chunks // (generators * CHUNKS))
    trial = virtual_trial(config_of(generators, rounds), seed=seed, max_waits=10**9)
    trial.pipeline.start()
    return timed(trial.pipeline, generators, rounds)


class AnsweringGenerator:
    """Answers at once, with as many bytes as a real one."""

    def __init__(self, name: str, tokens: int) -> None:
        self._role = VirtualGenerator(name, [], lambda stream, prompt_index: False)
        self._tokens = tokens

    def load(self, handle: Any, received: Any = None) -> Loaded:
        now = time.time()
        return self._role.load(now, now, handle)

    def generate(self, requests: Sequence[Request]) -> Scored:
        now = time.time()
        scored = self._role.generate(now, now, requests)
        assert isinstance(scored, Scored)
        return replace(scored, groups=[long_group(group, self._tokens) for group in scored.groups])


class AnsweringLearner:
    def __init__(self, config: GRPOConfig) -> None:
        self._role = VirtualLearner(config, [], [])

    def update(self, batches: Sequence[Sequence[RolloutGroup]]) -> Updated:
        now = time.time()
        return self._role.update(now, now, batches)

    def publish(self, needed_from: int) -> Published:
        now = time.time()
        return self._role.publish(now, now, needed_from)


def long_group(group: RolloutGroup, tokens: int) -> RolloutGroup:
    weights = [(int(group.token_versions[0, 0]), int(group.token_rounds[0, 0]))] * tokens
    return group_of(group.prompt_index, rewards=group.rewards.tolist(), weights=weights)


def over_real_actors(generators: int, chunks: int, tokens: int) -> tuple[float, float]:
    import ray

    from grpo_trainable.learner_group import LearnerGroup
    from grpo_trainable.pipeline import Pipeline
    from grpo_trainable.remote import RayActor, RayRuntime

    rounds = max(2, chunks // (generators * CHUNKS))
    config = config_of(generators, rounds)
    ray.init(
        address="local", num_cpus=1 + generators, include_dashboard=False, logging_level="ERROR"
    )
    try:
        runtime = RayRuntime()
        learner = RayActor(AnsweringLearner, "learner", config, num_cpus=1, num_gpus=0)
        actors = [
            RayActor(AnsweringGenerator, name, name, tokens, num_cpus=1, num_gpus=0)
            for name in (f"generator-{i}" for i in range(generators))
        ]
        learners = LearnerGroup([learner], runtime, config.resources.deadline_s)
        pipeline = Pipeline(config, VirtualRequests(config), actors, learners, runtime)
        pipeline.start()
        return timed(pipeline, generators, rounds)
    finally:
        ray.shutdown()


def drivers(args: argparse.Namespace) -> dict[str, Any]:
    rows = []
    for kind in args.actors:
        for generators in ACTORS[kind]:
            found = [
                over_virtual_actors(generators, args.chunks, args.seed + repeat)
                if kind == "virtual"
                else over_real_actors(generators, args.chunks, args.tokens)
                for repeat in range(args.repeats)
            ]
            thread, process = zip(*found, strict=True)
            row = {"actors": kind, "generators": generators}
            rows.append({**row, "thread_s_a_chunk": thread, "process_s_a_chunk": process})
            print(
                f"{generators:>2} generators, {kind} actors: "
                f"{1e3 * statistics.median(thread):.2f} ms of the driver's thread a chunk "
                f"({1e3 * min(thread):.2f}-{1e3 * max(thread):.2f}), "
                f"{1e3 * statistics.median(process):.2f} ms of its process",
                flush=True,
            )
    return {"chunks": args.chunks, "tokens": args.tokens, "responses": RESPONSES, "rows": rows}


# ---- The way of the weights ------------------------------------------------------------------


@dataclass
class Flow:
    """A machine that fetches a part from another."""

    reader: int
    source: int
    part: int
    left: float  # copies of the whole


def copies(machines: int, parts: int, seed: int) -> float:
    """Seconds until the last of `machines` has all parts, in those that one copy of the whole takes
    through a link.

    Machine -1 has all at the start. Each other fetches one part after the other, the first a share
    of the parts behind that of its neighbour, from one of the machines that has the part, whichever
    it may be. Those that fetch from one machine share what it can send.
    """
    rng = random.Random(seed)
    holders: list[list[int]] = [[-1] for _ in range(parts)]
    waiting = {
        reader: [(reader * parts // machines + i) % parts for i in range(parts)]
        for reader in range(machines)
    }

    def next_flow(reader: int) -> Flow:
        part = waiting[reader].pop(0)
        return Flow(reader, rng.choice(holders[part]), part, 1.0 / parts)

    flows, now = [next_flow(reader) for reader in range(machines)], 0.0
    while flows:
        senders = Counter(flow.source for flow in flows)
        step = min(flow.left * senders[flow.source] for flow in flows)
        now += step
        for flow in flows:
            flow.left -= step / senders[flow.source]
        done = [flow for flow in flows if flow.left < 1e-12]
        flows = [flow for flow in flows if flow.left >= 1e-12]
        for flow in done:
            holders[flow.part].append(flow.reader)
        flows += [next_flow(flow.reader) for flow in done if waiting[flow.reader]]
    return now


MACHINES = (1, 2, 4, 8, 16, 32, 64)
CUTS = (1, PARTS, 64)

PARAMETERS, BYTES_OF_ONE = 1.5e9, 2  # bfloat16
LINK_BYTES = 100e9 / 8  # a second


def broadcasts(args: argparse.Namespace) -> dict[str, Any]:
    rows = []
    for machines in MACHINES:
        taken = {
            cut: statistics.median(copies(machines, cut, args.seed + i) for i in range(10))
            for cut in CUTS
        }
        rows.append({"machines": machines, "copies": taken})
    one_copy_s = PARAMETERS * BYTES_OF_ONE / LINK_BYTES
    print(
        f"{PARAMETERS * BYTES_OF_ONE / 1e9:g} GB at 100 Gbit/s: one copy takes {one_copy_s:.2f} s"
    )
    for row in rows:
        shown = ", ".join(
            f"{cut} parts {taken:.2f} copies = {taken * one_copy_s:.2f} s"
            for cut, taken in row["copies"].items()
        )
        print(f"{row['machines']:>2} machines: {shown}")
    return {
        "rows": rows,
        "bytes": PARAMETERS * BYTES_OF_ONE,
        "one_copy_s": one_copy_s,
        "measured": beside_the_measured(args.seed),
    }


def beside_the_measured(seed: int) -> list[dict[str, Any]]:
    """What the model says of what `broadcast.py` has measured."""
    path = RESULTS / "broadcast.json"
    if not path.exists():
        return []
    found = json.loads(path.read_text())
    machines, rows = found["workload"]["machines"], []
    for way, parts in (("whole", 1), ("parts", PARTS)):
        seconds = found["results"][way]["seconds"]["median"]
        taken = statistics.median(copies(machines, parts, seed + i) for i in range(10))
        row = {"way": way, "model": taken, "measured": seconds / found["one_copy_s"]}
        rows.append(row)
        print(
            f"{machines} machines, {way}: {row['measured']:.2f} copies measured, "
            f"{taken:.2f} by the model"
        )
    return rows


def main() -> None:
    parser = parser_of(
        __doc__,
        "scale.json",
        counts={
            "repeats": (3, "of each point of the driver's work"),
            "chunks": (2048, "of a repeat"),
            "tokens": (512, "of a response of real actors"),
        },
    )
    parts = ("driver", "broadcast")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    kinds = tuple(ACTORS)
    parser.add_argument("--actors", nargs="+", choices=kinds, default=kinds, help="of the driver's")
    args = parser.parse_args()
    result = json.loads(args.out.read_text()) if args.out.exists() else {}
    for part, measure in (("driver", drivers), ("broadcast", broadcasts)):
        if part in args.parts:
            result[part] = {**provenance(args), **measure(args)}
    write(args.out, result)


if __name__ == "__main__":
    run_benchmark(main)
