"""What is lost when something breaks: a campaign of faults against the real program.

Most faults strike a running `launch/tune.py` of 16 rounds, with a checkpoint every 4, at a random
moment after rounds 3 to 12. A trial has survived when the command, or its `--resume` where it was
the command that ended, ends with status 0; every round stands once and in order in result.json,
progress.csv, TensorBoard and Parquet; and, at lag 0, every row (those that measure time aside) and
the policy, optimizer and buffer at the end equal, bit for bit, those of a run that nothing happened
to. Seconds to recover are the longest time without a row from the fault on; lost is what was done
again: rounds, or prompts asked for once more. The JSON is written after every fault, and the same
command goes on with what it has unless the commit or the trials have changed since.

Filling a disk needs the right to mount one.

With --cluster the trials run on a Ray cluster of four machines: one with the command, three with
learner, generators and Trainable. What breaks are machines, links and an object store. That every
process of ours ends belongs to surviving: on all machines, lost ones included. Machines are
namespaces (`tests/cluster/machines.py`), which need root, and `nft` to lose packets.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import broken_disks
import broken_inputs
import kills
import store_kills
from measure import RESULTS, parser_of, provenance, run_benchmark, same_run, write
from survival import CHECKPOINT_EVERY, ROUNDS, SETTINGS, Fault, Lost, Outcome

from grpo_trainable.command_line import UsageError

FAULTS = (*kills.FAULTS, *store_kills.FAULTS, *broken_disks.FAULTS, *broken_inputs.FAULTS)


def main() -> None:
    parser = parser_of(__doc__, seed="of the moments")
    parser.add_argument("--cluster", action="store_true", help="faults of a cluster's machines")
    parser.add_argument("--fault", action="append", help="part of the name of those to run (all)")
    parser.add_argument("--repeats", type=int, help="of each at most, instead of its own number")
    where = "JSON file (benchmarks/results/faults.json, with --cluster faults_cluster.json)"
    parser.add_argument("--out", type=Path, help=where)
    args = parser.parse_args()
    faults, settings = on_a_cluster() if args.cluster else (FAULTS, SETTINGS)
    out = args.out or RESULTS / ("faults_cluster.json" if args.cluster else "faults.json")
    chosen = [f for f in faults if not args.fault or any(part in f.name for part in args.fault)]
    if not chosen:
        parser.error(f"--fault: none matches; valid: {', '.join(f.name for f in faults)}")
    about = {**provenance(args), "workload": {"rounds": ROUNDS, **settings}}
    about["workload"]["checkpoint.every"] = CHECKPOINT_EVERY
    kept = json.loads(out.read_text()) if out.exists() else {}
    done = kept["faults"] if same_run(kept, about, "workload") else {}
    outcomes = {name: [Outcome(**outcome) for outcome in list_] for name, list_ in done.items()}
    for fault in chosen:
        repeats = min(fault.repeats, args.repeats or fault.repeats)
        for repeat in range(len(outcomes.get(fault.name, ())), repeats):
            outcome = attempt(fault, random.Random(f"{args.seed}/{fault.name}/{repeat}"), repeat)
            outcomes.setdefault(fault.name, []).append(outcome)
            print(f"{fault.name} {repeat}: {line(outcome)}", flush=True)
            write(out, {**about, "faults": plain(outcomes)}, quiet=True)
    print()
    print(table(outcomes))
    print()
    write(out, {**about, "faults": plain(outcomes)})


def on_a_cluster() -> tuple[Sequence[Fault], dict[str, Any]]:
    """The faults of a cluster, and the settings of the trials they strike."""
    try:
        import cluster_faults
        import cluster_survival
        import store_faults
    except ModuleNotFoundError as error:
        raise UsageError(f"--cluster: {error}; pip install -e '.[test,test-extras]'") from None
    why = cluster_survival.missing()
    if why is not None:
        raise UsageError(f"--cluster: no machines can be made here: {why}")
    faults = (*cluster_faults.FAULTS, *store_faults.FAULTS)
    return faults, {**SETTINGS, **cluster_survival.SETTINGS}


def plain(outcomes: dict[str, list[Outcome]]) -> dict[str, Any]:
    return {name: [asdict(outcome) for outcome in list_] for name, list_ in outcomes.items()}


def attempt(fault: Fault, rng: random.Random, repeat: int) -> Outcome:
    try:
        return fault.strike(rng, repeat)
    except Lost as error:
        return Outcome(survived=False, happened=str(error))
    except Exception:
        # One trial's own trouble, which the table shows, must not end the campaign.
        return Outcome(survived=False, happened=traceback.format_exc())


def line(outcome: Outcome) -> str:
    parts = ["survived" if outcome.survived else "LOST", outcome.happened]
    if outcome.recovered_s is not None:
        parts.append(
            f"recovered in {outcome.recovered_s:.1f} s, {outcome.rounds_repeated} rounds repeated, "
            f"{outcome.prompts_asked_again} prompts again"
        )
    if outcome.exact:
        parts.append("bit-exact")
    return "; ".join(parts)


def table(outcomes: dict[str, Sequence[Outcome]]) -> str:
    lines = [
        f"{'fault':<32} trials survived  bit-exact  recovery s (max)  rounds repeated (max)  "
        "prompts (max)"
    ]
    for fault, list_ in outcomes.items():
        seconds = [o.recovered_s for o in list_ if o.recovered_s is not None]
        recovery = f"{statistics.median(seconds):.1f} ({max(seconds):.1f})" if seconds else "-"
        promised = [o.exact for o in list_ if o.exact is not None]
        exact = f"{sum(promised)} of {len(promised)}" if promised else "-"
        rounds, prompts = (
            max((n for o in list_ if (n := getattr(o, name)) is not None), default="-")
            for name in ("rounds_repeated", "prompts_asked_again")
        )
        lines.append(
            f"{fault:<32} {len(list_):>6} {sum(o.survived for o in list_):>8}  {exact:>9}  "
            f"{recovery:>16}  {rounds:>21}  {prompts:>13}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    run_benchmark(main)
