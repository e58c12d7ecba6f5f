"""Does GRPO teach the shipped arithmetic policy to solve more problems, and by solving them?

Runs two arms of `async_vs_sync` with `task.name=math`, each with several seeds, and evaluates them
on the same held-out problems before training and after it. Reports the share of right answers with
its interval over problems, and the rise (of the same problems, so that it has an interval of its
own). What the rise is made of: the share of responses in the right format, the right answers
among those, and the share of responses whose last step gives the true answer, whatever their
format. Of the right answers, the share whose steps are all right and end in the answer: a policy
that guesses or copies would lose it. A trial is within the bounds when it rises enough, in time, at
about the same length.

Each policy is also evaluated greedily, before and after: what the first one solves so, it knew, and
GRPO only made it show that more often when it samples (`greedy.py`).
"""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from greedy import figures
from measure import parser_of, provenance, run_benchmark, write
from trial_runs import finished_trial, overhead, rows_of

from grpo_trainable.config import GRPOConfig
from grpo_trainable.evaluation.checkpoint import TrainedPolicy, read_trained_policy
from grpo_trainable.prompts import build_task
from grpo_trainable.tasks import JSONValue, Task
from grpo_trainable.tasks.answers import tagged_answer
from reports.intervals import over_prompts, over_seeds

ARMS = ("sync", "async_k1")
PROBLEMS = 512  # of an evaluation
EXAMPLES = 10  # problems of which the result keeps a response before and after
BOUNDS: dict[str, Any] = {
    "first": (0.25, 0.45),  # share of right answers
    "rise": 0.20,  # and the intervals before and after are apart
    "length_change": 0.25,  # of mean tokens, as a share of those before
    "seconds": 600,
}
STEP = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+)\b")
COMPUTE = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b if b else None,
}


def main() -> None:
    parser = parser_of(
        __doc__, "arithmetic.json", seed="the first", counts={"seeds": (3, "of every arm")}
    )
    parser.add_argument("--arms", nargs="+", default=ARMS, help="to run (those with k=1)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of every trial"
    )
    args = parser.parse_args()
    settings = ["task.name=math", f"eval.prompts={PROBLEMS}", *args.set]
    options = [word for setting in settings for word in ("--set", setting)]
    trials, rises = [], defaultdict(list)
    for seed in range(args.seed, args.seed + args.seeds):
        for arm in args.arms:
            with finished_trial(arm, seed=seed, options=options) as directory:
                trial, rise = summarise(directory)
            trials.append({"arm": arm, "seed": seed, **trial})
            rises[arm].append(rise)
            print(show(trials[-1]), flush=True)
    arms = {arm: asdict(over_prompts(np.array(found))[0]) for arm, found in rises.items()}
    for arm, rise in arms.items():
        print(f"{arm}: rise {rise['value']:.3f} ({rise['low']:.3f} to {rise['high']:.3f})")
    print(f"{sum(t['within'] for t in trials)} of {len(trials)} trials within {BOUNDS}")
    workload = {"space": "async_vs_sync", "options": options, "rounds": trials[0]["rounds"]}
    result = {**provenance(args), "workload": workload, "bounds": BOUNDS}
    write(args.out, {**result, "rise": arms, "trials": trials})


def summarise(directory: Path) -> tuple[dict[str, Any], list[float]]:
    """What is to be said of a trial, and the rise of each problem."""
    rows = rows_of(directory)
    responses = pq.read_table(directory / "evaluations").to_pylist()
    truths = {str(e.prompt): e.ground_truth for e in task_of_trials().eval_examples(PROBLEMS)}
    rounds = sorted({response["round"] for response in responses})
    by_round = {r: [x for x in responses if x["round"] == r] for r in rounds}
    first, last = by_round[rounds[0]], by_round[rounds[-1]]
    shares = [right_shares(found) for found in (first, last)]
    rise = [after - before for before, after in zip(*shares, strict=True)]
    before, after = (
        {"right": asdict(over_seeds(share)[0]), **describe(found, truths)}
        for share, found in zip(shares, (first, last), strict=True)
    )
    trial = {
        "rounds": len(rows),
        "samples": rows[-1]["env_runners/num_episodes_lifetime"],
        "held_out": {r: statistics.mean(right_shares(found)) for r, found in by_round.items()},
        "before": before,
        "after": after,
        "rise": asdict(over_seeds(rise)[0]),
        "rise_of": parts_of_rise(before, after),
        "greedy": {
            "before": greedily(None),
            "after": greedily(read_trained_policy(directory)),
        },
        "kl_reference_last": rows[-1]["kl/reference_nats"],
        "entropy": [rows[0]["policy/entropy_nats"], rows[-1]["policy/entropy_nats"]],
        "seconds": rows[-1]["time_total_s"],
        **overhead(rows),
        "examples": examples(first, last),
    }
    return {**trial, "within": is_within(trial)}, rise


def greedily(trained: TrainedPolicy | None) -> dict[str, Any]:
    """The share of problems that a checkpoint's policy, or the shipped one, solves greedily."""
    return figures(trained, "greedy", seed=0)["pass@1"]  # without draws the seed does nothing


def right_shares(responses: Sequence[dict[str, Any]]) -> list[float]:
    """The share of right responses to each problem, in the order of the problems."""
    of_problem = defaultdict(list)
    for response in responses:
        of_problem[response["cursor"]].append(response["reward"])
    return [statistics.mean(of_problem[cursor]) for cursor in sorted(of_problem)]


def task_of_trials() -> Task:
    """The task with the problems that ship."""
    return build_task(GRPOConfig.from_dict({"task": {"name": "math"}}))


def describe(
    responses: Sequence[dict[str, Any]], truths: Mapping[str, JSONValue]
) -> dict[str, float]:
    """Figures of all held-out responses of an evaluation; `truths` maps prompts to true answers."""
    texts = [response["response"] for response in responses]
    answers = [tagged_answer(text) for text in texts]
    right = [
        text for text, response in zip(texts, responses, strict=True) if response["reward"] == 1
    ]
    in_format = sum(answer is not None for answer in answers)
    return {
        "format": in_format / len(texts),
        "right_of_format": len(right) / max(1, in_format),
        "calculated": statistics.mean(
            calculated(response["response"]) == truths[response["prompt"]] for response in responses
        ),
        "sound_of_right": sum(map(is_sound, right)) / max(1, len(right)),
        "tokens": statistics.mean(response["tokens"] for response in responses),
        "finished_share": statistics.mean(response["finished"] for response in responses),
        "distinct_share": len(set(texts)) / len(texts),
    }


def parts_of_rise(before: dict[str, Any], after: dict[str, Any]) -> dict[str, float]:
    """How much of the rise is due to format, and how much to right answers among the responses in
    it; each with the other held at its mean, so that the two add up to the rise."""
    names = ("format", "right_of_format")
    change = {name: after[name] - before[name] for name in names}
    mean = {name: (after[name] + before[name]) / 2 for name in names}
    return {
        "format": change["format"] * mean["right_of_format"],
        "answers": change["right_of_format"] * mean["format"],
    }


def calculated(response: str) -> str | None:
    """The result of the last step that is written, in whatever format; None without a step."""
    steps = STEP.findall(response)
    return steps[-1][3] if steps else None


def is_sound(response: str) -> bool:
    """Whether every step that is written is right, and the last one gives the answer."""
    steps = STEP.findall(response)
    true = all(COMPUTE[sign](int(a), int(b)) == int(c) for a, sign, b, c in steps)
    return bool(steps) and true and steps[-1][3] == tagged_answer(response)


def is_within(trial: dict[str, Any]) -> bool:
    """`BOUNDS`."""
    before, after = trial["before"], trial["after"]
    return (
        BOUNDS["first"][0] <= before["right"]["value"] <= BOUNDS["first"][1]
        and trial["rise"]["value"] >= BOUNDS["rise"]
        and before["right"]["high"] < after["right"]["low"]
        and abs(after["tokens"] - before["tokens"]) <= BOUNDS["length_change"] * before["tokens"]
        and trial["seconds"] <= BOUNDS["seconds"]
    )


def examples(
    first: Sequence[dict[str, Any]], last: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The first response to each of the first problems, before training and after it."""
    kept = [[r for r in found if r["response_index"] == 0][:EXAMPLES] for found in (first, last)]
    return [
        {
            "prompt": before["prompt"],
            "before": before["response"],
            "after": after["response"],
            "rewards": [before["reward"], after["reward"]],
        }
        for before, after in zip(*kept, strict=True)
    ]


def show(trial: dict[str, Any]) -> str:
    before, after, rise = trial["before"], trial["after"], trial["rise"]
    changes = ", ".join(
        f"{name} {before[name]:.3g} -> {after[name]:.3g}" for name in before if name != "right"
    )
    return (
        f"{trial['arm']:<9} seed {trial['seed']}: right {shown(before['right'])} -> "
        f"{shown(after['right'])}, rise {shown(rise)} of which by format "
        f"{trial['rise_of']['format']:.3f}, greedy {trial['greedy']['before']['value']:.3f} -> "
        f"{trial['greedy']['after']['value']:.3f}, {changes}, KL "
        f"{trial['kl_reference_last']:.1f} nats, largest lag {trial['largest_lag']:.0f}, "
        f"{trial['seconds']:.0f} s, within bounds: {trial['within']}"
    )


def shown(estimate: dict[str, float]) -> str:
    return f"{estimate['value']:.3f} ({estimate['low']:.3f}-{estimate['high']:.3f})"


if __name__ == "__main__":
    run_benchmark(main)
