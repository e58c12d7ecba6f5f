"""Time a GRPO step in this package and in TRL, in turn on the same machine.

Both programs train the `small` shape (5.26 M parameters, float32) on the same 8 prompts, with 8
responses to each, 48 new tokens, microbatches of 16 rows, and the same reward function. TRL is
configured for speed: no gradient checkpointing, one generate call per step, SDPA, float32, no
logging. Our side is one colocated worker that runs without Ray. Apart from that, it does all the
work of a trial's worker: it also scores responses, and publishes and loads weights.
Rewards differ within every group, so no group is left out.

The contests are

- `sample`: the responses to all prompts, without a gradient step (TRL's side calls the `generate`
  of transformers, as its trainer does; our side also scores the responses);
- `step`: one gradient step per batch;
- `k4`: four gradient steps per batch;
- `kl`: one gradient step per batch, with a KL coefficient of 0.04 in the loss, so that
  a reference is needed.

For each contest and each number of threads, both programs start once, warm up, and then take turns.
The order alternates from repeat to repeat. If other processes took more than a tenth of the machine
during a pair of turns, the pair is left out and run again. The reported ratio, TRL's time divided
by ours, is the median over pairs. The interval is the range of the pairs, which contains the true
median with probability 1 - 2^(1 - repeats).

TRL's side, `trl_peer.py`, runs in another environment, with TRL but without Ray and this package,
which pin other versions of shared dependencies. `make bench-peers` creates that environment and
runs this benchmark.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import measure
from measure import MICROBATCH, ROOT, THREADS, parser_of, provenance, run_benchmark, write

from grpo_trainable.command_line import UsageError
from grpo_trainable.telemetry.machine_load import DISTURBED_ABOVE, Meter

if TYPE_CHECKING:
    from grpo_trainable.protocol.rollout import RolloutGroup

PEER = ROOT / ".venv-trl" / "bin" / "python"
CONTESTS = ("sample", "step", "k4", "kl")
OURS, TRL = "ours", "trl"
SCRIPTS = {OURS: ["peers.py", "--job"], TRL: ["trl_peer.py", "race"]}
# A meaningless reward from 0 to 1 that depends on the whole response, so every group has a signal.
# `trl_peer.py` has the same reward.
REWARD = """
import zlib


def score(response, ground_truth):
    return zlib.crc32(response.encode()) / 2**32
"""
WARM_UP = 2
TRIES = 3  # maximum number of pairs, disturbed or not, as a multiple of the repeats


def main() -> None:
    args = parse_arguments()
    if args.job is not None:
        take_turns(*args.job)
        return
    rows = []
    with tempfile.TemporaryDirectory() as place:
        job = prepared(args, Path(place))
        for contest in args.contests:
            for threads in args.threads:
                rows.append(race(args, job, contest, threads))
                print(show(rows[-1]), flush=True)
    shared = ("prompt_lengths", "group_size", "microbatch", "max_new_tokens", "temperature")
    workload = {"preset": measure.PRESET, **{name: job[name] for name in shared}}
    about = {"workload": workload, "repeats": args.repeats, "peer": versions(args.peer)}
    write(args.out, {**provenance(args), **about, "results": rows})


def parse_arguments() -> argparse.Namespace:
    parser = parser_of(
        __doc__,
        "peers.json",
        seed="seed of weights, prompts and random draws",
        counts={"repeats": (7, "number of pairs of each contest")},
    )
    add = parser.add_argument
    add("--contests", nargs="+", choices=CONTESTS, default=CONTESTS, help="contests to run (all)")
    add("--threads", nargs="+", type=int, default=THREADS, help="threads of each program (1 2)")
    add("--peer", type=Path, default=PEER, help="Python of TRL's environment (.venv-trl)")
    add("--job", nargs=3, metavar=("JOB", "CONTEST", "THREADS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job is None and not args.peer.exists():
        raise UsageError(f"--peer {args.peer}: no such file; run `make bench-peers` to create it")
    return args


def versions(python: Path) -> dict[str, str]:
    """Return the versions of the packages that determine TRL's speed."""
    asked = "import importlib.metadata as m, json; print(json.dumps({name: m.version(name) for"
    asked += " name in ('trl', 'transformers', 'accelerate', 'torch')}))"
    done = subprocess.run([python, "-c", asked], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


# ---- The job, the same for both --------------------------------------------------------------


def prepared(args: argparse.Namespace, place: Path) -> dict[str, Any]:
    """Return the job for both programs, and write the model where TRL reads it."""
    from grpo_trainable.config import GRPOConfig
    from grpo_trainable.models.directory import read_tokenizer
    from grpo_trainable.models.model_config import PRESETS
    from grpo_trainable.models.store import save_policy
    from grpo_trainable.models.transformer import TransformerLM
    from grpo_trainable.tasks.prompts import build_task
    from grpo_trainable.tools.export import export

    tokenizer = read_tokenizer(None)
    policy, model, reward = place / "policy", place / "model", place / "reward.py"
    reward.write_text(REWARD)
    save_policy(policy, TransformerLM(PRESETS[measure.PRESET], args.seed), tokenizer)
    export(policy, model)
    task = build_task(GRPOConfig.from_dict({"seed": args.seed}))  # stories with a keyword
    texts = [str(task.train_example(index).prompt) for index in range(measure.PROMPTS)]
    return {
        "model": str(model),
        "reward": str(reward),
        "prompts": texts,
        "prompt_lengths": [len(tokenizer.encode_prompt(text)) for text in texts],
        "seed": args.seed,
        "group_size": measure.GROUP_SIZE,
        "microbatch": MICROBATCH,
        "max_new_tokens": measure.NEW_TOKENS,
        "temperature": 0.8,
        "out": str(place / "trl"),
    }


# ---- Our side --------------------------------------------------------------------------------


def take_turns(job_file: str, contest: str, threads: str) -> None:
    """For every line of input, take a turn, and print the seconds that it took."""
    job = json.loads(Path(job_file).read_text())
    turn = steps(job, contest, float(threads))
    for _ in sys.stdin:
        began = time.perf_counter()
        turn()
        seconds = time.perf_counter() - began
        memory = measure.peak_resident_mb()
        print(json.dumps({"seconds": seconds, "peak_resident_mb": memory}), flush=True)


def config_of(job: dict[str, Any], contest: str, threads: float) -> Any:
    from grpo_trainable.config import GRPOConfig

    return GRPOConfig.from_dict(
        {
            "seed": job["seed"],
            **({"k": 4, "k_mode": "same_batch"} if contest == "k4" else {}),
            "model": {"preset": measure.PRESET, "packing": True},
            "task": {"reward": f"{job['reward']}:score"},
            "rollout": {
                "prompts": len(job["prompts"]),
                "group_size": job["group_size"],
                "min_new_tokens": job["max_new_tokens"],
                "max_new_tokens": job["max_new_tokens"],
                "temperature": job["temperature"],
            },
            "optim": {"microbatch": job["microbatch"], "lr": 1e-6},
            "loss": {"kl_monitor": False, "kl_coef": 0.04 if contest == "kl" else 0.0},
            "resources": {"generator_cpus": threads, "worker_cpus": threads},
        }
    )


def requests_of(job: dict[str, Any], config: Any) -> list[Any]:
    from grpo_trainable.models.directory import policy_tokenizer
    from grpo_trainable.tasks.prompts import Prompts, build_task

    task = build_task(config)
    prompts = Prompts(config, task, policy_tokenizer(config.model))
    requests = [prompts.request("train", index) for index in range(len(job["prompts"]))]
    said = [str(task.train_example(index).prompt) for index in range(len(requests))]
    assert said == job["prompts"], "TRL was given different prompts"
    return requests


def steps(job: dict[str, Any], contest: str, threads: float) -> Callable[[], object]:
    """Return a function that runs a worker's round: publish, load, sample, score, k steps.

    In the contest `sample`, the function only samples and scores.
    """
    from grpo_trainable.cluster.colocated import Colocated
    from grpo_trainable.protocol.messages import Sampled
    from grpo_trainable.transports.in_process import InProcess

    config = config_of(job, contest, threads)
    worker = Colocated(config, InProcess())
    first = requests_of(job, config)
    rounds = count()

    def sample() -> list[RolloutGroup]:
        # New indices give new random draws for the same prompts.
        ahead = next(rounds) * len(first)
        requests = [replace(own, prompt_index=own.prompt_index + ahead) for own in first]
        sampled = worker.generate(requests)
        assert isinstance(sampled, Sampled)  # the user's reward function runs in a later call
        groups = worker.score(sampled.number).groups
        assert sum(group.num_tokens for group in groups) == measure.RESPONSES * measure.NEW_TOKENS
        return groups

    def step() -> None:
        worker.load(worker.publish().handle)
        updated = worker.update([sample()])
        assert len(updated.steps) == (4 if contest == "k4" else 1)

    if contest == "sample":
        worker.load(worker.publish().handle)
        return sample
    return step


# ---- One contest -----------------------------------------------------------------------------


class Racer:
    """One of the programs, which takes a turn on request."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.pid = process.pid

    def turn(self) -> dict[str, float]:
        """Take a turn; return its seconds and the peak memory so far, in units of 10⁶ bytes."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("{"):  # libraries print other lines
                return json.loads(line)
        sys.exit(f"{shlex.join(map(str, self._process.args))}: ended early")  # type: ignore[arg-type]


@contextmanager
def racer(name: str, python: str, job: Path, contest: str, threads: int) -> Iterator[Racer]:
    script, *words = SCRIPTS[name]
    command = [python, str(ROOT / "benchmarks" / script), *words, str(job), contest, str(threads)]
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
    return {"contest": contest, "threads": threads, **summary(pairs), "left_out": left_out}


def undisturbed(
    racers: dict[str, Racer], repeats: int
) -> tuple[list[dict[str, dict[str, float]]], int]:
    """Return undisturbed pairs of turns, and the number of pairs that were left out.

    A pair is left out if other processes took too much of the machine.
    """
    meter = Meter([one.pid for one in racers.values()])
    pairs: list[dict[str, dict[str, float]]] = []
    for tried in range(TRIES * repeats):
        order = [OURS, TRL] if tried % 2 else [TRL, OURS]
        meter.start_measuring()
        pair = {name: racers[name].turn() for name in order}
        others = meter.take()
        assert others is not None, "this machine does not report the load of its cores"
        if others.fraction <= DISTURBED_ABOVE:
            pairs.append(pair)
        if len(pairs) == repeats:
            return pairs, tried + 1 - repeats
    sys.exit(f"only {len(pairs)} of {repeats} pairs were undisturbed; stop other work and retry")


def summary(pairs: Sequence[dict[str, dict[str, float]]]) -> dict[str, Any]:
    seconds = {name: [pair[name]["seconds"] for pair in pairs] for name in (OURS, TRL)}
    memory = {name: max(pair[name]["peak_resident_mb"] for pair in pairs) for name in (OURS, TRL)}
    ratios = [theirs / own for own, theirs in zip(seconds[OURS], seconds[TRL], strict=True)]
    return {
        "seconds": seconds,
        "ours_s": statistics.median(seconds[OURS]),
        "trl_s": statistics.median(seconds[TRL]),
        "ratio": statistics.median(ratios),
        "interval": [min(ratios), max(ratios)],
        "coverage": 1 - 2.0 ** (1 - len(pairs)),
        "peak_resident_mb": memory,
        "memory_ratio": memory[OURS] / memory[TRL],
    }


def show(row: dict[str, Any]) -> str:
    low, high = row["interval"]
    memory = row["peak_resident_mb"]
    return (
        f"{row['contest']}, threads {row['threads']}: {row['ours_s']:.3f} s here, "
        f"{row['trl_s']:.3f} s in TRL: {row['ratio']:.2f} x ({low:.2f} to {high:.2f}); "
        f"memory {memory[OURS]:.0f} and {memory[TRL]:.0f} MB ({row['memory_ratio']:.2f}); "
        f"{row['left_out']} pairs left out"
    )


if __name__ == "__main__":
    run_benchmark(main)
