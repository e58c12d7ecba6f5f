"""Code that benchmarks share: a workload, fresh processes, trials, and the format of results.

The workload is the `small` preset with random weights: 8 prompts of 10 to 14 tokens, 8 responses
each, 48 new tokens, float32. Each number of threads is timed in a fresh process, so thread pools
and allocators do not affect the next measurement.
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
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from grpo_trainable import command_line
from grpo_trainable.command_line import Parser, number
from grpo_trainable.config import resources
from grpo_trainable.storage.atomic import replacing

if TYPE_CHECKING:
    from grpo_trainable.engines.torch_engine import TorchEngine
    from grpo_trainable.protocol.rollout import Request

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"

THREADS = (1, 2)
PACKAGES = ("torch", "numpy", "tokenizers", "safetensors")

PRESET = "small"
PROMPTS, GROUP_SIZE, NEW_TOKENS = 8, 8, 48
RESPONSES = PROMPTS * GROUP_SIZE
MICROBATCH = 16


# ---- The workload ----------------------------------------------------------------------------


def prompt_lengths(seed: int) -> list[int]:
    import numpy as np

    return np.random.default_rng(seed).integers(10, 15, PROMPTS).tolist()


def sample_requests(seed: int) -> list[Request]:
    import numpy as np

    from grpo_trainable.models.model_config import PRESETS
    from grpo_trainable.protocol.rollout import Request, SamplingLimits

    rng = np.random.default_rng(seed + 1)
    limits = SamplingLimits(
        min_new_tokens=1,
        max_new_tokens=NEW_TOKENS,
        temperature=0.8,
        end_ids=(),  # no response ends early
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


def engine_of_random_weights(seed: int, **options: Any) -> TorchEngine:
    """Return the engine that answers `sample_requests`."""
    from grpo_trainable.engines.torch_engine import TorchEngine
    from grpo_trainable.models.directory import read_tokenizer
    from grpo_trainable.models.model_config import PRESETS
    from grpo_trainable.models.transformer import TransformerLM

    model = TransformerLM(PRESETS[PRESET], seed)
    return TorchEngine(model, read_tokenizer(None), seed=seed, **options)


# ---- In the process that is measured ---------------------------------------------------------


def in_turns(works: Mapping[str, Callable[[], object]], *, repeats: int) -> dict[str, Any]:
    """Time several functions in turn.

    Returns:
        The seconds of each function in each turn, and the speed-up of the last function over each
        of the others in each turn.
    """
    seconds: dict[str, list[float]] = {name: [] for name in works}
    names = list(works)
    for turn in range(repeats + 2):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            began = time.perf_counter()
            works[name]()
            if turn >= 2:  # the first turns are slower
                seconds[name].append(time.perf_counter() - began)
    *others, last = names
    ratios = {
        name: [a / b for a, b in zip(seconds[name], seconds[last], strict=True)] for name in others
    }
    return {
        "seconds": seconds,
        "seconds_medians": {name: statistics.median(own) for name, own in seconds.items()},
        "speed_up": {name: spread(own) for name, own in ratios.items()},
    }


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Return the median, the minimum, the maximum and all values."""
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "all": list(values),
    }


def peak_resident_mb() -> float:
    """Return the peak resident memory of this process, in units of 10⁶ bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


# ---- Processes -------------------------------------------------------------------------------


def printed_by(command: Sequence[str], threads: int) -> Any:
    """Run a command with `threads` threads, and return the JSON in its last line of output."""
    environment = environment_of(threads)
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(f"{shlex.join(command)}: exit status {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def environment_of(threads: int) -> dict[str, str]:
    """Return the environment variables of a process that computes with `threads` threads."""
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        **resources.OPENMP,
    }


def environment_of_peer(threads: int) -> dict[str, str]:
    """Return the environment variables for TRL's process, with downloads and progress bars off."""
    return {**environment_of(threads), "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}


# ---- Trials ----------------------------------------------------------------------------------


class TrialFailed(SystemExit):
    """A trial failed. The error ends the benchmark, unless the benchmark records failures."""


def run_trial(arm: str, *, seed: int, options: list[str]) -> list[dict[str, Any]]:
    """Run one trial of `async_vs_sync`, and return its rows, one per round.

    Raises:
        TrialFailed: The trial failed.
    """
    with finished_trial(arm, seed=seed, options=options) as directory:
        return rows_of(directory)


def rows_of(directory: Path) -> list[dict[str, Any]]:
    """Return the rows of metrics in a trial's directory, one per round."""
    return [json.loads(line) for line in (directory / "result.json").read_text().splitlines()]


@contextmanager
def finished_trial(arm: str, *, seed: int, options: list[str], tree: Path = ROOT) -> Iterator[Path]:
    """Run one trial with the command of the checkout `tree`, and yield the trial's directory.

    Raises:
        TrialFailed: The trial failed.
    """
    with tempfile.TemporaryDirectory() as storage:
        command = [
            *(sys.executable, str(tree / "launch" / "tune.py"), "--space", "async_vs_sync"),
            *("--set", f"arm={arm}", "--seed", str(seed), *options),
            *("--name", "trial", "--storage", storage),
        ]
        environment = {**os.environ, "PYTHONPATH": str(tree)}
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=tree, env=environment)
        if done.returncode != 0:
            raise TrialFailed(f"{arm} with seed {seed}: status {done.returncode}\n{done.stdout}")
        (path,) = Path(storage).glob("trial/*/result.json")
        yield path.parent


def assignments(settings: Mapping[str, Any]) -> list[str]:
    """Return settings as options of the command."""
    return [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]


def overhead(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the median share of a round's time that belongs to no stage, and the largest lag."""
    shares = [row["time/other_s"] / row["time/step_s"] for row in rows]
    return {
        "other_share": statistics.median(shares),
        "largest_lag": max(row["lag/max"] for row in rows),
    }


# ---- The command -----------------------------------------------------------------------------


def parser_of(
    description: str | None,
    out: str | None = None,
    *,
    seed: str = "seed of the first repeat",
    counts: Mapping[str, tuple[int, str]] | None = None,
) -> Parser:
    """Return a parser with --seed, --out and an option for each of `counts`.

    Args:
        description: help text of the command.
        out: name of the result file in benchmarks/results/. None omits --out.
        seed: help text of --seed.
        counts: option -> (default, help text). Values are at least 1.
    """
    parser = Parser(description=description)
    for name, (default, meaning) in (counts or {}).items():
        parser.add_argument(
            f"--{name}", type=number(int, 1), default=default, help=f"{meaning} ({default})"
        )
    parser.add_argument("--seed", type=number(int, 0), default=0, help=f"{seed} (0)")
    if out is not None:
        where = f"JSON file (benchmarks/results/{out})"
        parser.add_argument("--out", type=Path, default=RESULTS / out, help=where)
    return parser


def run_benchmark(main: Callable[[], int | None]) -> NoReturn:
    """Run `main`, and exit with its status; report a wrong option as a one-line error."""
    sys.exit(command_line.run(Path(sys.argv[0]).stem, main))


# ---- The origin of a result ------------------------------------------------------------------


def provenance(args: argparse.Namespace) -> dict[str, Any]:
    """Return the origin of a result: command, commit, date, machine, versions and seed."""
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
    }


def git(*words: str, tree: Path = ROOT) -> str:
    """Run git in the checkout `tree`, and return its output."""
    command = ["git", "-C", str(tree), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def is_dirty(tree: Path = ROOT) -> bool:
    """Return True if there are uncommitted changes outside the files that benchmarks write."""
    written = (":!benchmarks/results", ":!docs/quickstart", ":!docs/results")
    return bool(git("status", "--porcelain", "--", ".", *written, tree=tree).strip())


def commit_of(tree: Path) -> dict[str, Any]:
    """Return the commit of another checkout. `dirty` is True if there are uncommitted changes."""
    return {"commit": git("rev-parse", "HEAD", tree=tree).strip(), "dirty": is_dirty(tree)}


def read(path: Path) -> dict[str, Any]:
    """Return the result of an earlier run, or an empty dictionary."""
    return json.loads(path.read_text()) if path.exists() else {}


def same_run(kept: Mapping[str, Any], origin: Mapping[str, Any], *more: str) -> bool:
    """Return True if an interrupted benchmark may continue from the result `kept`.

    The interrupted run and the new run must have the same commit, and equal values for the keys in
    `more`.
    """
    return all(kept.get(key) == origin[key] for key in ("commit", "dirty", *more))


def checked(measurement: dict[str, Any]) -> dict[str, Any]:
    """Return a measurement; mark it as dirty if the checkout has changed since the start."""
    same = git("rev-parse", "HEAD").strip() == measurement["commit"] and not is_dirty()
    return {**measurement, "dirty": measurement["dirty"] or not same}


def measurements(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return a dictionary name -> measurement. For a single measurement, the name is ""."""
    if "command" in result:
        return {"": result}
    return {name: part for name, part in result.items() if isinstance(part, dict)}


def write(path: Path, result: dict[str, Any], *, quiet: bool = False) -> None:
    """Write a result as JSON; mark it as dirty if the checkout has changed since the start."""
    if "commit" in result:
        result = checked(result)
    if any(measurement.get("dirty") for measurement in measurements(result).values()):
        print(f"{path.name}: measured with uncommitted changes; do not commit this file")
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:  # a long benchmark may be interrupted while it writes
        file.write(f"{json.dumps(result, indent=2)}\n".encode())
    if not quiet:
        print(f"\nwritten to {path}")


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
