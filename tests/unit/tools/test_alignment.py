"""Alignment without TRL: rows, settings, the model to start from, and the directory of a run."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hf_models import write_json_files

from grpo_trainable.tools.alignment.base_model import base_model, refuse_missing_template
from grpo_trainable.tools.alignment.rows import Rows, hold_out, read_rows
from grpo_trainable.tools.alignment.run import STATE, Run
from grpo_trainable.tools.alignment.stages import STAGES
from grpo_trainable.tools.alignment.trainer_settings import (
    converted,
    own_defaults,
    refuse_beyond_context,
    split_assignments,
)

USER = {"role": "user", "content": "Name a colour."}
BLUE = {"role": "assistant", "content": "Blue."}
HORSE = {"role": "assistant", "content": "A horse."}
CALL = {"role": "assistant", "content": "look up colours"}
RESULT = {"role": "tool", "content": "Blue, red."}


def written(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


# ---- Rows --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "row", "layout"),
    [
        ("sft", {"prompt": "a", "completion": "b"}, "prompt + completion as texts"),
        ("sft", {"text": "a b"}, "text as texts"),
        ("sft", {"messages": [USER, BLUE]}, "messages as conversations"),
        (
            "sft",
            {"prompt": [USER], "completion": [BLUE]},
            "prompt + completion as conversations",
        ),
        (
            "sft",
            {"prompt": [USER, CALL, RESULT], "completion": [BLUE]},
            "prompt + completion as conversations",
        ),
        ("sft", {"messages": [USER, CALL, RESULT, BLUE]}, "messages as conversations"),
        (
            "dpo",
            {"prompt": "a", "chosen": "b", "rejected": "c"},
            "prompt + chosen + rejected as texts",
        ),
        (
            "reward-model",
            {"chosen": [USER, BLUE], "rejected": [USER, HORSE]},
            "chosen + rejected as conversations",
        ),
    ],
)
def test_each_layout_of_trl_is_read(stage, row, layout, tmp_path):
    path = written(tmp_path / "rows.jsonl", {**row, "source": "web"}, row)
    rows = read_rows("--train-file", path, STAGES[stage])
    assert list(rows.rows) == [row, row]
    assert (rows.layout, tuple(rows.unused)) == (layout, ("source",))


PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}


@pytest.mark.parametrize(
    ("stage", "rows", "words"),
    [
        ("sft", [], "has no rows"),
        ("sft", [["a"]], "line 1: must be a JSON object"),
        ("sft", [PAIR], "line 1: has the columns prompt + chosen + rejected; sft needs prompt"),
        ("dpo", [{"prompt": "a", "completion": "b"}], "dpo needs prompt + chosen + rejected, or"),
        ("dpo", [PAIR, {"chosen": "b", "rejected": "c"}], "line 2: has the columns chosen"),
        ("dpo", [{**PAIR, "chosen": " "}], "line 1: chosen must be non-empty text"),
        ("dpo", [{**PAIR, "chosen": [BLUE]}], "must all be texts, or all be lists of messages"),
        ("dpo", [{**PAIR, "chosen": 3}], "chosen must be non-empty text"),
        ("dpo", [PAIR, {"prompt": [USER], "chosen": [BLUE], "rejected": [HORSE]}], "line 2: all"),
        ("dpo", [{"chosen": [USER], "rejected": [USER]}], "chosen must end with a message whose"),
        ("sft", [{"messages": []}], "messages must have a message"),
        ("sft", [{"messages": [{"role": "user"}]}], "exactly the keys role and content"),
        ("sft", [{"prompt": [BLUE], "completion": [BLUE]}], "prompt must end with a message whose"),
        ("sft", [{"text": "a", "tools": ["f"]}], "the column tools is not supported"),
    ],
)
def test_a_bad_row_is_refused_in_one_line_that_names_it(stage, rows, words, tmp_path):
    path = written(tmp_path / "rows.jsonl", *rows)
    with pytest.raises(ValueError, match=r"^--train-file ") as caught:
        read_rows("--train-file", path, STAGES[stage])
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_refused_by_its_option(tmp_path):
    path = tmp_path / "none.jsonl"
    with pytest.raises(ValueError, match=f"^--eval-file {path}: cannot be read: No such file"):
        read_rows("--eval-file", str(path), STAGES["sft"])


def texts(count: int) -> Rows:
    return Rows(rows=[{"text": str(i)} for i in range(count)], conversations=False)


@pytest.mark.parametrize(("count", "held"), [(2, 1), (14, 1), (40, 4), (20_000, 1000)])
def test_a_tenth_is_held_out_and_both_parts_keep_their_order(count, held):
    train, other = hold_out(texts(count), seed=0)
    assert (len(train.rows), len(other.rows)) == (count - held, held)
    for part in (train, other):
        numbers = [int(row["text"]) for row in part.rows]
        assert numbers == sorted(numbers)
    both = [row["text"] for part in (train, other) for row in part.rows]
    assert sorted(both, key=int) == [str(i) for i in range(count)]


def test_the_seed_determines_the_held_out_rows():
    held_out = [hold_out(texts(100), seed)[1].rows for seed in (0, 0, 1)]
    assert held_out[0] == held_out[1] != held_out[2]


def test_one_row_cannot_be_divided():
    with pytest.raises(ValueError, match="has 1 row; at least 2 are needed"):
        hold_out(texts(1), seed=0)


# ---- Settings ----------------------------------------------------------------------------------


@dataclass
class Config:
    """Some fields with the types of TRL's configs."""

    learning_rate: float = 1e-6
    max_steps: int = -1
    max_length: int | None = 1024
    bf16: bool | None = None
    packing: bool = False
    loss_type: list[str] = field(default_factory=lambda: ["sigmoid"])
    loss_weights: list[float] | None = None
    packing_strategy: str = field(default="bfd", metadata={"choices": ["bfd", "wrapped"]})


def test_each_value_gets_the_type_of_its_field():
    given = {
        "learning_rate": "1e-5",
        "max_steps": "-1",
        "max_length": "none",
        "bf16": "false",
        "packing": "true",
        "loss_type": "sigmoid,sft",
        "loss_weights": "1,0.2",
    }
    found = converted(Config, given)
    assert found == {
        "learning_rate": 1e-5,
        "max_steps": -1,
        "max_length": None,
        "bf16": False,
        "packing": True,
        "loss_type": ["sigmoid", "sft"],
        "loss_weights": [1.0, 0.2],
    }


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (
            "learning_rat",
            "1",
            "--set learning_rat: Config of TRL has no such field; did you mean learning_rate?",
        ),
        ("lr", "1", "--set lr: Config of TRL has no such field"),
        ("max_steps", "x", "--set max_steps=x: invalid int value: 'x'"),
        ("max_steps", "none", "--set max_steps=none: invalid int value: 'none'"),
        ("packing_strategy", "fast", "--set packing_strategy=fast: invalid choice: 'fast'"),
    ],
)
def test_a_wrong_field_or_value_is_refused_by_name(key, value, message):
    with pytest.raises(ValueError, match=r"^--set ") as caught:
        converted(Config, {key: value})
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("assignments", "message"),
    [
        (["beta"], "--set beta: must have the form KEY=VALUE"),
        (["=1"], "--set =1: must have the form KEY=VALUE"),
        (["beta=1", "beta=2"], "--set beta: is given twice"),
        (["output_dir=x"], "--set output_dir: use --out"),
        (["seed=1"], "--set seed: use --seed"),
        (["push_to_hub=true"], "--set push_to_hub: the command works offline"),
        (["trust_remote_code=true"], "--set trust_remote_code: code that comes with a model is"),
    ],
)
def test_settings_that_the_command_decides_are_refused(assignments, message):
    with pytest.raises(ValueError, match=r"^--set ") as caught:
        split_assignments(assignments)
    assert str(caught.value).startswith(message)


def test_the_longest_sequence_is_bounded_by_the_context():
    assert own_defaults({}, 64, gpu=False)["max_length"] == 64
    assert own_defaults({}, 4096, gpu=False)["max_length"] == 1024
    assert own_defaults({"max_length": 32}, 64, gpu=False)["max_length"] == 32
    refuse_beyond_context({"max_length": 64}, 64)
    refuse_beyond_context({"max_length": None}, 64)
    with pytest.raises(ValueError, match="max_length=65: the model has a context of 64 tokens"):
        refuse_beyond_context({"max_length": 65}, 64)


def test_without_a_gpu_nothing_is_computed_in_bfloat16():
    assert own_defaults({}, None, gpu=False)["bf16"] is False
    assert "bf16" not in own_defaults({}, None, gpu=True)
    assert own_defaults({"bf16": True}, None, gpu=False)["bf16"] is True


# ---- The model ---------------------------------------------------------------------------------


def write_model(directory: Path, **others: Any) -> Path:
    write_json_files(directory, **others)
    (directory / "model.safetensors").touch()
    return directory


def test_a_model_is_found(tmp_path):
    assert base_model(str(write_model(tmp_path / "m")), STAGES["dpo"]) == tmp_path / "m"


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("none", "none: no such directory"),
        ("org/name", "org/name: no such directory; the hub is not contacted"),
    ],
)
def test_a_model_that_is_not_here_is_refused(path, words):
    with pytest.raises(ValueError, match=f"^{words}"):
        base_model(path, STAGES["sft"])


def test_a_policy_of_this_package_must_be_exported_first(tmp_path):
    (tmp_path / "policy.safetensors").touch()
    with pytest.raises(ValueError, match=r"is a policy of this package; .*launch/export.py"):
        base_model(str(tmp_path), STAGES["sft"])


def test_a_reward_model_is_no_policy(tmp_path):
    config = {"architectures": ["LlamaForSequenceClassification"]}
    path = str(write_model(tmp_path / "m", config=config))
    assert base_model(path, STAGES["reward-model"])
    with pytest.raises(ValueError, match=r"is a reward model .* dpo needs a policy"):
        base_model(path, STAGES["dpo"])


def test_conversations_need_a_chat_template(tmp_path):
    with pytest.raises(ValueError, match="has no chat template, which conversations need"):
        refuse_missing_template(write_model(tmp_path / "plain"))
    refuse_missing_template(write_model(tmp_path / "chat", tokenizer_config={"chat_template": "x"}))


# ---- The directory of a run --------------------------------------------------------------------


def run_in(out: Path, **asked: Any) -> Run:
    return Run(
        stage=STAGES["sft"],
        model=out,
        train=texts(2),
        held_out=texts(1),
        seed=0,
        context=None,
        settings={},
        asked=asked,
        out=out,
    )


def test_only_the_same_command_continues_a_run(tmp_path):
    out = tmp_path / "out"
    assert run_in(out, seed=0).begin()
    assert not run_in(out, seed=0).begin()
    with pytest.raises(ValueError, match=r"contains a run with different settings: seed was 0 and"):
        run_in(out, seed=1).begin()


def test_a_directory_with_other_files_is_refused_and_unchanged(tmp_path):
    (tmp_path / "thesis.txt").write_text("words")
    with pytest.raises(ValueError, match="is not empty; choose a new directory"):
        run_in(tmp_path).begin()
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_run_that_never_trained_leaves_no_directory(tmp_path):
    run = run_in(tmp_path / "out")
    run.begin()
    (run.out / "checkpoints").mkdir()
    run.abandon()
    assert not run.out.exists()


def write_checkpoint(out: Path, step: int, state: str) -> Path:
    directory = out / "checkpoints" / f"checkpoint-{step}"
    directory.mkdir(parents=True)
    (directory / "model.safetensors").touch()
    if state:
        (directory / STATE).write_text(state)
    return directory


def test_a_run_continues_from_the_newest_checkpoint_that_is_complete(tmp_path):
    run = run_in(tmp_path)
    assert run.newest_checkpoint() is None
    for step in (2, 10):
        write_checkpoint(tmp_path, step, json.dumps({"global_step": step, "max_steps": 20}))
    assert run.newest_checkpoint() == tmp_path / "checkpoints" / "checkpoint-10"
    torn = [write_checkpoint(tmp_path, 12, ""), write_checkpoint(tmp_path, 14, '{"global_st')]
    assert run.newest_checkpoint() == tmp_path / "checkpoints" / "checkpoint-10"
    assert not any(directory.exists() for directory in torn)


def test_the_checkpoint_of_the_last_step_is_kept_but_not_continued_from(tmp_path):
    # From the checkpoint of the last step, Transformers would take one step more.
    for step in (9, 10):
        write_checkpoint(tmp_path, step, json.dumps({"global_step": step, "max_steps": 10}))
    assert run_in(tmp_path).newest_checkpoint() == tmp_path / "checkpoints" / "checkpoint-9"
    assert (tmp_path / "checkpoints" / "checkpoint-10").is_dir()
