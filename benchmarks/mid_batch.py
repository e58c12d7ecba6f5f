"""What weights in the middle of a batch cost: looking for them, and taking them in.

In one process, on one thread, the real generator samples one chunk over and over by turns: with
nothing called between tokens, with `between_tokens` and nothing deposited, and with one deposit
halfway, taken in with the cache kept (`in_flight`) or rebuilt (`interrupt_recompute`). Each is
compared with the bare chunk of the same turn. Weights are handed over as they are: what a transport
takes, and how its thread gets in the way, is not in these figures.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import measure

if TYPE_CHECKING:
    from grpo_trainable.actors.generator import Generator
    from grpo_trainable.rollout import PolicyWeights

WORKLOADS = {"tiny": (16, 4, 60), "small": (8, 8, 48)}  # prompts, responses to each, new tokens
LOOKS = 100_000  # calls that one look is timed by
KINDS = ("looking", "in_flight", "interrupt_recompute")


def inside(args: argparse.Namespace) -> dict[str, Any]:
    import torch

    from grpo_trainable.actors.generator import Generator
    from grpo_trainable.checksums import storage_checksum
    from grpo_trainable.config import GRPOConfig
    from grpo_trainable.models.parameters import unique_parameters
    from grpo_trainable.rollout import (
        PolicyWeights,
        Request,
        SamplingLimits,
    )

    torch.set_num_threads(args.threads)
    preset = args.inside
    prompts, group_size, tokens = WORKLOADS[preset]
    generators: dict[str, Generator] = {}
    for kind in ("in_flight", "interrupt_recompute"):
        config = GRPOConfig.from_dict(
            {
                "placement": "disaggregated",
                "lag": 1,
                "weight_update": kind,
                "model": {"preset": preset},
            }
        )
        generators[kind] = Generator(config, _Handed())
    engine = generators["in_flight"].engine
    tensors = {name: t.clone() for name, t in unique_parameters(engine.model).items()}  # type: ignore[attr-defined]
    weights = PolicyWeights(version=1, round=1, checksum=storage_checksum(tensors), tensors=tensors)
    limits = SamplingLimits(
        min_new_tokens=tokens, max_new_tokens=tokens, temperature=0.8, end_ids=(0,)
    )
    requests = [
        Request(
            stream="train",
            prompt_index=prompt_index,
            prompt_ids=tuple(range(5, 5 + length)),
            group_size=group_size,
            limits=limits,
        )
        for prompt_index, length in enumerate(10 + i % 5 for i in range(prompts))
    ]

    def bare() -> float:
        return timed(lambda: engine.generate(requests, lambda: None))

    def looking() -> float:
        own = generators["in_flight"]
        return timed(lambda: own.engine.generate(requests, own.between_tokens))

    def taking(kind: str) -> float:
        own = generators[kind]
        deposits = _Halfway(own, weights, tokens // 2)
        return timed(lambda: own.engine.generate(requests, deposits))

    extra: dict[str, list[float]] = {kind: [] for kind in KINDS}
    base: list[float] = []
    for turn in range(args.repeats + 2):
        # Who goes first changes with each turn.
        works: list[tuple[str, Callable[[], float]]] = [
            ("bare", bare),
            ("looking", looking),
            ("in_flight", lambda: taking("in_flight")),
            ("interrupt_recompute", lambda: taking("interrupt_recompute")),
        ]
        shift = turn % len(works)
        seconds = {name: work() for name, work in works[shift:] + works[:shift]}
        if turn >= 2:
            base.append(seconds["bare"])
            for kind in KINDS:
                extra[kind].append(seconds[kind] / seconds["bare"] - 1)
    look = generators["in_flight"].between_tokens
    look_s = timed(lambda: [look() for _ in range(LOOKS)]) / LOOKS
    loads = [timed(lambda: engine.load(weights)) for _ in range(args.repeats)]
    return {
        "preset": preset,
        "prompts": prompts,
        "responses_per_prompt": group_size,
        "new_tokens": tokens,
        "threads": args.threads,
        "repeats": args.repeats,
        "unit_s": statistics.median(base),
        "load_s": statistics.median(loads),
        "look_s": look_s,
        "looking_share": look_s * tokens / statistics.median(base),
        "extra": {kind: spread(values) for kind, values in extra.items()},
    }


class _Handed:
    """A receiver of what is handed to it."""

    name = "handed"

    def fetch(self, handle: PolicyWeights, received: Any = None) -> PolicyWeights:
        return handle

    def release(self, before_round: int) -> None:
        pass

    def close(self) -> None:
        pass


class _Halfway:
    """Deposits once, before the given token, as the second thread would."""

    def __init__(self, generator: Generator, weights: PolicyWeights, token: int) -> None:
        self._generator, self._weights, self._left = generator, weights, token

    def __call__(self) -> None:
        if self._left == 0:
            self._generator.deposit(self._weights)
        self._left -= 1
        self._generator.between_tokens()


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def spread(values: Sequence[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": middle, "lower_quartile": low, "upper_quartile": high}


def main() -> None:
    args = measure.arguments(__doc__, "mid_batch.json")
    if args.inside:
        print(json.dumps(inside(args)))
        return
    rows = [measure.in_fresh_process(args, preset, 1) for preset in WORKLOADS]
    for row in rows:
        print(
            f"{row['preset']}: a chunk takes {row['unit_s']:.3f} s, a load {row['load_s']:.4f} s, "
            f"a look {row['look_s'] * 1e6:.2f} µs (a chunk's looks: {row['looking_share']:.4%})"
        )
        for kind, extra in row["extra"].items():
            print(
                f"  {kind:<19} {extra['median']:+.2%} "
                f"({extra['lower_quartile']:+.2%} to {extra['upper_quartile']:+.2%})"
            )
    workload = {name: dict(zip(("prompts", "responses", "new_tokens"), shape, strict=True))
                for name, shape in WORKLOADS.items()}  # fmt: skip
    measure.write(args.out, {**measure.provenance(args), "workload": workload, "results": rows})


if __name__ == "__main__":
    measure.run_benchmark(main)
