"""launch/align.py with TRL on a tiny model: three stages, an interrupt, and the scores."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import write_hf_model
from safetensors.torch import load_file

from grpo_trainable.models.directory import SHIPPED_POLICY
from grpo_trainable.models.tokenizer import END_OF_TEXT
from grpo_trainable.tools.export import export
from launch import align

pytest.importorskip("trl", reason="needs the extra align")
transformers = pytest.importorskip("transformers")

# The command sets these variables, so they must be restored after a test.
OFFLINE = ("HF_HUB_OFFLINE", "HF_HUB_DISABLE_TELEMETRY", "TENSORBOARD_LOGGING_DIR")
CHAT = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
SHORT = {
    "max_steps": 6,
    "per_device_train_batch_size": 4,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "save_steps": 2,
    "eval_steps": 3,
    "bf16": "false",  # so that scores are exact on a GPU, too
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("align") / "model"
    write_hf_model(directory)
    settings = directory / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "chat_template": CHAT}))
    return directory


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write rows for every stage to a new directory, and make it the current directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["launch/align.py"])
    for name in OFFLINE:
        monkeypatch.setenv(name, "1")  # so that monkeypatch restores the variable after the test
    monkeypatch.setenv("CI", "1")  # otherwise TRL sends usage statistics
    words = ["fox", "story", "word", "old", "home"]
    prompts = [f"Write about the {a} and the {b}:" for a in words for b in words]
    write(tmp_path / "answers.jsonl", [{"prompt": p, "completion": " The fox."} for p in prompts])
    pairs = [{"prompt": p, "chosen": " The old fox.", "rejected": " home home"} for p in prompts]
    write(tmp_path / "pairs.jsonl", pairs)
    whole = [{name: row["prompt"] + row[name] for name in ("chosen", "rejected")} for row in pairs]
    write(tmp_path / "whole.jsonl", whole)
    talks = [
        {name: [{"role": role, "content": row[name].strip()}] for name, role in SPEAKERS.items()}
        for row in pairs
    ]
    write(tmp_path / "talks.jsonl", talks)
    return tmp_path


SPEAKERS = {"prompt": "user", "chosen": "assistant", "rejected": "assistant"}


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def run(stage: str, model: Path, rows: str, out: str, *options: str, **settings: Any) -> int:
    given = [
        word for key, value in {**SHORT, **settings}.items() for word in ("--set", f"{key}={value}")
    ]
    files = ("--model", str(model), "--train-file", rows, "--out", out)
    return align.main([stage, *files, *options, *given])


def result(out: Path) -> dict[str, Any]:
    return json.loads((out / "result.json").read_text())


def logged(out: Path, metric: str) -> list[float]:
    return [row[metric] for row in result(out)["log"] if metric in row]


def test_an_interrupted_run_continues_and_ends_with_the_same_bits(
    model, place, monkeypatch, capsys
):
    from grpo_trainable.tools.alignment import training

    assert run("sft", model, "answers.jsonl", "whole") == 0
    assert "step 6 of 6: held-out loss " in capsys.readouterr().out
    whole = result(place / "whole")
    assert whole["answer"].startswith("The held-out loss fell")
    assert (whole["train_rows"], whole["held_out_rows"]) == (23, 2)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(place / "whole" / "model")
    assert torch.isfinite(loaded(torch.tensor([[1, 2, 3]])).logits).all()
    names = {path.suffix for path in (place / "whole" / "model").iterdir()}
    assert names == {".json", ".safetensors"}  # no chat template, because the rows are texts
    assert list((place / "whole" / "tensorboard").glob("events.*"))
    assert "<script" not in (place / "whole" / "report.html").read_text()

    ended = training.Watch.on_step_end

    def interrupt(self: Any, args: Any, state: Any, control: Any, **others: Any) -> None:
        if state.global_step == 3:
            os.kill(os.getpid(), signal.SIGINT)
        ended(self, args, state, control, **others)

    with monkeypatch.context() as patched:
        patched.setattr(training.Watch, "on_step_end", interrupt)
        assert run("sft", model, "answers.jsonl", "parted") == 130
    assert "interrupted after step 3 of 6" in capsys.readouterr().err
    assert not (place / "parted" / "model").exists()
    # A killed process may leave a checkpoint without its last file.
    (place / "parted" / "checkpoints" / "checkpoint-4").mkdir()
    assert run("sft", model, "answers.jsonl", "parted") == 0
    assert "from checkpoint-3" in capsys.readouterr().out
    one, other = (load_file(place / n / "model" / "model.safetensors") for n in ("whole", "parted"))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert logged(place / "parted", "loss") == logged(place / "whole", "loss")

    before = (place / "parted" / "result.json").read_bytes()
    assert run("sft", model, "answers.jsonl", "parted") == 0
    assert "is already complete" in capsys.readouterr().out
    assert run("sft", model, "answers.jsonl", "parted", max_steps=7) == 2
    assert "--set max_steps was" in capsys.readouterr().err
    assert (place / "parted" / "result.json").read_bytes() == before


def rendered(row: dict[str, Any], response: str) -> str:
    """Return the prompt and one response of a held-out row, as the text that TRL tokenizes."""
    prompt, said = row.get("prompt", ""), row[response]
    if isinstance(said, str):
        return f"{prompt}{said}{END_OF_TEXT}"
    return "".join(f"{message['role']}: {message['content']}\n" for message in prompt + said)


def score(directory: Path, text: str, *, reward: bool) -> float:
    """Return the output of a reward model, or the log-prob of a text under a policy."""
    kind = "SequenceClassification" if reward else "CausalLM"
    model = getattr(transformers, f"AutoModelFor{kind}").from_pretrained(directory)
    ids = transformers.AutoTokenizer.from_pretrained(directory)(text, return_tensors="pt").input_ids
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    if reward:
        return logits.item()
    log_probs = logits[:, :-1].log_softmax(-1)
    return log_probs.gather(-1, ids[:, 1:].unsqueeze(-1)).sum().item()


@pytest.mark.parametrize(
    ("stage", "margin", "rows", "settings"),
    [
        ("reward-model", "eval_margin", "pairs.jsonl", {}),
        (
            "dpo",
            "eval_rewards/margins",
            "talks.jsonl",
            {"beta": 0.2, "precompute_ref_log_probs": "true"},
        ),
        ("dpo", "eval_rewards/margins", "whole.jsonl", {"beta": 0.2}),
    ],
)
def test_margins_of_held_out_pairs_are_those_of_the_written_model(
    stage, margin, rows, settings, model, place, capsys
):
    from grpo_trainable.models.hf.reward_model import RewardModel

    out = place / "out"
    assert run(stage, model, rows, "out", **settings) == 0
    setting = "task.reward=model:" if stage == "reward-model" else "model.path="
    printed = capsys.readouterr().out
    assert f"--set {setting}{out / 'model'}" in printed
    found = result(out)
    assert found["accuracy"]["value"] == 1.0
    assert (found["held_out_accuracy"]["first"] is None) == (stage == "dpo")
    first, *_, last = logged(out, margin)
    assert found["held_out_margin"] == pytest.approx({"first": first, "last": last}, rel=1e-4)
    assert last > 0.1
    if stage == "dpo":  # before training, the policy is the reference
        assert first == pytest.approx(0, abs=1e-5)
    pairs = [json.loads(line) for line in (out / "held_out.jsonl").open()]
    assert len(pairs) == found["held_out_rows"] == 2
    row = pairs[0]["row"]
    reward = stage == "reward-model"
    texts = [rendered(row, response) for response in ("chosen", "rejected")]
    chosen, rejected = (score(out / "model", text, reward=reward) for text in texts)
    expected = chosen - rejected
    if not reward:  # the log-prob of the prompt cancels out
        chosen, rejected = (score(model, text, reward=False) for text in texts)
        expected = 0.2 * (expected - (chosen - rejected))
    assert pairs[0]["margin"] == pytest.approx(expected, abs=1e-4)
    assert (pairs[0]["response"] is not None) == ("prompt" in row and not reward)
    if reward:  # the written model scores the rows as it did in training
        written = RewardModel(out / "model")
        written.load()
        scores = written.scores(row["prompt"], [row["chosen"], row["rejected"]])
        assert scores == pytest.approx(pairs[0]["scores"], abs=1e-4)
    conversations = rows == "talks.jsonl"
    for directory in (out / "model", *(out / "checkpoints").glob("checkpoint-*")):
        assert (directory / "chat_template.jinja").exists() == conversations
        assert "chat_template" not in (directory / "tokenizer_config.json").read_text()
    note = "the rows are texts, so the model is trained and written without its chat template"
    assert (note in printed) == (not conversations)
    assert any(note in problem for problem in found["problems"]) == (not conversations)


def test_the_rows_of_an_exported_policy_end_with_its_end_of_text_token(place):
    export(SHIPPED_POLICY, place / "base")
    assert run("sft", place / "base", "answers.jsonl", "out", max_steps=1) == 0
    rows = [json.loads(line)["row"] for line in (place / "out" / "held_out.jsonl").open()]
    policy = transformers.AutoModelForCausalLM.from_pretrained(place / "base")
    tokenizer = transformers.AutoTokenizer.from_pretrained(place / "base")
    losses = []
    for row in rows:
        prompt, completion = (tokenizer(row[name]).input_ids for name in ("prompt", "completion"))
        ids = torch.tensor([*prompt, *completion, tokenizer.eos_token_id])
        with torch.no_grad():
            log_probs = policy(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
        losses += (-log_probs.gather(-1, ids[1:, None]))[len(prompt) - 1 :].flatten().tolist()
    assert logged(place / "out", "eval_loss")[0] == pytest.approx(sum(losses) / len(losses))
    kept = json.loads((place / "out" / "model" / "tokenizer_config.json").read_text())
    assert kept["split_special_tokens"] is True


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"learning_rat": 1}, "SFTConfig of TRL has no such field; did you mean learning_rate?"),
        ({"loss_type": "nnl"}, "--set loss_type=nnl: invalid choice: 'nnl'"),
        ({"max_length": 65}, "--set max_length=65: the model has a context of 64 tokens"),
        ({"assistant_only_loss": "true"}, "SFTTrainer of TRL: ValueError: You set `assistant"),
        ({"max_length": 2}, "fits into max_length=2"),
    ],
)
def test_a_setting_that_trl_refuses_is_one_line_and_leaves_nothing(
    settings, words, model, place, capsys
):
    assert run("sft", model, "answers.jsonl", "out", **settings) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert words in error
    assert error.startswith("align.py: ")
    assert not (place / "out").exists()


def test_held_out_rows_that_are_also_trained_on_are_counted(model, place, capsys):
    rows = (place / "answers.jsonl").read_text().splitlines(keepends=True)
    (place / "mixed.jsonl").write_text("".join(rows[:2]) + rows[2].replace("Write", "Tell"))
    assert run("sft", model, "answers.jsonl", "out", "--eval-file", "mixed.jsonl", max_steps=1) == 0
    assert "2 of 3 held-out rows are also trained on" in capsys.readouterr().out


def test_a_tracker_that_cannot_start_is_one_line_and_leaves_nothing(
    model, place, monkeypatch, capsys
):
    class NoKey(Exception):
        pass

    def refuse(self: Any, *given: Any, **others: Any) -> None:
        raise NoKey("no API key\nconfigured")

    with monkeypatch.context() as patched:
        patched.setattr("transformers.integrations.WandbCallback.__init__", lambda self: None)
        patched.setattr("transformers.integrations.WandbCallback.on_train_begin", refuse)
        status = run("sft", model, "answers.jsonl", "out", report_to="wandb")
    said = capsys.readouterr()
    assert (status, said.out) == (2, "")
    assert said.err.splitlines()[-1] == (
        "align.py: the training cannot start: NoKey: no API key configured"
    )
    assert not (place / "out").exists()
    assert run("sft", model, "answers.jsonl", "out", max_steps=1) == 0


def test_a_loss_that_is_not_a_number_ends_the_training(model, place, capsys):
    assert run("sft", model, "answers.jsonl", "out", learning_rate=1e30) == 1
    assert "is not a number at step" in capsys.readouterr().err
    assert not (place / "out" / "model").exists()
