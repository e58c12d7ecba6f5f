"""Does GRPO teach a small real model to use a calculator better, after a short warm start?

Writes transcripts of calculator use, fine-tunes SmolLM2-135M-Instruct on them with
`launch/align.py sft`, and then trains it with GRPO in the environment of `tool_problems.py`. On two
cores, the training takes about an hour. The result includes the success rate on held-out problems
over the rounds.

Ctrl-C saves the last finished round and writes the curve so far. The same command then continues,
unless the commit has changed. The model is the one that `make bench-real-model` unpacks.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import real_model
from measure import ROOT, assignments, parser_of, provenance, read, rows_of, run_benchmark, write
from tool_problems import ROLE, SYSTEM, different, transcript

from grpo_trainable.command_line import INTERRUPTED, OK, UsageError
from grpo_trainable.environments.calculator import CALL

TRANSCRIPTS = 48
SFT = {
    "learning_rate": 3e-5,
    "num_train_epochs": 1,
    "per_device_train_batch_size": 4,
    "eval_steps": 100,  # only before and after training
    "save_steps": 100,
}
SETTINGS = {
    **real_model.SETTINGS,
    "task.name": "tool_problems:ToolProblems",
    "env.name": "tool_problems:ProblemCalculator",
    "env.role": ROLE,
    "model.gradient_checkpointing": "false",
    "rollout.prompts": 8,
    "rollout.max_new_tokens": 64,
    "rollout.temperature": 1.0,
    "optim.lr": 2e-5,
    "eval.every": 6,
    "eval.prompts": 128,
    "eval.samples": 1,
    "eval.temperature": 1.0,
    "checkpoint.every": 6,
}
ARM = "colocated_k1_two_cores"
REFUSED = ("=not arithmetic", "=too long")  # in the reply to an invalid call


def main() -> int:
    counts = {"rounds": (96, "number of rounds, of 8 problems × 8 episodes each")}
    parser = parser_of(__doc__, "tool_use.json", counts=counts)
    parser.add_argument("--draw", action="store_true", help="only draw the plot of --out again")
    args = parser.parse_args()
    if args.draw:
        draw(read(args.out))
        return OK
    model = real_model.WORK / "model"
    if not model.exists():
        raise UsageError(f"{model}: no such directory; run `make bench-real-model` to create it")
    origin = provenance(args)
    place = ROOT / "build" / "tool_use" / f"{origin['commit'][:8]}-{args.seed}"
    place.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGINT, lambda *_: None)  # the commands below handle Ctrl-C themselves
    warm = ("sft", "--model", str(model), "--train-file", str(write_rows(place, model)))
    fields = [word for key, value in SFT.items() for word in ("--set", f"{key}={value}")]
    status = run("align.py", *warm, "--out", str(place / "sft"), "--seed", str(args.seed), *fields)
    if status == OK:
        settings = {"arm": ARM, "model.path": place / "sft" / "model", **SETTINGS}
        status = run(
            *("tune.py", "--space", "async_vs_sync", "--iterations", str(args.rounds)),
            *("--seed", str(args.seed), *assignments(settings)),
            *("--name", "grpo", "--storage", str(place), "--resume", "auto"),
        )
    found = list(place.glob("grpo/*/result.json"))
    if status in (OK, INTERRUPTED) and found:
        workload = {"transcripts": TRANSCRIPTS, "sft": SFT, "arm": ARM, "settings": SETTINGS}
        told = {"workload": {**workload, "rounds": args.rounds}, "warm_start": warm_start(place)}
        result = {**origin, **told, **curves(found[0].parent)}
        write(args.out, result)
        draw(result)
    return status


def run(script: str, *words: str) -> int:
    """Run a command of this checkout, and return its exit status."""
    path = os.pathsep.join((str(ROOT), str(ROOT / "benchmarks")))
    command = [sys.executable, str(ROOT / "launch" / script), *words]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": path}).returncode


# ---- The warm start ----------------------------------------------------------------------------


def write_rows(place: Path, model: Path) -> Path:
    """Write a row for each action of each transcript, and return the file.

    With a row for each action, not for each transcript, the model is trained only on what it writes
    itself.
    """
    said = [transcript(own) for own in islice(different("sft", held_out=False), TRANSCRIPTS)]
    refuse_other_tokens(said, model)
    rows = [
        {"prompt": messages[:at], "completion": [message]}
        for messages in said
        for at, message in enumerate(messages)
        if message["role"] == "assistant"
    ]
    path = place / "transcripts.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def refuse_other_tokens(transcripts: Sequence[list[dict[str, str]]], model: Path) -> None:
    """Check that the template renders each transcript into the same tokens as an episode.

    Raises:
        ValueError: The tokens differ.
    """
    import transformers

    from grpo_trainable.models.directory import read_tokenizer
    from grpo_trainable.models.hf.chat import chat_template

    tokenizer = read_tokenizer(str(model))
    chat = chat_template("on", str(model), tokenizer)
    assert chat is not None
    theirs: Any = transformers.AutoTokenizer.from_pretrained(model)
    for said in transcripts:
        *asked, call, result, answer = said
        action = [*tokenizer.encode(call["content"]), tokenizer.eos_id]
        reply = chat.encode_reply(result["content"], action, role=ROLE, system=SYSTEM["content"])
        last = [*tokenizer.encode(answer["content"]), tokenizer.eos_id]
        episode = [*chat.encode(asked), *action, *reply, *last]
        if theirs.apply_chat_template(said, return_dict=False)[: len(episode)] != episode:
            raise ValueError(f"an episode has other tokens than its transcript: {said}")


def warm_start(place: Path) -> dict[str, Any]:
    """Return figures of the warm start, and the commit at which it ran."""
    found = json.loads((place / "sft" / "result.json").read_text())
    names = ("commit", "packages", "train_rows", "held_out_rows", "steps", "training_loss")
    return {name: found[name] for name in (*names, "held_out_loss")}


# ---- The curves --------------------------------------------------------------------------------


def curves(directory: Path) -> dict[str, Any]:
    """Return the figures of each round and of each evaluation of a trial."""
    rows = rows_of(directory)
    seconds = {0: 0.0, **{row["training_iteration"]: row["time/wall_clock_s"] for row in rows}}
    table = pq.read_table(directory / "evaluations").to_pylist()
    return {
        "finished_rounds": len(rows),
        "rounds": [
            {
                "round": row["training_iteration"],
                "seconds": row["time/wall_clock_s"],
                "success": row.get("reward/train_mean"),  # None if no group was trained on
                "calls": row.get("env/calls_mean"),
                "dropped": row["count/dropped"],
                "disturbed": row["time/disturbed_fraction"],  # CPU time that other work took
            }
            for row in rows
        ],
        "held_out": [
            {
                "round": at,
                "seconds": seconds[at],
                **measured([r for r in table if r["round"] == at]),
            }
            for at in sorted({row["round"] for row in table})
        ],
    }


def measured(episodes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the means over an evaluation's episodes, one episode for each problem."""
    count = len(episodes)
    calls = [[turn for turn in json.loads(own["turns"]) if is_call(turn)] for own in episodes]
    success = sum(own["reward"] for own in episodes) / count
    return {
        "episodes": count,
        "success": success,
        "standard_error": (success * (1 - success) / (count - 1)) ** 0.5,
        "calls": sum(map(len, calls)) / count,
        "no_call": sum(not own for own in calls) / count,
        "refused_calls": sum(is_refused(turn) for own in calls for turn in own) / count,
        "cut_off": sum(not own["finished"] for own in episodes) / count,
    }


def is_call(turn: dict[str, Any]) -> bool:
    """Return True if the environment received the turn's action as a call to the calculator."""
    return turn["reward"] is not None and turn["action"].strip().startswith(CALL)


def is_refused(turn: dict[str, Any]) -> bool:
    return any(text in turn["observation"] for text in REFUSED)


def draw(result: dict[str, Any]) -> None:
    """Plot the held-out success rate, with its standard error, and the calls per episode."""
    from matplotlib.figure import Figure

    from reports.canvas import Plot, Theme, axes_of, colour, legend, marker, render_all

    held_out = result["held_out"]
    rounds = [own["round"] for own in held_out]
    lines = {name: [own[name] for own in held_out] for name in ("success", "no_call")}
    errors = {"success": [own["standard_error"] for own in held_out], "no_call": None}
    names = {"success": "right answers", "no_call": "episodes without a call"}

    def drawn(figure: Figure, theme: Theme) -> None:
        axes = axes_of(figure, theme, x_label="round", y_label="share of episodes", below=0.3)
        handles = [
            axes.errorbar(
                *(rounds, values, errors[name]),
                color=colour(i),
                marker=marker(i),
                capsize=3,
                label=names[name],
            )
            for i, (name, values) in enumerate(lines.items())
        ]
        axes.set_ylim(0, 1)
        legend(figure, theme, handles, columns=2)

    plot = Plot(name="tool_use", title="Held-out problems", look="", draw=drawn)
    images = render_all([plot], files=True)
    (ROOT / "docs" / "results" / "tool_use.png").write_bytes(images["tool_use-file"])


if __name__ == "__main__":
    run_benchmark(main)
