"""A trial identifies its input files by SHA-256, and an error names any changed file."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from grpo_trainable.config import GRPOConfig
from grpo_trainable.models.directory import SHIPPED_POLICY
from grpo_trainable.tasks.input_files import (
    InputChanged,
    input_digests,
    input_files,
    inputs_of_all,
    refuse_changed_inputs,
)
from grpo_trainable.tasks.keyword import NOUNS_FILE
from grpo_trainable.tasks.math import SHIPPED_PROBLEMS


def config(**sections: Any) -> GRPOConfig:
    return GRPOConfig.from_dict(sections)


def test_the_default_trial_reads_what_ships():
    assert input_files(config()) == {
        "task.keywords_file": NOUNS_FILE,
        "model.path/config.json": SHIPPED_POLICY / "config.json",
        "model.path/tokenizer.json": SHIPPED_POLICY / "tokenizer.json",
        "model.path/policy.safetensors": SHIPPED_POLICY / "policy.safetensors",
    }


def test_random_weights_read_the_tokenizer_alone():
    keys = {"task.keywords_file", "model.path/tokenizer.json"}
    assert input_files(config(model={"preset": "small"})).keys() == keys


def test_a_users_files_are_read_in_place_of_what_ships(tmp_path):
    files = input_files(
        config(
            model={"path": str(tmp_path)},
            task={"train_file": "/a.jsonl", "eval_file": "/b.jsonl", "reward": "/r.py:score"},
            loss={"type": "/l.py:mine", "advantage": "/v.py:mine"},
        )
    )
    assert files == {
        "task.train_file": Path("/a.jsonl"),
        "task.eval_file": Path("/b.jsonl"),
        "task.reward": Path("/r.py"),
        "loss.type": Path("/l.py"),
        "loss.advantage": Path("/v.py"),
        "model.path/config.json": tmp_path / "config.json",
        "model.path/tokenizer.json": tmp_path / "tokenizer.json",
        "model.path/policy.safetensors": tmp_path / "policy.safetensors",
    }


def test_the_files_of_a_reward_model_are_read_and_several_rewards_are_numbered(tmp_path):
    for name in ("config.json", "model.safetensors", "vocab.txt", "training_args.bin"):
        (tmp_path / name).touch()

    def of_rewards(*rewards: str) -> dict[str, Path]:
        files = input_files(config(task={"reward": list(rewards)}))
        return {key: path for key, path in files.items() if key.startswith("task.reward")}

    read = ("config.json", "vocab.txt", "model.safetensors")
    alone = of_rewards(f"model:{tmp_path}")
    assert alone == {f"task.reward/{name}": tmp_path / name for name in read}
    listed = of_rewards("/r.py:score", f"model:{tmp_path}")
    assert listed == {
        "task.reward/1": Path("/r.py"),
        **{f"task.reward/2/{name}": tmp_path / name for name in read},
    }
    with pytest.raises(ValueError, match=r"^task\.reward=model:/no/rm: no such directory$"):
        of_rewards("model:/no/rm")


def test_the_files_of_a_users_engine_and_transport_are_read(tmp_path):
    files = input_files(
        config(placement="disaggregated", engine="/e.py:Mine", transport="/t.py:MINE")
    )
    assert (files["engine"], files["transport"]) == (Path("/e.py"), Path("/t.py"))


def test_a_digest_is_the_sha256_of_the_file(tmp_path):
    words = tmp_path / "words.txt"
    words.write_bytes(b"apple\n" * 300_000)  # longer than a single read
    digests = input_digests(config(task={"keywords_file": str(words)}))
    assert digests["task.keywords_file"] == hashlib.sha256(words.read_bytes()).hexdigest()


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(
        ValueError, match=r"task\.keywords_file: .*nowhere cannot be read \(No such"
    ):
        input_digests(config(task={"keywords_file": str(tmp_path / "nowhere")}))


def test_one_word_less_is_refused_by_the_files_name(tmp_path):
    words = tmp_path / "words.txt"
    words.write_text("apple\npear\n")
    reads = config(task={"keywords_file": str(words)})
    before = input_digests(reads)
    refuse_changed_inputs(reads, input_digests(reads), before)

    words.write_text("apple\n")
    with pytest.raises(InputChanged, match=rf"task\.keywords_file: {words} .*put back the file"):
        refuse_changed_inputs(reads, input_digests(reads), before)


def test_another_version_of_what_ships_is_refused_with_what_to_install():
    now = input_digests(config())
    with pytest.raises(InputChanged, match=r"nouns\.txt .*install the version of grpo-trainable"):
        refuse_changed_inputs(config(), now, {**now, "task.keywords_file": "0" * 64})


def test_a_run_of_before_there_were_digests_goes_on():
    refuse_changed_inputs(config(), input_digests(config()), {})


def test_arms_with_losses_in_different_files_are_each_compared_with_their_own(tmp_path):
    arms = []
    for name in ("first.py", "second.py"):
        (tmp_path / name).write_text(f"def loss(): ...  # {name}\n")
        arms.append(config(loss={"type": f"{tmp_path / name}:loss"}))
    read = inputs_of_all([config(), *arms])
    before = {key: file.sha256 for key, file in read.items()}
    own = {key: file.path.name for key, file in read.items() if not file.ships}
    second = f"loss.type {tmp_path / 'second.py'}"
    assert own == {"loss.type": "first.py", second: "second.py"}
    for arm in (config(), *arms):
        refuse_changed_inputs(arm, input_digests(arm), before)
    (tmp_path / "second.py").write_text("def loss(): return 0\n")
    refuse_changed_inputs(arms[0], input_digests(arms[0]), before)
    with pytest.raises(InputChanged, match=r"loss\.type: .*second\.py has changed"):
        refuse_changed_inputs(arms[1], input_digests(arms[1]), before)


def test_a_reward_without_a_file_is_left_out():
    assert "task.reward" not in input_files(config(task={"reward": "sys:intern"}))


def test_the_class_of_a_custom_task_and_its_files_are_read(tmp_path):
    (tmp_path / "words.txt").write_text("apple\n")
    (tmp_path / "mine.py").write_text(
        "from dataclasses import dataclass\n"
        "from grpo_trainable.config import integer, path\n"
        "class Mine:\n"
        "    @dataclass(frozen=True)\n"
        "    class Settings:\n"
        "        words: str | None = path(None)\n"
        "        folder: str | None = path(None)\n"
        "        other: str | None = path(None)\n"
        "        size: int = integer(1, minimum=1)\n"
    )
    task = {"name": f"{tmp_path}/mine.py:Mine", "words": f"{tmp_path}/words.txt", "size": 3}
    reads = config(task={**task, "folder": str(tmp_path)})

    files = {key: path for key, path in input_files(reads).items() if key.startswith("task.")}
    assert files == {"task.name": tmp_path / "mine.py", "task.words": tmp_path / "words.txt"}

    before = input_digests(reads)
    (tmp_path / "mine.py").write_text((tmp_path / "mine.py").read_text() + "# changed\n")
    with pytest.raises(InputChanged, match=r"^task\.name: .*mine\.py has changed"):
        refuse_changed_inputs(reads, input_digests(reads), before)


def test_the_math_task_reads_its_problems_and_its_template(tmp_path):
    own = {"name": "math", "eval_file": "/e.jsonl", "template": f"{tmp_path}/t.txt"}
    files = {key: path for key, path in input_files(config(task=own)).items() if "task" in key}
    assert files == {
        "task.train_file": Path(SHIPPED_PROBLEMS["train_file"]),
        "task.eval_file": Path("/e.jsonl"),
        "task.template": tmp_path / "t.txt",
    }


def test_the_task_of_reasoning_gym_reads_no_file_but_a_template(tmp_path):
    gym = {"name": "reasoning_gym", "dataset": "chain_sum"}
    assert not [key for key in input_files(config(task=gym)) if key.startswith("task.")]
    gym["template"] = f"{tmp_path}/t.txt"
    assert input_files(config(task=gym))["task.template"] == tmp_path / "t.txt"
