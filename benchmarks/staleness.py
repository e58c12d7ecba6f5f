"""Is it the ratio that makes staleness bearable? Old rollouts with it and without.

About 60 gradient steps of 16 prompts x 4 responses in two kinds of staleness: `k=8`, eight passes
over each rollout batch (evaluated after 56 steps and after 64, and judged by the worse), and
`lag 8`, rollouts sampled by weights up to eight gradient steps old (60 steps). Each with
`grpo_clip`, which has the ratio to the weights that sampled, and with `reinforce_with_baseline`,
which takes the same rollouts for fresh; at 2e-4 and at a higher learning rate. A trial
that fails, as when its loss is no number any more, is a result too. The JSON is written after every
trial, and the same command goes on with what it has unless the commit has changed since.
"""

from __future__ import annotations

import json
import statistics
from typing import Any

from measure import parser_of, provenance, run_benchmark, same_run, write
from trial_runs import TrialFailed, run_trial

STALENESS: dict[str, tuple[str, list[str]]] = {  # arm of async_vs_sync, settings
    "k=8": ("colocated_k1", ["k=8", "k_mode=same_batch", "rounds=8", "eval.every=7"]),
    "lag 8": ("async_k1", ["lag=8", "rounds=60", "eval.every=20"]),
}
LOSSES = {"ratio": "grpo_clip", "no ratio": "reinforce_with_baseline"}
LRS = (2e-4, 5e-4)  # what off_policy.py trains with, and a higher one
FROM_STEP = 56  # evaluations from this gradient step on count; the worst of them
BOUND = 0.6  # reward that the ratio has to reach at the lower one


def main() -> None:
    parser = parser_of(
        __doc__, "staleness.json", seed="the first", counts={"seeds": (3, "of every run")}
    )
    parser.add_argument("--lrs", nargs="+", type=float, default=list(LRS), help="learning rates")
    args = parser.parse_args()
    origin = provenance(args)
    kept = json.loads(args.out.read_text()) if args.out.exists() else {}
    trials = kept["trials"] if same_run(kept, origin) else []
    workload = {"settings": STALENESS, "losses": LOSSES, "lrs": args.lrs, "bound": BOUND}
    for seed in range(args.seed, args.seed + args.seeds):
        for staleness in STALENESS:
            for lr in args.lrs:
                for loss in LOSSES:
                    kind = {"staleness": staleness, "lr": lr, "loss": loss, "seed": seed}
                    if any(trial.items() >= kind.items() for trial in trials):
                        continue
                    trials.append({**kind, "commit": origin["commit"], **trained(kind)})
                    print(show(trials[-1]), flush=True)
                    result = {"trials": trials, "medians": medians(trials)}
                    write(args.out, {**origin, "workload": workload, **result}, quiet=True)
    print()
    for row in medians(trials):
        print(
            f"{row['staleness']:<6} lr {row['lr']:g} {row['loss']:<9} {row['held_out']:.3f} "
            f"({row['least']:.3f}-{row['most']:.3f}), mean lag {row['lag_mean']:.1f}"
            + (f", bound {BOUND}: {'met' if row['bound_met'] else 'MISSED'}"
               if row["bound_met"] is not None else "")
        )  # fmt: skip


def trained(kind: dict[str, Any]) -> dict[str, Any]:
    arm, settings = STALENESS[kind["staleness"]]
    words = []
    for one in (*settings, f"optim.lr={kind['lr']:g}", f"loss.type={LOSSES[kind['loss']]}"):
        words += ["--set", one]
    try:
        return summarise(run_trial(arm, seed=kind["seed"], options=words))
    except TrialFailed as failure:
        return {"failed": str(failure), "last": 0.0, "lag_mean": 0.0}


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    held_out = {
        int(row["version/learner"]): row["reward/eval_mean"]
        for row in rows
        if row["eval/round"] == row["training_iteration"]
    }
    return {
        "first": rows[0]["reward/eval_first"],
        "held_out": held_out,
        "last": min(reward for step, reward in held_out.items() if step >= FROM_STEP),
        "lag_mean": statistics.mean(row["lag/mean"] for row in rows),
        "lag_max": max(row["lag/max"] for row in rows),
        "clip_fraction": statistics.mean(row["loss/clip_fraction"] for row in rows),
        "reference_nll_nats": rows[-1]["response/reference_nll_nats"],
    }


def medians(trials: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Medians over the seeds; a failed trial counts as nothing held."""
    kinds: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for trial in trials:
        kinds.setdefault((trial["staleness"], trial["lr"], trial["loss"]), []).append(trial)
    rows = []
    for (staleness, lr, loss), own in kinds.items():
        rewards = [trial["last"] for trial in own]
        held_out = statistics.median(rewards)
        judged = loss == "ratio" and lr == LRS[0]
        rows.append(
            {
                "staleness": staleness,
                "lr": lr,
                "loss": loss,
                "held_out": held_out,
                "least": min(rewards),
                "most": max(rewards),
                "lag_mean": statistics.median(trial["lag_mean"] for trial in own),
                "bound_met": held_out >= BOUND if judged else None,
            }
        )
    return rows


def show(trial: dict[str, Any]) -> str:
    kind = f"{trial['staleness']:<6} lr {trial['lr']:g} {trial['loss']:<9} seed {trial['seed']}"
    if "failed" in trial:
        return f"{kind}: {trial['failed'].strip().splitlines()[-1]}"
    curve = ", ".join(f"{r:.3f} after {step}" for step, r in trial["held_out"].items())
    return (
        f"{kind}: held-out {trial['first']:.3f} -> {curve} steps; mean lag "
        f"{trial['lag_mean']:.1f}, NLL {trial['reference_nll_nats']:.2f}"
    )


if __name__ == "__main__":
    run_benchmark(main)
