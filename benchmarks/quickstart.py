"""Record the run that the README and the quickstart show: the main job, as `make tune` starts it.

    python benchmarks/quickstart.py            ten minutes on two idle cores
    python benchmarks/quickstart.py --no-run   only tables and pictures, from the existing run

- Writes the output of the run (with short paths), its report.json and pictures of the report to
  docs/quickstart/.
- Runs docs/tables.py, which puts the run's final table into README.md and docs/quickstart.md.
- Writes the origin of the run to benchmarks/results/quickstart.json, with the SHA-256 of
  report.json.

The picture of the report page needs Chromium. Without Chromium, the old picture stays, and a
message says so.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from measure import ROOT, parser_of, provenance, run_benchmark, write

NAME = "first"
STORAGE = Path.home() / "ray_results" / "quickstart"
SHORT = "~/ray_results"  # stands for the storage path in the output
DOCS = ROOT / "docs"
KEPT = DOCS / "quickstart"
PLOTS = ("reward_wall_clock", "stages", "legend")
# CSS that hides parts of the page while its picture is taken, and the size of the picture.
HIDDEN = "section:not(#arms, :has(#reward_rounds)), #arms p, .scroll ~ .scroll { display: none }"
SIZE = "1260,1610"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
QUIET = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    "--hide-scrollbars",
]


def main() -> None:
    parser = parser_of(__doc__, "quickstart.json", seed="seed of the trials")
    parser.add_argument(
        "--storage", type=Path, default=STORAGE, help=f"storage path of the run ({STORAGE})"
    )
    parser.add_argument("--no-run", action="store_true", help="use the existing run")
    args = parser.parse_args()
    if not args.no_run:
        origin = provenance(args)
        KEPT.joinpath("log.txt").write_text(log_of_a_run(args.storage, args.seed))
        report = (args.storage / NAME / "report.json").read_text()
        report = report.replace(str(args.storage), SHORT)
        KEPT.joinpath("report.json").write_text(report)
        workload = {"space": "async_vs_sync", "trials": json.loads(report)["trials"]}
        digest = hashlib.sha256(report.encode()).hexdigest()
        write(args.out, {**origin, "workload": workload, "report_json_sha256": digest})
    for plot in PLOTS:
        shutil.copyfile(args.storage / NAME / "plots" / f"{plot}.png", KEPT / f"{plot}.png")
    picture(args.storage / NAME / "report.html", KEPT / "report.png")
    subprocess.run([sys.executable, str(DOCS / "tables.py")], check=True)


def log_of_a_run(storage: Path, seed: int) -> str:
    """Run the command, show its output, and return the output with short paths."""
    shutil.rmtree(storage / NAME, ignore_errors=True)
    command = [
        *(sys.executable, str(ROOT / "launch" / "tune.py"), "--space", "async_vs_sync"),
        *("--seed", str(seed), "--name", NAME, "--storage", str(storage)),
    ]
    lines = []
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        for line in job.stdout:
            print(line, end="", flush=True)
            lines.append(line.replace(str(storage), SHORT))
    if job.returncode != 0:
        sys.exit(f"launch/tune.py: status {job.returncode}")
    return "".join(lines)


def picture(report: Path, out: Path) -> None:
    """Take a picture of the table and the first plots of the report page."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        print(f"Chromium is missing: {out.relative_to(ROOT)} is unchanged")
        return
    with tempfile.TemporaryDirectory() as place:
        page = Path(place, "report.html")
        style = f"<style>{HIDDEN}</style></head>"
        text = report.read_text(encoding="utf-8").replace(str(report.parents[1]), SHORT)
        page.write_text(text.replace("</head>", style, 1))
        options = [f"--user-data-dir={place}/profile", f"--window-size={SIZE}"]
        command = [browser, *QUIET, *options, f"--screenshot={out}", page.as_uri()]
        subprocess.run(command, check=True, capture_output=True, timeout=120)


if __name__ == "__main__":
    run_benchmark(main)
