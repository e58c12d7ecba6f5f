"""A step of GRPO here and in TRL, in turns on the same machine.

Both programs train the `small` shape (5.26 M parameters, float32) on the same 8 prompts, each asked
8 times for 48 new tokens, in microbatches of 16 rows, with the same reward function. The peer is
set for speed: no gradient checkpointing, one generate call a step, SDPA, float32, no logging. Ours
is one colocated worker with all that it does in a trial but Ray: weights are published and loaded,
responses scored; and no group is left out for having no signal.

The contests: `step` (one gradient step per batch), `k4` (four), `kl` (KL of 0.04 in the loss, so a
reference is computed), and `generation`, our engine beside `transformers.generate`. For each and
each number of threads both programs are started once, warm up, and then take turns, with the order
swapped from repeat to repeat. A pair during which others took more than a tenth of the machine is
left out and run again. The ratio is the median over pairs; the interval is the range of the pairs,
which holds the true median with a probability of 1 - 2^(1 - repeats).

`make bench-peers` makes the environment of TRL and runs it. Where TRL cannot be installed that
says so, and nothing is measured.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import generation
import measure
import train_step
from measure import ROOT, THREADS, parser_of, provenance, run_benchmark, write

from grpo_trainable.command_line import UsageError
from grpo_trainable.noise import DISTURBED_ABOVE, Meter

PEER = ROOT / ".venv-trl" / "bin" / "python"
CONTESTS = ("step", "k4", "kl", "generation")
OURS, TRL = "ours", "trl"
SCRIPTS = {OURS: "peers_ours.py", TRL: "peers_trl.py"}
WARM_UP = 2
TRIES = 3  # times the repeats, for pairs that are disturbed


def main() -> None:
    args = parse_arguments()
    rows = []
    with tempfile.TemporaryDirectory() as place:
        job = prepared(args, Path(place))
        for contest in args.contests:
            for threads in args.threads:
                rows.append(race(args, job, contest, threads))
                print(show(rows[-1]), flush=True)
    result = provenance(args)
    result["workload"]["prompt_lengths"] = job["prompt_lengths"]
    settings = {"microbatch": train_step.MICROBATCH, "repeats": args.repeats}
    write(args.out, {**result, **settings, "peer": versions(args.peer), "results": rows})


def parse_arguments() -> argparse.Namespace:
    parser = parser_of(
        __doc__,
        "peers.json",
        seed="of weights, prompts and draws",
        counts={"repeats": (7, "pairs of each contest")},
    )
    add = parser.add_argument
    add("--contests", nargs="+", choices=CONTESTS, default=CONTESTS, help="(all)")
    add("--threads", nargs="+", type=int, default=THREADS, help="of both programs (1 2)")
    add("--peer", type=Path, default=PEER, help="Python of TRL's environment (.venv-trl)")
    args = parser.parse_args()
    if not args.peer.exists():
        raise UsageError(f"--peer {args.peer}: no such file; `make bench-peers` makes it")
    return args


def versions(python: Path) -> dict[str, str]:
    """The packages that the peer's speed rests on."""
    asked = "import importlib.metadata as m, json; print(json.dumps({name: m.version(name) for"
    asked += " name in ('trl', 'transformers', 'accelerate', 'torch')}))"
    done = subprocess.run([python, "-c", asked], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


# ---- The job, the same for both --------------------------------------------------------------


def prepared(args: argparse.Namespace, place: Path) -> dict[str, Any]:
    """What both programs are told; the model is written where TRL reads it."""
    from grpo_trainable.exporting import export
    from grpo_trainable.models.directory import read_tokenizer
    from grpo_trainable.models.model_config import PRESETS
    from grpo_trainable.models.store import save_policy
    from grpo_trainable.models.transformer import TransformerLM

    tokenizer = read_tokenizer(None)
    policy, model = place / "policy", place / "model"
    save_policy(policy, TransformerLM(PRESETS[measure.PRESET], args.seed), tokenizer)
    export(policy, model)
    texts = prompts(args)
    return {
        "model": str(model),
        "prompts": texts,
        "prompt_lengths": [len(tokenizer.encode_prompt(text)) for text in texts],
        "seed": args.seed,
        "group_size": measure.GROUP_SIZE,
        "microbatch": train_step.MICROBATCH,
        "max_new_tokens": measure.NEW_TOKENS,
        "temperature": 0.8,
        "out": str(place / "trl"),
    }


def prompts(args: argparse.Namespace) -> list[str]:
    """The first prompts of the keyword task."""
    from grpo_trainable.prompts import build_task

    task = build_task(train_step.config_of(argparse.Namespace(seed=args.seed, threads=1)))
    examples = (task.train_example(index) for index in range(measure.PROMPTS))
    return [str(example.prompt) for example in examples]


# ---- One contest -----------------------------------------------------------------------------


class Racer:
    """One of the programs: takes a turn when it is told to."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.pid = process.pid

    def turn(self) -> dict[str, float]:
        """Seconds of one turn, and the highest resident memory until now, in units of 10⁶ bytes."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("{"):  # libraries print as well
                return json.loads(line)
        sys.exit(f"{shlex.join(map(str, self._process.args))}: it ended")  # type: ignore[arg-type]


@contextmanager
def racer(name: str, python: str, job: Path, contest: str, threads: int) -> Iterator[Racer]:
    command = [python, str(ROOT / "benchmarks" / SCRIPTS[name]), str(job), contest, str(threads)]
    environment, pipe = measure.environment_of_peer(threads), subprocess.PIPE
    process = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True)
    try:
        yield Racer(process)
    finally:
        process.kill()
        process.wait()


def race(
    args: argparse.Namespace, job: dict[str, Any], contest: str, threads: int
) -> dict[str, Any]:
    pythons = {OURS: sys.executable, TRL: str(args.peer)}
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        path = place / "job.json"
        path.write_text(json.dumps(job))
        racers = {
            name: stack.enter_context(racer(name, python, path, contest, threads))
            for name, python in pythons.items()
        }
        for one in racers.values():
            for _ in range(WARM_UP):
                one.turn()
        pairs, left_out = undisturbed(racers, args.repeats)
    figures = summary(pairs, contest, threads, job["prompt_lengths"])
    return {"contest": contest, "threads": threads, **figures, "left_out": left_out}


def undisturbed(
    racers: dict[str, Racer], repeats: int
) -> tuple[list[dict[str, dict[str, float]]], int]:
    """Pairs of turns, and how many were left out because others took a part of the machine."""
    meter = Meter([one.pid for one in racers.values()])
    pairs: list[dict[str, dict[str, float]]] = []
    for tried in range(TRIES * repeats):
        order = [OURS, TRL] if tried % 2 else [TRL, OURS]
        meter.begin()
        pair = {name: racers[name].turn() for name in order}
        others = meter.take()
        assert others is not None, "this machine does not tell what its cores do"
        if others.fraction <= DISTURBED_ABOVE:
            pairs.append(pair)
        if len(pairs) == repeats:
            return pairs, tried + 1 - repeats
    sys.exit(f"only {len(pairs)} of {repeats} pairs were undisturbed: is the machine in use?")


def summary(
    pairs: Sequence[dict[str, dict[str, float]]],
    contest: str,
    threads: int,
    prompt_lengths: Sequence[int],
) -> dict[str, Any]:
    seconds = {name: [pair[name]["seconds"] for pair in pairs] for name in (OURS, TRL)}
    memory = {name: max(pair[name]["peak_resident_mb"] for pair in pairs) for name in (OURS, TRL)}
    ratios = [theirs / own for own, theirs in zip(seconds[OURS], seconds[TRL], strict=True)]
    floor = floor_seconds(contest, threads, prompt_lengths)
    ours = statistics.median(seconds[OURS])
    return {
        "seconds": seconds,
        "ours_s": ours,
        "trl_s": statistics.median(seconds[TRL]),
        "ratio": statistics.median(ratios),
        "interval": [min(ratios), max(ratios)],
        "coverage": 1 - 2.0 ** (1 - len(pairs)),
        "floor_s": floor,
        "over_floor": None if floor is None else ours / floor,
        "peak_resident_mb": memory,
        "memory_ratio": memory[OURS] / memory[TRL],
    }


def floor_seconds(contest: str, threads: int, prompt_lengths: Sequence[int]) -> float | None:
    """What the matrix products alone would take at the machine's peak; None where no formula is
    written down."""
    if contest not in ("step", "generation"):
        return None
    flop = generation.flop(prompt_lengths)
    if contest == "step":
        flop += train_step.flop(prompt_lengths)
    return flop / measure.peaks_in_fresh_process(threads)["matmul_gflop_per_s"] / 1e9


def show(row: dict[str, Any]) -> str:
    low, high = row["interval"]
    floor = "" if row["over_floor"] is None else f", {row['over_floor']:.2f} x its floor"
    memory = row["peak_resident_mb"]
    return (
        f"{row['contest']}, threads {row['threads']}: {row['ours_s']:.3f} s here, "
        f"{row['trl_s']:.3f} s in TRL: {row['ratio']:.2f} x ({low:.2f} to {high:.2f}){floor}; "
        f"memory {memory[OURS]:.0f} and {memory[TRL]:.0f} MB ({row['memory_ratio']:.2f}); "
        f"{row['left_out']} pairs left out"
    )


if __name__ == "__main__":
    run_benchmark(main)
