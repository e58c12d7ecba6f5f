"""What the benchmarks share: the workload, fresh processes, the machine's peaks, provenance.

What is measured runs in a process of its own for each number of threads, so that nothing a thread
pool or an allocator keeps of one measurement reaches the next. The workload: the `small` preset
with random weights, 8 prompts of 10 to 14 tokens, 8 responses each, 48 new tokens, float32.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import resource
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from grpo_trainable import command_line
from grpo_trainable.atomic import replacing
from grpo_trainable.command_line import Parser, number
from grpo_trainable.noise import Meter
from grpo_trainable.threads import WAITING

if TYPE_CHECKING:
    from grpo_trainable.engines.torch_engine import TorchEngine
    from grpo_trainable.rollout import Request

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"

THREADS = (1, 2)
PACKAGES = ("torch", "numpy", "tokenizers", "safetensors")

PRESET = "small"
PROMPTS, GROUP_SIZE, NEW_TOKENS = 8, 8, 48
RESPONSES = PROMPTS * GROUP_SIZE

PEAK_SIZE = 2048  # rows of the square matrices whose product is the peak
COPY_BYTES = 256 << 20


# ---- The workload ----------------------------------------------------------------------------


def prompt_lengths(seed: int) -> list[int]:
    import numpy as np

    return np.random.default_rng(seed).integers(10, 15, PROMPTS).tolist()


def sample_requests(seed: int) -> list[Request]:
    import numpy as np

    from grpo_trainable.models.model_config import PRESETS
    from grpo_trainable.rollout import Request, SamplingLimits

    rng = np.random.default_rng(seed + 1)
    limits = SamplingLimits(
        min_new_tokens=1,
        max_new_tokens=NEW_TOKENS,
        temperature=0.8,
        end_ids=(),  # every response has its length
    )
    return [
        Request(
            stream="train",
            prompt_index=prompt_index,
            prompt_ids=tuple(rng.integers(2, PRESETS[PRESET].vocab_size, length).tolist()),
            group_size=GROUP_SIZE,
            limits=limits,
        )
        for prompt_index, length in enumerate(prompt_lengths(seed))
    ]


def engine_of_random_weights(seed: int) -> TorchEngine:
    """The engine that answers `sample_requests`."""
    from grpo_trainable.engines.torch_engine import TorchEngine
    from grpo_trainable.models.directory import read_tokenizer
    from grpo_trainable.models.model_config import PRESETS
    from grpo_trainable.models.transformer import TransformerLM

    model = TransformerLM(PRESETS[PRESET], seed)
    return TorchEngine(model, read_tokenizer(None), seed=seed)


# ---- Inside the process that is measured -----------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Wall-clock and CPU seconds of each repeat."""

    wall_s: list[float]
    cpu_s: list[float]


def in_turns(works: dict[str, Callable[[], object]], *, repeats: int) -> dict[str, Any]:
    """Seconds of two works, done in turns, and how much faster the second is, turn by turn."""
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(repeats + 2):
        for name in sorted(works, reverse=turn % 2 == 1):
            began = time.perf_counter()
            works[name]()
            if turn >= 2:  # the first are slower
                seconds[name].append(time.perf_counter() - began)
    first, second = seconds.values()
    ratios = [a / b for a, b in zip(first, second, strict=True)]
    return {
        "seconds": seconds,
        "seconds_medians": {name: statistics.median(s) for name, s in seconds.items()},
        "speed_up": {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)},
    }


def repeated(work: Callable[[], object], *, repeats: int, warm_up: int) -> Timing:
    """Times `repeats` calls, after `warm_up` calls that are not counted."""
    timing = Timing(wall_s=[], cpu_s=[])
    for call in range(warm_up + repeats):
        cpu, wall = time.process_time(), time.perf_counter()
        work()
        if call >= warm_up:
            timing.wall_s.append(time.perf_counter() - wall)
            timing.cpu_s.append(time.process_time() - cpu)
    return timing


def machine_peaks() -> dict[str, float]:
    """The best of five float32 products of two 2048 × 2048 matrices, and of five large copies.

    A copy of n bytes counts as n, although n are read and n are written.
    """
    import torch

    left, right = (torch.randn(PEAK_SIZE, PEAK_SIZE) for _ in range(2))
    product = torch.empty_like(left)
    matmul = repeated(lambda: torch.mm(left, right, out=product), repeats=5, warm_up=1)
    source = torch.ones(COPY_BYTES // 4)
    target = torch.empty_like(source)
    copy = repeated(lambda: target.copy_(source), repeats=5, warm_up=1)
    return {
        "matmul_gflop_per_s": 2 * PEAK_SIZE**3 / min(matmul.wall_s) / 1e9,
        "copy_gb_per_s": COPY_BYTES / min(copy.wall_s) / 1e9,
    }


def resident_mb() -> dict[str, float]:
    """Resident memory of this process now and at its highest, in units of 10⁶ bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "resident_mb": pages * resource.getpagesize() / 1e6,
        "peak_resident_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6,
    }


def measured(
    work: Callable[[], object], *, flop: int, tokens: int, threads: int, repeats: int
) -> dict[str, Any]:
    """One row of a result: `work` beside the floor that the machine's peak sets it."""
    warm_up = 3
    # The peaks' large matrices would count as the workload's memory: it is read first.
    repeated(work, repeats=0, warm_up=warm_up)
    memory = resident_mb()
    peaks = machine_peaks()
    meter = Meter()
    meter.begin()
    timing = repeated(work, repeats=repeats, warm_up=1)
    others = meter.take()
    assert others is not None, "this machine does not tell what its cores do"
    median = statistics.median(timing.wall_s)
    floor = flop / peaks["matmul_gflop_per_s"] / 1e9
    return {
        "threads": threads,
        "seconds": {
            "median": median,
            "min": min(timing.wall_s),
            "max": max(timing.wall_s),
            "all": timing.wall_s,
        },
        "cpu_seconds_median": statistics.median(timing.cpu_s),
        "tokens_per_s": tokens / median,
        "flop": flop,
        "gflop_per_s": flop / median / 1e9,
        "peak": peaks,
        "floor_s": floor,
        "share_of_floor": floor / median,
        "share_of_floor_best": floor / min(timing.wall_s),
        "cores_used_by_others": others.foreign_s / others.seconds,
        "warm_up": warm_up + 1,
        "repeats": repeats,
        **memory,
    }


# ---- Around it -------------------------------------------------------------------------------


def parser_of(
    description: str | None,
    out: str | None = None,
    *,
    seed: str = "of the first repeat",
    counts: Mapping[str, tuple[int, str]] | None = None,
) -> Parser:
    """The options that most benchmarks have: --seed, --out for a file in benchmarks/results/, and a
    number of at least 1 for each of `counts`, option -> (default, what it counts)."""
    parser = Parser(description=description)
    for name, (default, what) in (counts or {}).items():
        parser.add_argument(
            f"--{name}", type=number(int, 1), default=default, help=f"{what} ({default})"
        )
    parser.add_argument("--seed", type=number(int, 0), default=0, help=f"{seed} (0)")
    if out is not None:
        where = f"JSON file (benchmarks/results/{out})"
        parser.add_argument("--out", type=Path, default=RESULTS / out, help=where)
    return parser


def run_benchmark(main: Callable[[], int | None]) -> NoReturn:
    """Ends the benchmark with the status of its `main`; a wrong option is one line."""
    sys.exit(command_line.run(Path(sys.argv[0]).stem, main))


def arguments(description: str | None, result: str) -> argparse.Namespace:
    """The options of a benchmark whose calls are timed in processes of their own."""
    parser = parser_of(description, result, seed="of weights, prompts and draws")
    parser.add_argument(
        "--repeats", type=number(int, 10), default=20, help="calls that are timed, at least 10 (20)"
    )
    parser.add_argument("--inside", metavar="PART", help=argparse.SUPPRESS)
    parser.add_argument("--threads", type=int, default=1, help=argparse.SUPPRESS)
    return parser.parse_args()


def in_fresh_process(args: argparse.Namespace, part: str, threads: int) -> dict[str, Any]:
    """What `part` of this script prints as JSON, run with `threads` from its first import on."""
    command = [sys.executable, sys.argv[0], "--inside", part, "--threads", str(threads)]
    command += ["--repeats", str(args.repeats), "--seed", str(args.seed)]
    return _printed(command, threads)


def peaks_in_fresh_process(threads: int) -> dict[str, float]:
    """The machine's peaks, as this file prints them when it runs by itself."""
    return _printed([sys.executable, __file__], threads)


def _printed(command: Sequence[str], threads: int) -> dict[str, Any]:
    """The JSON on the last line that a command prints."""
    environment = environment_of(threads)
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(f"{shlex.join(command)}: exit status {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def environment_of(threads: int) -> dict[str, str]:
    """The environment of a process that computes with `threads` from its first import on."""
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        **WAITING,
    }


def environment_of_peer(threads: int) -> dict[str, str]:
    """The same for a program that uses TRL: it downloads nothing and draws no progress bars."""
    return {**environment_of(threads), "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}


def provenance(args: argparse.Namespace) -> dict[str, Any]:
    """Return command, commit, machine, versions and seed: what repeating a figure takes."""
    import torch

    return {
        "command": shlex.join(["python", *sys.argv]),
        "commit": git("rev-parse", "HEAD").strip(),
        "dirty": is_dirty(),
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "hardware": {
            "cpu": _cpu_model(),
            "cores": len(os.sched_getaffinity(0)),
            "machine": platform.machine(),
            "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
            **({"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}),
        },
        "packages": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in PACKAGES},
        },
        "seed": args.seed,
        "workload": {
            "preset": PRESET,
            "dtype": "float32",
            "prompts": PROMPTS,
            "responses_per_prompt": GROUP_SIZE,
            "new_tokens": NEW_TOKENS,
            "prompt_lengths": prompt_lengths(args.seed),
        },
    }


def git(*words: str) -> str:
    """Return what git prints, run in the repository."""
    command = ["git", "-C", str(ROOT), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def is_dirty() -> bool:
    """Return True for uncommitted changes, other than those that a benchmark itself writes."""
    written = (":(exclude)benchmarks/results", ":(exclude)docs/results")
    return bool(git("status", "--porcelain", "--", ".", *written).strip())


def same_run(kept: Mapping[str, Any], origin: Mapping[str, Any], *more: str) -> bool:
    """Return True for a result of the same commit that also agrees in the keys `more`: the
    benchmark that wrote it was interrupted, and may continue."""
    return all(kept.get(key) == origin[key] for key in ("commit", "dirty", *more))


def measurements(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the parts of a result that one command each measured, by name ("": the whole)."""
    if "command" in result:
        return {"": result}
    return {name: part for name, part in result.items() if isinstance(part, dict)}


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def write(path: Path, result: dict[str, Any], *, quiet: bool = False) -> None:
    """Write a result as JSON. A checkout that has changed meanwhile makes it dirty."""
    if "commit" in result:
        same = git("rev-parse", "HEAD").strip() == result["commit"] and not is_dirty()
        result = {**result, "dirty": result["dirty"] or not same}
    if any(measurement.get("dirty") for measurement in measurements(result).values()):
        print(f"{path.name}: measured from files that are not committed; not to be committed")
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:  # a benchmark of hours may be cut short
        file.write(f"{json.dumps(result, indent=2)}\n".encode())
    if not quiet:
        print(f"\nwritten to {path}")


def print_rows(title: str, rows: Sequence[dict[str, Any]]) -> None:
    """One line per number of threads."""
    print(title)
    lines = [
        [
            "threads",
            "median s",
            "min",
            "max",
            "cpu s",
            "tokens/s",
            "floor s",
            "share of floor",
            "best",
            "matmul GFLOP/s",
            "copy GB/s",
            "resident MB",
            "others' cores",
        ]
    ]
    for row in rows:
        seconds, peak = row["seconds"], row["peak"]
        lines.append(
            [
                str(row["threads"]),
                f"{seconds['median']:.3f}",
                f"{seconds['min']:.3f}",
                f"{seconds['max']:.3f}",
                f"{row['cpu_seconds_median']:.3f}",
                f"{row['tokens_per_s']:,.0f}",
                f"{row['floor_s']:.3f}",
                f"{row['share_of_floor']:.0%}",
                f"{row['share_of_floor_best']:.0%}",
                f"{peak['matmul_gflop_per_s']:.1f}",
                f"{peak['copy_gb_per_s']:.1f}",
                f"{row['peak_resident_mb']:.0f}",
                f"{row['cores_used_by_others']:.2f}",
            ]
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


if __name__ == "__main__":
    print(json.dumps(machine_peaks()))
