"""Are equal arms told apart? An A/A experiment, and beside it an arm that is slowed on purpose.

Three arms of the same settings run in randomised blocks: `a`, `a_again`, which differs from it in
nothing that costs time, and `slowed`, whose reward function sleeps as long as makes a round 15 %
longer. `a_again` must not be told apart from `a` in speed, `slowed` must.

One experiment is one draw: by construction one in twenty tells equal arms apart. So the verdict is
also taken of `--repeats` experiments that are resampled from it: the rounds of each trial are drawn
anew with replacement, and for the A/A pair it is drawn as well which of the two runs of a seed is
called `a`, since they are alike.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measure import parser_of, provenance, run_benchmark, write
from resampling import verdict
from trial_runs import run_trial

import search_spaces
from grpo_trainable.config import GRPOConfig, schedule
from launch import tune
from reports.experiment import read_experiment
from search_spaces import SearchSpace

SLOWED = 0.15
ARM = {"placement": "colocated"}
# The keyword as a whole word: what the default reward scores, in a process of its own.
REWARD = """\
import re, time


def score(response, ground_truth):
    time.sleep({sleep_s!r})
    words = [ground_truth] if isinstance(ground_truth, str) else ground_truth
    return float(all(re.search(rf"\\b{{re.escape(word)}}\\b", response, re.I) for word in words))
"""


def main() -> None:
    parser = parser_of(
        __doc__,
        "a_a.json",
        seed="the first",
        counts={
            "seeds": (5, "of every arm"),
            "rounds": (16, "of every trial"),
            "repeats": (20, "resampled experiments"),
        },
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as storage:
        result = measure(args, Path(storage))
    for arm in ("a_again", "slowed"):
        print(said(arm, result[arm]))
    write(args.out, {**provenance(args), "workload": {"rounds": args.rounds}, **result})


def measure(args: argparse.Namespace, storage: Path) -> dict[str, Any]:
    rounds = ["--set", f"eval.every={args.rounds}", "--iterations", str(args.rounds)]
    round_s = seconds_a_round(args, storage, rounds)
    responses = schedule.responses_per_round(GRPOConfig())
    sleep_s = SLOWED * round_s / responses
    settings = {
        "a": {"task.reward": reward(storage, "plain", 0.0)},
        # Equal arms would be merged; nothing comes near either deadline.
        "a_again": {"task.reward": reward(storage, "plain", 0.0), "resources.deadline_s": 601.0},
        "slowed": {"task.reward": reward(storage, "slowed", sleep_s)},
    }
    search_spaces.SPACES["a_a"] = SearchSpace(
        name="a_a",
        question="are equal arms told apart?",
        arms={arm: {**ARM, **own} for arm, own in settings.items()},
    )
    seeds = ["--num-samples", str(args.seeds), "--seed", str(args.seed)]
    where = ["--name", "a_a", "--storage", str(storage)]
    status = tune.main(["--space", "a_a", *seeds, *rounds, *where])
    if status != tune.OK:
        sys.exit(status)
    arms = read_experiment(storage / "a_a").arms
    rng = random.Random(args.seed)
    return {
        "seconds_a_round": round_s,
        "sleep_s_a_response": sleep_s,
        "a_again": verdict(arms["a_again"], arms["a"], args.repeats, rng, swap=True),
        "slowed": verdict(arms["slowed"], arms["a"], args.repeats, rng, swap=False),
    }


def seconds_a_round(args: argparse.Namespace, storage: Path, options: Sequence[str]) -> float:
    """The median of one run of `a`, with what the reward's own process costs."""
    task = f"task.reward={reward(storage, 'plain', 0.0)}"
    rows = run_trial("colocated_k1", seed=args.seed, options=["--set", task, *options])
    return statistics.median(row["time/step_s"] - row["time/eval_s"] for row in rows[1:])


def reward(storage: Path, name: str, sleep_s: float) -> str:
    path = storage / f"{name}.py"
    path.write_text(REWARD.format(sleep_s=sleep_s))
    return f"{path}:score"


def said(arm: str, found: dict[str, Any]) -> str:
    if found["why_not"] is not None:
        return f"{arm} over a: not comparable ({found['why_not']})"
    low, high = found["interval"] or (float("nan"), float("nan"))
    outcome = {True: "told apart", False: "not told apart", None: "without an interval"}
    return (
        f"{arm} over a: {found['speed_up']:.3f} x ({low:.3f} to {high:.3f}), "
        f"{outcome[found['told_apart']]}; told apart in {found['repeats_told_apart']} of "
        f"{found['repeats']} resampled experiments"
    )


if __name__ == "__main__":
    run_benchmark(main)
