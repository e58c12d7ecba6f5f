"""Execute the page docs/howto/rlhf.md in a directory, stage by stage.

A stage is a block of commands below a comment that names test_rlhf.py. A walk that was interrupted
repeats the interrupted stage and continues. benchmarks/rlhf.py executes the page as it is, and
tests/integration/extras/test_rlhf.py executes a shorter version of it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_trainable.storage.atomic import replacing

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "howto" / "rlhf.md"
STAGE = "<!-- not run: test_rlhf.py runs this page -->"
BLOCK = re.compile(
    rf'^(?:```python title="([^"]+)"|{STAGE}\n```bash)\n(.*?)^```$', re.MULTILINE | re.DOTALL
)
LINKS = ("launch", "grpo_trainable")  # repository directories that the page's commands use
STAGES = "stages.json"  # the commands, the seconds and the resulting files of each finished stage
LOG = "log.txt"


def walk(place: Path, seed: int = 0, changes: Mapping[str, str] | None = None) -> list[float]:
    """Execute the page in `place`, and return the seconds of each stage.

    Args:
        place: The directory. Stages that an earlier call finished are not repeated.
        seed: The seed that replaces seed 0 on the page.
        changes: Texts of the page, and their replacements for a shorter walk.

    Raises:
        subprocess.CalledProcessError: If a command fails.
    """
    page = PAGE.read_text(encoding="utf-8")
    for old, new in {"--seed 0 ": f"--seed {seed} ", "-0-": f"-{seed}-", **(changes or {})}.items():
        if old not in page:
            raise ValueError(f"{PAGE.name} does not contain {old!r}")
        page = page.replace(old, new)
    place.mkdir(parents=True, exist_ok=True)
    path, done = place / STAGES, []
    if path.exists():
        done = json.loads(path.read_text())
    stage = 0
    for title, code in BLOCK.findall(page):
        if title:
            (place / title).write_text(code, encoding="utf-8")
            continue
        if stage == len(done) or done[stage]["commands"] != code:
            del done[stage:]
            _remove_unfinished(place, done[-1]["files"] if done else [])
            done.append(_run(place, code))
            with replacing(path) as file:
                file.write(json.dumps(done, indent=2).encode())
        stage += 1
    return [own["seconds"] for own in done]


def _remove_unfinished(place: Path, kept: Sequence[str]) -> None:
    """Remove the output of a stage that did not finish, and of all later stages."""
    for path in place.iterdir():
        if path.name not in {*kept, *LINKS, STAGES, LOG} and path.suffix != ".py":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for name in LINKS:
        if not (place / name).exists():
            (place / name).symlink_to(ROOT / name)


def _run(place: Path, code: str) -> dict[str, Any]:
    """Run the commands of a stage. Stop at the first one that fails."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    began = time.monotonic()
    with (place / LOG).open("a") as log:
        subprocess.run(
            ["bash", "-euo", "pipefail", "-c", code],
            cwd=place,
            env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)},
            stdout=log,
            stderr=subprocess.STDOUT,
            check=True,
        )
    seconds = time.monotonic() - began
    return {"commands": code, "seconds": seconds, "files": sorted(p.name for p in place.iterdir())}
