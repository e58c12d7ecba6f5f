"""Does GRPO learn with the default settings, and what improves?

    python benchmarks/learning.py                    stories with a keyword
    python benchmarks/learning.py --task arithmetic  word problems
    python benchmarks/learning.py --set model.path=DIRECTORY --set rounds=20 --lrs 1e-6 1e-5 --out …

Runs arms of `async_vs_sync` with several seeds and one gradient step per round, and compares the
held-out responses before and after training.

For stories, the benchmark reports the inclusion rate, tokens, sentences, the likelihood of the text
under the reference, the share of repeated text, and one prompt's story before and after training.

For word problems, the benchmark reports the rise in the share of right answers, with an interval
over problems. The rise is divided into two parts. One part is due to the share of responses in the
right format, and the other to the share of right answers among the responses in that format. The
benchmark also reports the share of right answers in which every step is right. If the policy
learned to guess, this share would fall.

If the command is interrupted, the same command continues it, unless the commit has changed. A
command with other learning rates or seeds adds its trials to the result file.
"""

from __future__ import annotations

import itertools
import re
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from measure import (
    RESULTS,
    finished_trial,
    overhead,
    parser_of,
    provenance,
    read,
    rows_of,
    run_benchmark,
    same_run,
    write,
)

from grpo_trainable.command_line import number
from grpo_trainable.tasks.answers import tagged_answer
from grpo_trainable.tools.pretraining.stories import count_sentences
from reports.intervals import over_prompts, over_seeds

LAST_ROUNDS = 8
PROBLEMS = 512  # number of problems in an evaluation
STEP = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+)\b")
COMPUTE = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b if b else None,
}

Responses = Sequence[Mapping[str, Any]]


def main() -> None:
    parser = parser_of(
        __doc__, seed="the first seed", counts={"seeds": (3, "number of seeds of every arm")}
    )
    parser.add_argument("--task", choices=TASKS, default="keyword", help="task (keyword)")
    parser.add_argument("--arms", nargs="+", default=["sync", "async_k1"], help="arms with k=1")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of every trial"
    )
    parser.add_argument(
        "--lrs", nargs="+", type=number(float, 0), metavar="RATE", help="learning rates (default)"
    )
    parser.add_argument("--out", type=Path, help="JSON file (learning.json or arithmetic.json)")
    args = parser.parse_args()
    settings, summarise, file = TASKS[args.task]
    options = [word for setting in (*settings, *args.set) for word in ("--set", setting)]
    out: Path = args.out or file
    origin = {
        **provenance(args),
        "workload": {"space": "async_vs_sync", "options": options},
    }
    kept = read(out)
    trials = kept["trials"] if same_run(kept, origin, "workload") else []
    seeds = range(args.seed, args.seed + args.seeds)
    for seed, lr, arm in itertools.product(seeds, args.lrs or [None], args.arms):
        key: dict[str, Any] = {"arm": arm, "seed": seed, "asked_lr": lr}
        if any(trial.items() >= key.items() for trial in trials):
            continue
        rate = [] if lr is None else ["--set", f"optim.lr={lr}"]
        with finished_trial(arm, seed=seed, options=[*options, *rate]) as directory:
            rows, (before, after) = rows_of(directory), held_out(directory)
            trials.append({**key, **of_rows(rows), **summarise(rows, before, after)})
        print(show(trials[-1]), flush=True)
        write(out, {**origin, "rise": rises(trials), "trials": trials}, quiet=True)
    for arm, rise in rises(trials).items():
        print(f"{arm}: rise {shown(rise)}")


def held_out(directory: Path) -> tuple[Responses, Responses]:
    """Return the held-out responses before and after training."""
    responses = pq.read_table(directory / "evaluations").to_pylist()
    last = max(response["round"] for response in responses)
    before, after = ([r for r in responses if r["round"] == number] for number in (0, last))
    return before, after


def of_rows(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "rounds": len(rows),
        "samples": rows[-1]["env_runners/num_episodes_lifetime"],
        "held_out": {int(row["eval/round"]): row["reward/eval_mean"] for row in rows},
        "first": rows[0]["reward/eval_first"],
        "last": rows[-1]["reward/eval_mean"],
        "lr": rows[-1]["optim/lr"],
        "kl_reference_last": rows[-1]["kl/reference_nats"],
        "kl_per_token_last": rows[-1]["kl/reference_nats"] / rows[-1]["response/length_mean"],
        "entropy": [rows[0]["policy/entropy_nats"], rows[-1]["policy/entropy_nats"]],
        "wall_clock_s": rows[-1]["time/wall_clock_s"],
        **overhead(rows),
    }


def rises(trials: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the mean rise over seeds and problems, for arms whose trials measured each problem."""
    of_arm: dict[str, list[Sequence[float]]] = defaultdict(list)
    for trial in trials:
        if "rise_of_problems" in trial:
            of_arm[trial["arm"]].append(trial["rise_of_problems"])
    return {arm: asdict(over_prompts(np.array(own))[0]) for arm, own in of_arm.items()}


# ---- Stories with a keyword --------------------------------------------------------------------


def stories(
    rows: Sequence[Mapping[str, Any]], before: Responses, after: Responses
) -> dict[str, Any]:
    nll = [row["response/reference_nll_nats"] for row in rows]
    return {
        "before": {**lengths(before), "sentences": sentences(before)},
        "after": {**lengths(after), "sentences": sentences(after)},
        "reference_nll_first": nll[0],
        "reference_nll_last": statistics.mean(nll[-LAST_ROUNDS:]),
        "repeated": [row["response/repeated_fraction"] for row in (rows[0], rows[-1])],
        "example": [responses[0]["response"] for responses in (before, after)],
    }


def sentences(responses: Responses) -> float:
    return statistics.mean(count_sentences(response["response"]) for response in responses)


def lengths(responses: Responses) -> dict[str, float]:
    texts = [response["response"] for response in responses]
    return {
        "tokens": statistics.mean(response["tokens"] for response in responses),
        "finished_share": statistics.mean(response["finished"] for response in responses),
        "distinct_share": len(set(texts)) / len(texts),
    }


# ---- Word problems -----------------------------------------------------------------------------


def word_problems(
    rows: Sequence[Mapping[str, Any]], before: Responses, after: Responses
) -> dict[str, Any]:
    shares = [right_shares(responses) for responses in (before, after)]
    rise = [own - other for other, own in zip(*shares, strict=True)]
    first, last = (
        {"right": asdict(over_seeds(share)[0]), **lengths(responses), **answers(responses)}
        for share, responses in zip(shares, (before, after), strict=True)
    )
    return {
        "before": first,
        "after": last,
        "rise": asdict(over_seeds(rise)[0]),
        "rise_of_problems": rise,
        "rise_of": causes(first, last),
    }


def right_shares(responses: Responses) -> list[float]:
    """Return the share of right responses to each problem, in the order of the problems."""
    of_problem = defaultdict(list)
    for response in responses:
        of_problem[response["cursor"]].append(response["reward"])
    return [statistics.mean(of_problem[cursor]) for cursor in sorted(of_problem)]


def answers(responses: Responses) -> dict[str, float]:
    texts = [response["response"] for response in responses]
    right = [r["response"] for r in responses if r["reward"] == 1]
    in_format = sum(tagged_answer(text) is not None for text in texts)
    return {
        "format": in_format / len(texts),
        "right_of_format": len(right) / max(1, in_format),
        "sound_of_right": sum(map(is_sound, right)) / max(1, len(right)),
    }


def causes(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, float]:
    """Divide the rise into a part due to the format and a part due to right answers in it.

    Each change is multiplied by the mean of the other quantity, so the two parts add up to the
    rise.
    """
    names = ("format", "right_of_format")
    change = {name: after[name] - before[name] for name in names}
    mean = {name: (after[name] + before[name]) / 2 for name in names}
    return {
        "format": change["format"] * mean["right_of_format"],
        "answers": change["right_of_format"] * mean["format"],
    }


def is_sound(response: str) -> bool:
    """Return True if every written step is right and the last step gives the answer."""
    steps = STEP.findall(response)
    true = all(COMPUTE[sign](int(a), int(b)) == int(c) for a, sign, b, c in steps)
    return bool(steps) and true and steps[-1][3] == tagged_answer(response)


# Task -> settings of its trials, summary of a trial, file of the result.
TASKS = {
    "keyword": ((), stories, RESULTS / "learning.json"),
    "arithmetic": (
        ("task.name=math", f"eval.prompts={PROBLEMS}"),
        word_problems,
        RESULTS / "arithmetic.json",
    ),
}


def show(trial: Mapping[str, Any]) -> str:
    changes = ", ".join(
        f"{name} {value:.3g} -> {trial['after'][name]:.3g}"
        for name, value in trial["before"].items()
        if name != "right"
    )
    return (
        f"{trial['arm']:<13} seed {trial['seed']} lr {trial['lr']:g}: held-out "
        f"{trial['first']:.3f} -> {trial['last']:.3f}, {changes}, "
        f"KL {trial['kl_reference_last']:.1f} nats ({trial['kl_per_token_last']:.2f} per token), "
        f"largest lag {trial['largest_lag']:.0f}, wall-clock {trial['wall_clock_s']:.1f} s"
    )


def shown(estimate: Mapping[str, float]) -> str:
    return f"{estimate['value']:.3f} ({estimate['low']:.3f} to {estimate['high']:.3f})"


if __name__ == "__main__":
    run_benchmark(main)
