"""What is lost when something breaks: a campaign of faults against the real program.

Most faults strike a running `launch/tune.py` of 16 rounds, with a checkpoint every 4, at a random
moment after rounds 3 to 12. A trial has survived when the command, or its `--resume` where it was
the command that ended, ends with status 0; every round stands once and in order in result.json,
progress.csv, TensorBoard and Parquet; and, at lag 0, every row (those that measure time aside) and
the policy, optimizer and buffer at the end equal, bit for bit, those of a run that nothing happened
to. Seconds to recover are the longest time without a row from the fault on; lost is what was done
again: rounds, or prompts asked for once more. The JSON is written after every fault, and the same
command goes on with what it has unless the product has changed since.

Filling a disk needs the right to mount one.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import broken_disks
import broken_inputs
import kills
from measure import parser_of, provenance, run_benchmark, write
from survival import CHECKPOINT_EVERY, ROUNDS, SETTINGS, Fault, Lost, Outcome

FAULTS = (*kills.FAULTS, *broken_disks.FAULTS, *broken_inputs.FAULTS)


def main() -> None:
    parser = parser_of(__doc__, "faults.json", seed="of the moments")
    parser.add_argument("--fault", action="append", help="part of the name of those to run (all)")
    parser.add_argument("--repeats", type=int, help="of each at most, instead of its own number")
    args = parser.parse_args()
    chosen = [f for f in FAULTS if not args.fault or any(part in f.name for part in args.fault)]
    if not chosen:
        parser.error(f"--fault: none matches; valid: {', '.join(f.name for f in FAULTS)}")
    about = {**provenance(args), "workload": {"rounds": ROUNDS, **SETTINGS}}
    about["workload"]["checkpoint.every"] = CHECKPOINT_EVERY
    kept = json.loads(args.out.read_text()) if args.out.exists() else {}
    done = kept["faults"] if kept.get("product") == about["product"] else {}
    outcomes = {
        fault.name: [Outcome(**outcome) for outcome in done[fault.name]]
        for fault in chosen
        if fault.name in done
    }
    for fault in chosen:
        repeats = min(fault.repeats, args.repeats or fault.repeats)
        for repeat in range(len(outcomes.get(fault.name, ())), repeats):
            outcome = attempt(fault, random.Random(f"{args.seed}/{fault.name}/{repeat}"), repeat)
            outcomes.setdefault(fault.name, []).append(outcome)
            print(f"{fault.name} {repeat}: {line(outcome)}", flush=True)
            write(args.out, {**about, "faults": plain(outcomes)}, quiet=True)
    print()
    print(table(outcomes))
    print()
    write(args.out, {**about, "faults": plain(outcomes)})


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
