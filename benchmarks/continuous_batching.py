"""Continuous batching beside batches that wait for their longest response.

The `small` shape with random weights answers 32 prompts with 8 responses each. Their lengths are
log-normal with σ = 1, cut at 4 x their mean, which is 48 tokens. Random weights would end a
response anywhere, so the draws make the lengths: a draw of 0 gives token 0, the end id, where a
response is to end; the draws before it give other tokens. The engines compute what they always do,
and it is checked that each response has its length.

`static`: as many prompts a call as fill the slots, one call after the other, each until its longest
response has ended (its batch shrinks meanwhile). `continuous`: one call for all, with
`rollout.slots`. `whole`: one call for all without slots, which begins with all responses in the
batch and needs a cache for them.

The three take turns in one process, the order shifted from repeat to repeat. A repeat during which
others took more than a tenth of the machine is left out and run again. A ratio is the median over
repeats of another kind's seconds divided by those of `continuous`; the interval is the range of the
repeats, which holds the true median with a probability of 1 - 2^(1 - repeats).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import measure
from measure import THREADS, parser_of

from grpo_trainable.noise import DISTURBED_ABOVE, Meter

if TYPE_CHECKING:
    import numpy as np

    from grpo_trainable.rollout import Request, RolloutGroup

PROMPTS, GROUP_SIZE = 32, 8
MEAN_TOKENS, LONGEST_TOKENS, SIGMA = 48, 192, 1.0
SLOTS = (16, 64)
END_ID = 0
WARM_UP = 1
TRIES = 3  # times the repeats, for those that are disturbed
CONTINUOUS, OTHERS = "continuous", ("static", "whole")
KINDS = (CONTINUOUS, *OTHERS)


# ---- The workload ----------------------------------------------------------------------------


def response_lengths(seed: int) -> np.ndarray:
    """(prompts, responses) tokens: log-normal, cut at the longest, scaled to the mean."""
    import numpy as np

    shape = np.random.default_rng(seed).lognormal(0.0, SIGMA, (PROMPTS, GROUP_SIZE))
    low, high = 0.0, float(LONGEST_TOKENS)
    for _ in range(40):
        middle = (low + high) / 2
        mean = np.rint(middle * shape).clip(1, LONGEST_TOKENS).mean()
        low, high = (low, middle) if mean > MEAN_TOKENS else (middle, high)
    return np.rint(low * shape).clip(1, LONGEST_TOKENS).astype(int)


def draws_that_end(lengths: np.ndarray) -> Callable[[Sequence[Request], int], np.ndarray]:
    """Stands for `engines.rows.draws_of`: the draws of responses of these lengths."""
    import numpy as np

    def draws(requests: Sequence[Request], seed: int) -> np.ndarray:
        rows = []
        for request in requests:
            for response in range(request.group_size):
                key = [seed, request.prompt_index, response]
                # The end id is the first of thousands that are about equally likely: above a
                # hundredth no draw gives it.
                row = np.random.default_rng(key).uniform(0.01, 1.0, LONGEST_TOKENS)
                row[lengths[request.prompt_index, response] - 1] = 0.0
                rows.append(row.astype(np.float32))
        return np.stack(rows)

    return draws


def sample_requests(seed: int) -> list[Request]:
    import numpy as np

    from grpo_trainable.models.model_config import PRESETS
    from grpo_trainable.rollout import Request, SamplingLimits

    rng = np.random.default_rng(seed + 1)
    limits = SamplingLimits(
        min_new_tokens=1, max_new_tokens=LONGEST_TOKENS, temperature=0.8, end_ids=(END_ID,)
    )
    vocab_size = PRESETS[measure.PRESET].vocab_size
    return [
        Request(
            stream="train",
            prompt_index=prompt_index,
            prompt_ids=tuple(rng.integers(2, vocab_size, length).tolist()),
            group_size=GROUP_SIZE,
            limits=limits,
        )
        for prompt_index, length in enumerate(rng.integers(10, 15, PROMPTS).tolist())
    ]


# ---- Inside the process that is measured -----------------------------------------------------


class Contest:
    """The three kinds of batches on the same requests and weights."""

    def __init__(self, slots: int, seed: int) -> None:
        from grpo_trainable.actors.process import keep_freed_memory
        from grpo_trainable.engines import rows
        from grpo_trainable.engines.torch_engine import TorchEngine
        from grpo_trainable.models.directory import read_tokenizer

        keep_freed_memory()
        self._lengths = response_lengths(seed)
        rows.draws_of = draws_that_end(self._lengths)
        self._requests = sample_requests(seed)
        self._engine = measure.engine_of_random_weights(seed)
        model = self._engine.model
        self._slotted = TorchEngine(model, read_tokenizer(None), seed=seed, slots=slots)
        self._prompts = slots // GROUP_SIZE  # prompts in a static batch
        self._steps = 0

    @property
    def tokens(self) -> int:
        return int(self._lengths.sum())

    def sample(self, kind: str) -> tuple[float, int]:
        """Seconds, and how many times a token of the whole batch was computed."""
        self._steps, start = 0, time.perf_counter()
        groups = {"static": self._static, "whole": self._whole, CONTINUOUS: self._continuous}[
            kind
        ]()
        seconds = time.perf_counter() - start
        found = [group.response_mask.sum(dim=1).tolist() for group in groups]
        assert found == self._lengths.tolist(), "a response has not the length that was drawn"
        return seconds, self._steps

    def _static(self) -> list[RolloutGroup]:
        parts = range(0, PROMPTS, self._prompts)
        calls = (self._requests[first : first + self._prompts] for first in parts)
        return [group for own in calls for group in self._engine.generate(own, self._count)]

    def _whole(self) -> list[RolloutGroup]:
        return self._engine.generate(self._requests, self._count)

    def _continuous(self) -> list[RolloutGroup]:
        return self._slotted.generate(self._requests, self._count)

    def _count(self) -> None:
        self._steps += 1


def inside(slots: int, threads: int, repeats: int, seed: int) -> dict[str, Any]:
    """One row of the result."""
    contest, meter = Contest(slots, seed), Meter()
    steps = {kind: contest.sample(kind)[1] for kind in KINDS for _ in range(WARM_UP)}
    turns: list[dict[str, float]] = []
    for tried in range(TRIES * repeats):
        shift = tried % len(KINDS)
        meter.begin()
        turn = {kind: contest.sample(kind)[0] for kind in (*KINDS[shift:], *KINDS[:shift])}
        others = meter.take()
        assert others is not None, "this machine does not tell what its cores do"
        if others.fraction <= DISTURBED_ABOVE:
            turns.append(turn)
        if len(turns) == repeats:
            return {
                "slots": slots,
                "threads": threads,
                "left_out": tried + 1 - repeats,
                "kinds": {kind: _kind(turns, kind, steps[kind], contest.tokens) for kind in KINDS},
                "ratios": {kind: _ratio(turns, kind) for kind in OTHERS},
                **measure.resident_mb(),
            }
    sys.exit(f"only {len(turns)} of {repeats} repeats were undisturbed: is the machine in use?")


def _kind(turns: Sequence[dict[str, float]], kind: str, steps: int, tokens: int) -> dict[str, Any]:
    seconds = [turn[kind] for turn in turns]
    median = statistics.median(seconds)
    return {
        "seconds": seconds,
        "median_s": median,
        "tokens_per_s": tokens / median,
        "tokens_of_the_batch": steps,
        "rows_in_the_mean": tokens / steps,
    }


def _ratio(turns: Sequence[dict[str, float]], kind: str) -> dict[str, Any]:
    ratios = [turn[kind] / turn[CONTINUOUS] for turn in turns]
    return {
        "median": statistics.median(ratios),
        "interval": [min(ratios), max(ratios)],
        "coverage": 1 - 2.0 ** (1 - len(ratios)),
    }


# ---- Around it -------------------------------------------------------------------------------


def arguments() -> argparse.Namespace:
    parser = parser_of(
        __doc__,
        "continuous_batching.json",
        seed="of weights, prompts, lengths and draws",
        counts={"repeats": (7, "of each kind that count")},
    )
    parser.add_argument("--inside", metavar="SLOTS", help=argparse.SUPPRESS)
    parser.add_argument("--threads", type=int, default=1, help=argparse.SUPPRESS)
    return parser.parse_args()


def workload(seed: int) -> dict[str, Any]:
    lengths = response_lengths(seed)
    return {
        "preset": measure.PRESET,
        "dtype": "float32",
        "prompts": PROMPTS,
        "responses_per_prompt": GROUP_SIZE,
        "sigma": SIGMA,
        "mean_tokens": float(lengths.mean()),
        "median_tokens": float(statistics.median(lengths.flatten().tolist())),
        "longest_tokens": int(lengths.max()),
        "tokens": int(lengths.sum()),
    }


def show(row: dict[str, Any]) -> str:
    parts = [
        f"{kind} {of['tokens_per_s']:,.0f} tokens/s ({of['rows_in_the_mean']:.0f} rows)"
        for kind, of in row["kinds"].items()
    ]
    for kind, ratio in row["ratios"].items():
        low, high = ratio["interval"]
        parts.append(f"{ratio['median']:.2f} x {kind} ({low:.2f} to {high:.2f})")
    head = f"{row['slots']} slots, threads {row['threads']}: "
    return f"{head}{', '.join(parts)}; {row['left_out']} repeats left out"


def main() -> None:
    args = arguments()
    if args.inside:
        row = inside(int(args.inside), args.threads, args.repeats, args.seed)
        print(json.dumps(row))
        return
    rows = []
    for slots in SLOTS:
        for threads in THREADS:
            rows.append(measure.in_fresh_process(args, str(slots), threads))
            print(show(rows[-1]), flush=True)
    settings = {"workload": workload(args.seed), "repeats": args.repeats}
    measure.write(args.out, {**measure.provenance(args), **settings, "results": rows})


if __name__ == "__main__":
    measure.run_benchmark(main)
