"""Does GRPO learn by the default settings, and does the policy keep its language?

Runs the arms of `async_vs_sync` with one gradient step a round, each with several seeds. Reports
the held-out inclusion rate before and after, what became of the held-out responses (tokens,
sentences, share that ends by itself, share of distinct ones), the training responses' mean negative
log-likelihood under the reference (mean of the last 8 rounds, beside that of the first), the KL to
the reference, and the largest lag. A trial is within the bounds when the default job teaches what
it should: inclusion rises, and length stays.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from measure import parser_of, provenance, run_benchmark, write
from trial_runs import finished_trial, overhead, rows_of

from grpo_trainable.pretraining.stories import count_sentences

ARMS = ("colocated_k1", "sync", "async_k1")
LAST_ROUNDS = 8
BOUNDS: dict[str, Any] = {
    "first": (0.15, 0.45),  # held-out inclusion rate
    "last": (0.80, 1.0),
    "length_change": 0.25,  # change of mean tokens and sentences, as a share of those before
}


def main() -> None:
    parser = parser_of(
        __doc__, "learning.json", seed="the first", counts={"seeds": (3, "of every arm")}
    )
    parser.add_argument("--arms", nargs="+", default=ARMS, help="to run (those with k=1)")
    parser.add_argument("--lr", type=float, help="learning rate (the default)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of every trial"
    )
    args = parser.parse_args()
    settings = args.set if args.lr is None else [*args.set, f"optim.lr={args.lr}"]
    options = [word for setting in settings for word in ("--set", setting)]
    trials = []
    for seed in range(args.seed, args.seed + args.seeds):
        for arm in args.arms:
            with finished_trial(arm, seed=seed, options=options) as directory:
                trials.append({"arm": arm, "seed": seed, **summarise(directory)})
            print(show(trials[-1]), flush=True)
    print(f"{sum(t['within'] for t in trials)} of {len(trials)} trials within {BOUNDS}")
    workload = {"space": "async_vs_sync", "options": options, "rounds": trials[0]["rounds"]}
    write(args.out, {**provenance(args), "workload": workload, "bounds": BOUNDS, "trials": trials})


def summarise(directory: Path) -> dict[str, Any]:
    rows = rows_of(directory)
    responses = pq.read_table(directory / "evaluations").to_pylist()
    last_round = max(response["round"] for response in responses)
    before, after = (
        describe([r for r in responses if r["round"] == number]) for number in (0, last_round)
    )
    trial = {**learning(rows), "before": before, "after": after}
    return {**trial, "within": is_within(trial)}


def is_within(trial: dict[str, Any]) -> bool:
    """`BOUNDS`."""
    before, after = trial["before"], trial["after"]
    return (
        BOUNDS["first"][0] <= trial["first"] <= BOUNDS["first"][1]
        and BOUNDS["last"][0] <= trial["last"] <= BOUNDS["last"][1]
        and all(
            abs(after[name] - before[name]) <= BOUNDS["length_change"] * before[name]
            for name in ("tokens", "sentences")
        )
    )


def describe(responses: list[dict[str, Any]]) -> dict[str, float]:
    """Figures of the held-out responses of one evaluation: means, and shares of all."""
    texts = [response["response"] for response in responses]
    return {
        "tokens": statistics.mean(response["tokens"] for response in responses),
        "sentences": statistics.mean(map(count_sentences, texts)),
        "finished_share": statistics.mean(response["finished"] for response in responses),
        "distinct_share": len(set(texts)) / len(texts),
    }


def learning(rows: list[dict[str, Any]]) -> dict[str, Any]:
    nll = [row["response/reference_nll_nats"] for row in rows]
    return {
        "rounds": len(rows),
        "samples": rows[-1]["count/trained"] * 4,
        "held_out": {int(row["eval/round"]): row["reward/eval_mean"] for row in rows},
        "first": rows[0]["reward/eval_first"],
        "last": rows[-1]["reward/eval_mean"],
        "reference_nll_first": nll[0],
        "reference_nll_last": statistics.mean(nll[-LAST_ROUNDS:]),
        "kl_reference_last": rows[-1]["kl/reference_nats"],
        "wall_clock_s": rows[-1]["time/wall_clock_s"],
        **overhead(rows),
    }


def show(trial: dict[str, Any]) -> str:
    changes = ", ".join(
        f"{name.removesuffix('_share')} {trial['before'][name]:.3g} -> {trial['after'][name]:.3g}"
        for name in trial["before"]
    )
    return (
        f"{trial['arm']:<13} seed {trial['seed']}: held-out {trial['first']:.3f} -> "
        f"{trial['last']:.3f}, {changes}, reference NLL {trial['reference_nll_first']:.2f} -> "
        f"{trial['reference_nll_last']:.2f} nats a token, KL {trial['kl_reference_last']:.1f} "
        f"nats, largest lag {trial['largest_lag']:.0f}, wall-clock {trial['wall_clock_s']:.1f} s, "
        f"other {trial['other_share']:.1%} of a step, within bounds: {trial['within']}"
    )


if __name__ == "__main__":
    run_benchmark(main)
