"""Do lag-0 runs give the same bits in this checkout as in another one?

    python benchmarks/bits.py DIRECTORY [--model MODEL]

Runs short trials of `launch/tune.py` at lag 0 in both checkouts, in the current Python environment.
The trials cover each placement, each `k_mode`, each way of drawing from a replay buffer, the main
choices of the objective, a critic, episodes and, with `--model`, a Hugging Face model. Two runs are
equal if

- every metric that both checkouts write is equal in every row, except metrics that measure time;
- every tensor of the policy, the optimizer and the buffer that is in both final checkpoints is
  equal.

If a run differs, the benchmark prints the differences and exits with status 1. Use this benchmark
to show that a change does not alter any result.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from measure import (
    ROOT,
    commit_of,
    finished_trial,
    parser_of,
    provenance,
    rows_of,
    run_benchmark,
    write,
)

from grpo_trainable.telemetry.metrics import TIMED

SHORT = [
    *("--iterations", "5", "--checkpoint-every", "2"),
    *("--set", "rollout.prompts=4", "--set", "rollout.max_new_tokens=24"),
    *("--set", "eval.every=3", "--set", "eval.prompts=16"),
    *("--set", "optim.lr=2e-4", "--set", "model.packing=true"),  # defaults may differ
]
# Label -> arm of async_vs_sync, settings.
RUNS: dict[str, tuple[str, list[str]]] = {
    "colocated": ("colocated_k1", []),
    "colocated, two cores": ("colocated_k1_two_cores", []),
    "disaggregated": ("sync", []),
    "same_batch": ("colocated_k1", ["k=4", "k_mode=same_batch"]),
    "minibatches": ("colocated_k1", ["k=4", "k_mode=minibatches"]),
    "fresh_batches": ("colocated_k2", []),
    **{
        f"replay, {sampling}": (
            "colocated_k1",
            ["buffer_capacity=3", "buffer.sample_batches=2", f"buffer_sampling={sampling}"],
        )
        for sampling in ("fifo", "uniform", "mixed")
    },
    "cispo, cap, KL": (
        "colocated_k1",
        ["k=2", "loss.type=cispo", "loss.importance_cap=2", "loss.kl_coef=0.02"],
    ),
    "gspo, rloo": ("colocated_k1", ["k=2", "loss.type=gspo", "loss.advantage=rloo"]),
    "reinforce, token_mean": (
        "colocated_k1",
        ["loss.type=reinforce_with_baseline", "loss.aggregation=token_mean"],
    ),
    "ppo, critic": ("colocated_k1", ["k=2", "loss.type=ppo", "loss.advantage=gae"]),
    "episodes": ("colocated_k1", ["task.name=guess", "env.name=guess", "model.preset=games"]),
}
HUGGING_FACE = "Hugging Face model"
PARTS = ("policy", "optimizer", "buffer")

Row = Mapping[str, Any]


def main() -> int:
    parser = parser_of(__doc__, "bits.json", seed="seed of the trials")
    parser.add_argument("baseline", type=Path, metavar="DIRECTORY", help="the other checkout")
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS), help="runs (all)")
    parser.add_argument("--model", type=Path, help="directory of a Hugging Face model to train too")
    args = parser.parse_args()
    wanted = {label: RUNS[label] for label in args.runs}
    if args.model is not None:
        settings = [f"model.path={args.model.resolve(strict=True)}", "rollout.group_size=4"]
        wanted[HUGGING_FACE] = ("colocated_k1", settings)
    trees = {"here": ROOT, "baseline": args.baseline.resolve(strict=True)}
    results = {}
    for label, (arm, settings) in wanted.items():
        options = [*SHORT, *(word for setting in settings for word in ("--set", setting))]
        runs = {tree: trial(place, arm, args.seed, options) for tree, place in trees.items()}
        results[label] = compared(**runs)
        print(show(label, results[label]), flush=True)
    origin = {**provenance(args), "baseline": commit_of(trees["baseline"])}
    write(args.out, {**origin, "workload": {"options": SHORT}, "runs": results})
    return 0 if all(result["equal"] for result in results.values()) else 1


def trial(tree: Path, arm: str, seed: int, options: list[str]) -> dict[str, Any]:
    """Return the rows of a run, and the SHA-256 of each tensor in its last checkpoint."""
    with finished_trial(arm, seed=seed, options=options, tree=tree) as directory:
        last = max(directory.glob("checkpoint_*/manifest.json"))
        return {"rows": rows_of(directory), "tensors": digests(last.parent)}


def digests(checkpoint: Path) -> dict[str, str]:
    """Return the SHA-256 of every tensor, keyed by the part of the checkpoint and the tensor name.

    The checkouts may store the same values with different precision, so tensors are converted to
    float64 first.
    """
    from safetensors.torch import load_file

    return {
        f"{part} {name}": hashlib.sha256(tensor.double().numpy().tobytes()).hexdigest()
        for part in PARTS
        for path in sorted(checkpoint.glob(f"{part}-*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def compared(here: Mapping[str, Any], baseline: Mapping[str, Any]) -> dict[str, Any]:
    """Return the counts of compared rounds, metrics and tensors, and everything that differs."""
    rows = list(zip(here["rows"], baseline["rows"], strict=False))
    names = [name for name in common(here["rows"], baseline["rows"]) if not name.startswith(TIMED)]
    differing = [
        f"{name} in round {number}"
        for number, pair in enumerate(rows, 1)
        for name in names
        if not same(*(row.get(name) for row in pair))
    ]
    own, others = here["tensors"], baseline["tensors"]
    tensors = sorted(own.keys() & others.keys())
    assert names, "the two runs have no metric in common"
    assert tensors, "the two runs have no tensor in common"
    differing += [name for name in tensors if own[name] != others[name]]
    if len(here["rows"]) != len(baseline["rows"]):
        differing.insert(0, "the number of rounds")
    return {
        "equal": not differing,
        "differing": differing,
        "rounds": len(rows),
        "metrics": len(names),
        "tensors": len(tensors),
        "digest": digest_of(own[name] for name in tensors),
    }


def digest_of(digests: Iterable[str]) -> str:
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def common(here: Sequence[Row], baseline: Sequence[Row]) -> list[str]:
    """Return the names of our metrics (area/name) that both checkouts write."""
    names = (set().union(*rows) for rows in (here, baseline))
    return sorted(name for name in set.intersection(*names) if "/" in name)


def same(one: Any, other: Any) -> bool:
    return one == other or (one != one and other != other)  # NaN equals NaN


def show(label: str, result: Mapping[str, Any]) -> str:
    if not result["equal"]:
        return f"{label}: differs in {', '.join(result['differing'][:5])}"
    return (
        f"{label}: {result['metrics']} metrics of {result['rounds']} rounds and "
        f"{result['tensors']} tensors are equal ({result['digest'][:12]})"
    )


if __name__ == "__main__":
    run_benchmark(main)
