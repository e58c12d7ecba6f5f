"""Fills in which product files an older result rests on, from the commit that it names.

For a result of a clean tree that was committed before results recorded their product files: what
the benchmark imported is read from the sources as they were at the commit, by the rules that a new
measurement follows, and each file's hash is the one that git has of it there.
"""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import product
from product import CommittedTree, blobs, blobs_at, git, measurements, product_files

from grpo_trainable.atomic import replacing
from grpo_trainable.command_line import UsageError
from grpo_trainable.wording import plural

# What `measure.provenance` writes before the product, which is filled in behind it.
ABOUT = ("command", "commit", "dirty", "at", "hardware", "packages", "seed", "workload")
HOW = "the commit, read from git after the measurement"


def adopt(path: Path) -> str:
    """Fills in the product files of every part of a result that lacks them, and says how many.

    Raises:
        UsageError: the result is not committed, or does not say enough of its origin to be trusted.
    """
    if not is_committed(path):
        raise UsageError(f"--adopt {path}: is not committed as it is")
    result = json.loads(path.read_text(encoding="utf-8"))
    lacking = {
        part: measurement
        for part, measurement in measurements(result).items()
        if "product" not in measurement
    }
    if not lacking:
        raise UsageError(f"--adopt {path}: says already which product files it rests on")
    for part, measurement in lacking.items():
        if (why := why_not(measurement)) is not None:
            raise UsageError(f"--adopt {f'{path} {part}'.rstrip()}: {why}")
    filled = {part: with_product(measurement) for part, measurement in lacking.items()}
    result = filled.get("", {**result, **filled})
    with replacing(path) as file:
        file.write(f"{json.dumps(result, indent=2)}\n".encode())
    files = sum(len(measurement["product"]) for measurement in filled.values())
    return f"{path.name}: {plural(files, 'product file')} filled in"


def is_committed(path: Path) -> bool:
    """Whether HEAD has the file as it is."""
    path = path.resolve()
    if not path.is_relative_to(product.ROOT):
        return False
    name = path.relative_to(product.ROOT).as_posix()
    now = blobs([name])
    return bool(now) and blobs_at("HEAD", [name]) == now


def why_not(measurement: Mapping[str, Any]) -> str | None:
    """Why a measurement cannot be given its product files; None when it can."""
    if measurement.get("dirty") is True:
        return "was measured from files that were not committed"
    if measurement.get("dirty") is not False:
        return "does not say whether all files were committed"
    commit, script = measurement.get("commit", ""), script_of(measurement)
    if not is_commit(commit):
        return f"git has no commit {commit or 'of it'}"
    if not script or not blobs_at(commit, [script]):
        return f"commit {commit[:7]} has no script {script or 'that its command names'}"
    return None


def with_product(measurement: Mapping[str, Any]) -> dict[str, Any]:
    """The measurement with its product files, at the place where a new one has them."""
    tree = CommittedTree(measurement["commit"])
    files = product_files(script_of(measurement), tree)
    about = {key: measurement[key] for key in ABOUT if key in measurement}
    added = {"product": {name: tree.blobs[name] for name in files}, "product_from": HOW}
    return {**about, **added, **measurement}


def script_of(measurement: Mapping[str, Any]) -> str:
    """`benchmarks/x.py` of the command `python benchmarks/x.py --option`."""
    words = shlex.split(measurement.get("command", ""))
    return words[1] if len(words) > 1 else ""


def is_commit(name: str) -> bool:
    """Whether it is the whole name of a commit that git has."""
    if len(name) != 40:
        return False
    try:
        git("cat-file", "-e", f"{name}^{{commit}}")
    except subprocess.CalledProcessError:
        return False
    return True
