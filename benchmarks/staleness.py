"""Is it the ratio that makes staleness bearable? Old rollouts with it and without.

About 60 gradient steps of 16 prompts x 4 responses in two kinds of staleness: `k=8`, eight passes
over each rollout batch (64 steps; evaluated after 56 and 64), and `lag 8`, rollouts sampled by
weights up to eight gradient steps old (60 steps). Each with `grpo_clip`, which has the ratio to the
weights that sampled, and with `reinforce_with_baseline`, which takes the same rollouts for fresh;
at the default learning rate and at one higher.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from measure import RESULTS, provenance, write
from trials import run_trial

STALENESS: dict[str, tuple[str, list[str]]] = {  # arm of async_vs_sync, settings
    "k=8": ("colocated_k1", ["k=8", "k_mode=same_batch", "rounds=8", "eval.every=7"]),
    "lag 8": ("async_k1", ["lag=8", "rounds=60", "eval.every=20"]),
}
LOSSES = {"ratio": "grpo_clip", "no ratio": "reinforce_with_baseline"}
LRS = (2e-4, 5e-4)  # the default, and one higher
BOUND = 0.6  # that the ratio has to reach at the default


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3, help="of every run (3)")
    parser.add_argument("--seed", type=int, default=0, help="the first (0)")
    parser.add_argument("--lrs", nargs="+", type=float, default=LRS, help="learning rates")
    parser.add_argument("--out", type=Path, default=RESULTS / "staleness.json", help="JSON file")
    args = parser.parse_args()
    trials = []
    for seed in range(args.seed, args.seed + args.seeds):
        for staleness, (arm, settings) in STALENESS.items():
            for lr in args.lrs:
                for loss, type_ in LOSSES.items():
                    words = []
                    for one in (*settings, f"optim.lr={lr:g}", f"loss.type={type_}"):
                        words += ["--set", one]
                    rows = run_trial(arm, seed=seed, options=words)
                    trial = {"staleness": staleness, "lr": lr, "loss": loss, "seed": seed}
                    trials.append({**trial, **summarise(rows)})
                    print(show(trials[-1]), flush=True)
    medians = [
        {**kind, "held_out": statistics.median(own), "least": min(own), "most": max(own)}
        for kind, own in by_kind(trials)
    ]
    print()
    for row in medians:
        print(
            f"{row['staleness']:<6} lr {row['lr']:g} {row['loss']:<9} {row['held_out']:.3f} "
            f"({row['least']:.3f}-{row['most']:.3f})"
        )
    workload = {"settings": STALENESS, "losses": LOSSES, "lrs": args.lrs, "bound": BOUND}
    write(args.out, {**provenance(args), "workload": workload, "trials": trials,
                     "medians": medians})  # fmt: skip


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "gradient_steps": rows[-1]["version/learner"],
        "first": rows[0]["reward/eval_first"],
        "held_out": {
            int(row["version/learner"]): row["reward/eval_mean"]
            for row in rows
            if row["eval/round"] == row["training_iteration"]
        },
        "last": rows[-1]["reward/eval_mean"],
        "lag_mean": statistics.mean(row["lag/mean"] for row in rows),
        "lag_max": max(row["lag/max"] for row in rows),
        "clip_fraction": statistics.mean(row["loss/clip_fraction"] for row in rows),
        "reference_nll_nats": statistics.mean(
            row["response/reference_nll_nats"] for row in rows[-4:]
        ),
    }


def by_kind(trials: list[dict[str, Any]]) -> list[tuple[dict[str, Any], list[float]]]:
    """Held-out rewards at the end, a value a seed."""
    kinds: dict[tuple[Any, ...], list[float]] = {}
    for trial in trials:
        key = (trial["staleness"], trial["lr"], trial["loss"])
        kinds.setdefault(key, []).append(trial["last"])
    names = ("staleness", "lr", "loss")
    return [(dict(zip(names, key, strict=True)), values) for key, values in kinds.items()]


def show(trial: dict[str, Any]) -> str:
    curve = ", ".join(f"{r:.3f} after {step}" for step, r in trial["held_out"].items())
    return (
        f"{trial['staleness']:<6} lr {trial['lr']:g} {trial['loss']:<9} seed {trial['seed']}: "
        f"held-out {trial['first']:.3f} -> {curve} steps; mean lag {trial['lag_mean']:.1f}, "
        f"NLL {trial['reference_nll_nats']:.2f}"
    )


if __name__ == "__main__":
    main()
