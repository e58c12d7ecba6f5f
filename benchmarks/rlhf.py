"""Does each way to learn from preferences give stories that the reader prefers?

Executes the page docs/howto/rlhf.md once for each seed: SFT, pairs, a reward model, DPO, PPO, GRPO,
and GRPO without a KL penalty. Each block of commands on the page is a stage. If the command is
interrupted, the same command repeats the interrupted stage and continues, unless the page has
changed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from measure import ROOT, parser_of, provenance, read, run_benchmark, same_run, write

PAGE = ROOT / "docs" / "howto" / "rlhf.md"
BLOCK = re.compile(
    r'^(?:```python title="([^"]+)"|<!-- not run: [^\n]+ -->\n```bash)\n(.*?)^```$',
    re.MULTILINE | re.DOTALL,
)
STAGES = (
    ".stages.json"  # finished stages: the commands, the seconds, and the files that exist since
)
WORK = ROOT / "build" / "rlhf"
PLOT = ROOT / "docs" / "results" / "rlhf.svg"


def main() -> None:
    counts = {"seeds": (3, "number of seeds")}
    args = parser_of(__doc__, "rlhf.json", seed="first seed", counts=counts).parse_args()
    origin = provenance(args)
    kept = read(args.out)
    walks = kept["walks"] if same_run(kept, origin) else []
    for seed in range(args.seed, args.seed + args.seeds):
        if any(own["walk_seed"] == seed for own in walks):
            continue
        place = WORK / str(seed)
        seconds = walk(place, seed)
        found = json.loads((place / "walk.json").read_text())
        walks.append({"walk_seed": seed, "seconds": seconds, **found})
        write(args.out, {**origin, "walks": walks}, quiet=True)
        if seed == args.seed:
            shutil.copyfile(place / "walk.svg", PLOT)
        print((place / "walk.md").read_text(), f"{sum(seconds):.0f} s", flush=True)


def walk(place: Path, seed: int = 0, changes: Mapping[str, str] | None = None) -> list[float]:
    """Execute the page in `place`, and return the seconds of each stage.

    Args:
        place: The directory. Finished stages of an earlier call are not repeated.
        seed: The seed that replaces 0 on the page.
        changes: Texts of the page, and what replaces them in a shorter walk.
    """
    page = PAGE.read_text(encoding="utf-8")
    for old, new in {"--seed 0 ": f"--seed {seed} ", "-0-": f"-{seed}-", **(changes or {})}.items():
        assert old in page, old
        page = page.replace(old, new)
    place.mkdir(parents=True, exist_ok=True)
    for name in ("launch", "grpo_trainable"):
        if not (place / name).is_symlink():
            (place / name).symlink_to(ROOT / name)
    done = json.loads((place / STAGES).read_text()) if (place / STAGES).exists() else []
    stage = 0
    for title, code in BLOCK.findall(page):
        if title:
            (place / title).write_text(code, encoding="utf-8")
            continue
        if stage == len(done) or done[stage]["commands"] != code:
            done = done[:stage]
            _remove_leftovers(place, done)
            done.append(_run(place, code))
            (place / STAGES).write_text(json.dumps(done))
        stage += 1
    return [own["seconds"] for own in done]


def _remove_leftovers(place: Path, done: list[dict[str, Any]]) -> None:
    """Remove the output of stages that are not finished."""
    kept = set(done[-1]["files"]) if done else {"launch", "grpo_trainable"}
    for path in place.iterdir():
        if path.name in kept or path.suffix == ".py" or path.name == STAGES:
            continue
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _run(place: Path, code: str) -> dict[str, Any]:
    print(code, flush=True)
    python = Path(sys.executable).parent
    path = f"{python}{os.pathsep}{os.environ['PATH']}"
    began = time.monotonic()
    with (place / "log.txt").open("a") as log:
        subprocess.run(
            ["bash", "-euc", code],
            cwd=place,
            env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)},
            stdout=log,
            stderr=subprocess.STDOUT,
            check=True,
        )
    seconds = time.monotonic() - began
    return {"commands": code, "seconds": seconds, "files": sorted(p.name for p in place.iterdir())}


if __name__ == "__main__":
    run_benchmark(main)
