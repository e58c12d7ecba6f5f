"""Which results rest on product files that have changed since they were measured?

Compares what each JSON in benchmarks/results/ says of the product's files with the working tree.
Says nothing when nothing has changed. A result without such a record is listed as unknown.

A change that was shown to be bit-equal and as fast does not make a result stale once it is
acknowledged: `--equal BEFORE..AFTER --reason "…"` notes the product files that the commits changed
in benchmarks/equal.json, which is committed with them.

`--adopt FILE…` fills in the record of a committed result from before results had one, from the
commit that it names: so it becomes known what has changed since. It is refused for a result that
was measured from files that were not committed, or does not say.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from adoption import adopt
from product import RESULTS, ROOT, blobs, blobs_at, git, is_product, measurements

from grpo_trainable.command_line import Parser, run

EQUAL = ROOT / "benchmarks" / "equal.json"


def main() -> int:
    parser = Parser(description=__doc__)
    parser.add_argument("--fail", action="store_true", help="exit status 1 when one is listed")
    parser.add_argument("--equal", metavar="BEFORE..AFTER", help="commits to acknowledge")
    parser.add_argument("--reason", help="what showed that they change no figure")
    parser.add_argument(
        "--adopt", nargs="+", type=Path, metavar="FILE", help="results to fill the record of"
    )
    args = parser.parse_args()
    if args.equal is not None:
        before, _, after = args.equal.partition("..")
        if not (before and after and args.reason):
            parser.error("--equal: needs BEFORE..AFTER and a --reason")
        acknowledge(before, after, args.reason)
        return 0
    if args.adopt is not None:
        for path in args.adopt:
            print(adopt(path))
        return 0
    lines = [
        line
        for path in sorted(RESULTS.glob("*.json"))
        for line in stale(path, acknowledged(read_equal()))
    ]
    print(*lines, sep="\n", end="\n" if lines else "")
    return 1 if lines and args.fail else 0


def stale(path: Path, equal: set[tuple[str, str, str | None]]) -> list[str]:
    """Lines about one result: what changed under it, part by part."""
    lines = []
    for part, measurement in measurements(json.loads(path.read_text())).items():
        label = f"{path.name} {part}".rstrip()
        recorded = measurement.get("product")
        if not recorded:
            lines.append(f"{label}: unknown, it does not say which product files it rests on")
        elif found := changed(recorded, blobs(recorded), equal):
            commit = measurement["commit"][:7]
            lines.append(f"{label}: {len(found)} of {len(recorded)} files changed since {commit}")
            lines += [f"    {name}" for name in found]
    return lines


def changed(
    recorded: Mapping[str, str], now: Mapping[str, str], equal: set[tuple[str, str, str | None]]
) -> list[str]:
    """Files that differ from what was recorded and are not known to be equal. `equal`: (file,
    before, after), which may follow each other."""
    return [
        name for name, blob in recorded.items() if now.get(name) not in equals(name, blob, equal)
    ]


def equals(name: str, blob: str, equal: set[tuple[str, str, str | None]]) -> set[str | None]:
    """The contents of a file that are as good as this one; None: no such file."""
    reached: set[str | None] = set()
    waiting: set[str | None] = {blob}
    while waiting:
        reached |= waiting
        waiting = {new for file, old, new in equal if file == name and old in waiting} - reached
    return reached


def read_equal() -> list[dict[str, Any]]:
    return json.loads(EQUAL.read_text()) if EQUAL.exists() else []


def acknowledged(entries: list[dict[str, Any]]) -> set[tuple[str, str, str | None]]:
    return {(name, *pair) for entry in entries for name, pair in entry["files"].items()}


def acknowledge(before: str, after: str, reason: str) -> None:
    """Notes every product file that differs between two commits as equal."""
    first, last = map(commit_of, (before, after))
    differing = git("diff", "--name-only", "--no-renames", first, last).splitlines()
    names = list(filter(is_product, differing))
    old, new = (blobs_at(commit, names) for commit in (first, last))
    # A file that is gone (moved, divided) is followed by nothing.
    pairs = {name: [old[name], new.get(name)] for name in names if name in old}
    if not pairs:
        sys.exit(f"--equal {before}..{after}: no product file differs")
    entry = {"before": first, "after": last, "reason": reason, "files": pairs}
    EQUAL.write_text(json.dumps([*read_equal(), entry], indent=1) + "\n")
    print(f"{len(pairs)} files noted in {EQUAL.relative_to(ROOT)}")


def commit_of(name: str) -> str:
    try:
        return git("rev-parse", "--verify", f"{name}^{{commit}}").strip()
    except subprocess.CalledProcessError:
        sys.exit(f"--equal: {name} is no commit")


if __name__ == "__main__":
    sys.exit(run("stale", main))
