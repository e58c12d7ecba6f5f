"""Test reward models.

Rewards equal those of transformers in any batch, and no reward is lost if a reward process is
killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hf_models import write_hf_model, write_reward_model
from test_reward_forms import TRL, config_of, train_two_rounds

from grpo_trainable.command_line import UsageError
from grpo_trainable.config import GRPOConfig
from grpo_trainable.generator.score_worker import answers, reward_function
from grpo_trainable.generator.scorer import ProcessScorer, check_reward
from grpo_trainable.models.hf.files import reward_model_files
from grpo_trainable.tasks import Example, Score, ScoreRequest
from grpo_trainable.tasks.reward_function import Responses
from tuning.memory import need_of
from tuning.model_dimensions import stored_parameters

transformers = pytest.importorskip("transformers")
reward_model = pytest.importorskip("grpo_trainable.models.hf.reward_model")

TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
PROMPT = "The old fox\n"
RESPONSES = ["", "a", " slept.", " ran home. The fox slept.", " ran"]
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "The fox?"}]


def loaded(path: str) -> Any:
    model = reward_model.RewardModel(Path(path))
    model.load()
    return model


@torch.no_grad()
def of_transformers(path: str, texts: Sequence[str]) -> list[float]:
    """Return the rewards that transformers computes for each text alone."""
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        path, dtype=torch.float32
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    inputs = (tokenizer(text, return_tensors="pt") for text in texts)
    return [model.eval()(**own).logits.item() for own in inputs]


def completed(*responses: str) -> list[str]:
    return [f"{PROMPT}{response}<|endoftext|>" for response in responses]


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_reward_model(tmp_path_factory.mktemp(request.param) / "rm", request.param)


@pytest.fixture(scope="module")
def one_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_reward_model(tmp_path_factory.mktemp("one") / "rm")


@pytest.fixture(scope="module")
def chat_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_reward_model(tmp_path_factory.mktemp("chat") / "rm", template=TEMPLATE)


# ---- Scores ------------------------------------------------------------------------------------


@pytest.mark.numerics
def test_scores_are_those_of_transformers_in_every_batch(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = of_transformers(path, completed(*RESPONSES))
    assert max(expected) - min(expected) > 1e-2
    model = loaded(path)
    assert model.scores(PROMPT, RESPONSES) == pytest.approx(expected, abs=1e-5)
    backwards = model.scores(PROMPT, RESPONSES[::-1])
    assert backwards[::-1] == pytest.approx(expected, abs=1e-5)
    for response, reward in zip(RESPONSES, expected, strict=True):
        assert model.scores(PROMPT, [response]) == pytest.approx([reward], abs=1e-5)
        assert model.scores(PROMPT, [response] * 3) == pytest.approx([reward] * 3, abs=1e-5)
    monkeypatch.setattr(reward_model, "BATCH_TOKENS", 40)  # a forward pass has one to four rows
    assert model.scores(PROMPT, RESPONSES) == pytest.approx(expected, abs=1e-5)


@pytest.mark.numerics
def test_a_model_without_a_padding_token_scores_one_row_at_a_time(tmp_path: Path) -> None:
    path = write_reward_model(tmp_path, pad_token_id=None)
    expected = of_transformers(path, completed(*RESPONSES))
    assert loaded(path).scores(PROMPT, RESPONSES) == pytest.approx(expected, abs=1e-5)


@pytest.mark.numerics
def test_a_bfloat16_checkpoint_is_scored_in_float32(one_path: str, tmp_path: Path) -> None:
    model = transformers.AutoModelForSequenceClassification.from_pretrained(one_path)
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    transformers.AutoTokenizer.from_pretrained(one_path).save_pretrained(tmp_path)
    expected = of_transformers(str(tmp_path), completed(*RESPONSES))
    assert loaded(str(tmp_path)).scores(PROMPT, RESPONSES) == pytest.approx(expected, abs=1e-5)


@pytest.mark.numerics
def test_a_chat_template_renders_prompt_and_response(chat_path: str) -> None:
    model = loaded(chat_path)
    assert model.has_chat_template
    start = "system: Be brief.\nuser: The fox?\nassistant: "
    expected = of_transformers(chat_path, [f"{start}{response}\n" for response in RESPONSES])
    assert model.scores(MESSAGES, RESPONSES) == pytest.approx(expected, abs=1e-5)


def test_a_row_longer_than_the_context_has_no_reward(one_path: str) -> None:
    with pytest.raises(ValueError, match="tokens, but the reward model has a context of 64"):
        loaded(one_path).scores(PROMPT, ["a", "fox " * 200])


# ---- Directories that hold no reward model -------------------------------------------------------


def without(path: Path, *names: str) -> str:
    for name in names:
        (path / name).unlink()
    return str(path)


def with_json(path: Path, name: str, **changed: Any) -> str:
    file = path / name
    content = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**content, **changed}))
    return str(path)


def with_labels(path: Path, count: int) -> str:
    labels = [f"LABEL_{i}" for i in range(count)]
    numbers = {label: i for i, label in enumerate(labels)}
    return with_json(path, "config.json", id2label=dict(enumerate(labels)), label2id=numbers)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: str(path / "away"), "no such directory"),
        (lambda path: write_hf_model(path), "the weights lack score.weight, the head of a"),
        (lambda path: write_reward_model(path, num_labels=2), "the classifier has 2 labels"),
        (
            lambda path: with_labels(Path(write_reward_model(path)), 3),
            "the classifier has 3 labels",
        ),
        (
            lambda path: with_labels(Path(write_reward_model(path, num_labels=2)), 1),
            r"score.weight has the shape (2, 32), but config.json requires (1, 32)",
        ),
        (
            lambda path: without(
                Path(write_reward_model(path)), "tokenizer.json", "tokenizer_config.json"
            ),
            "has no tokenizer",
        ),
        (
            lambda path: without(Path(write_reward_model(path)), "model.safetensors"),
            "no model.safetensors here",
        ),
        (lambda path: without(Path(write_reward_model(path)), "config.json"), "cannot be read"),
        (
            lambda path: with_json(Path(write_reward_model(path)), "adapter_config.json"),
            "holds both a model and adapter_config.json",
        ),
        (
            lambda path: with_json(
                Path(write_reward_model(path)), "config.json", quantization_config={}
            ),
            "the weights are quantized",
        ),
    ],
)
def test_a_directory_without_a_reward_model_is_refused_in_one_line(
    make: Any, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=f"^task.reward=model:{tmp_path}") as error:
        reward_function(f"model:{make(tmp_path)}", None)
    assert reason in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("takes_messages", [False, True])
def test_a_check_refuses_messages_for_a_model_without_a_template(
    monkeypatch: pytest.MonkeyPatch, takes_messages: bool
) -> None:
    ready = {"columns": [], "parts": [], "takes_messages": takes_messages}
    worker = SimpleNamespace(wait_until_ready=lambda: ready, kill=lambda: None)
    fake = "grpo_trainable.generator.scorer._worker"
    monkeypatch.setattr(fake, lambda *args, **options: worker)
    refused = pytest.raises(ValueError, match=r"^task\.reward=model:/rm: .* has no chat template$")
    with contextlib.nullcontext() if takes_messages else refused:
        check_reward("model:/rm", examples=[Example(PROMPT, None), Example(MESSAGES, None)])


def test_files_of_a_reward_model_leave_out_pickles(tmp_path: Path) -> None:
    write_reward_model(tmp_path, template=TEMPLATE)
    (tmp_path / "training_args.bin").touch()
    assert sorted(reward_model_files(tmp_path)) == [
        "chat_template.jinja",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_every_reward_process_needs_memory_for_the_model(one_path: str, tmp_path: Path) -> None:
    def config(directory: str) -> GRPOConfig:
        task, resources = {"reward": f"model:{directory}"}, {"reward_workers": 3}
        return GRPOConfig.from_dict({"task": task, "resources": resources})

    found = need_of(config(one_path)).estimate
    assert found is not None
    (part,) = (part for part in found.parts if part.what == "reward models")
    assert part.bytes == 3 * 4 * stored_parameters(Path(one_path))
    with pytest.raises(UsageError, match=f"^task.reward=model:{tmp_path}/no: no such directory$"):
        need_of(config(f"{tmp_path}/no"))


# ---- Processes ---------------------------------------------------------------------------------


def test_a_process_that_is_killed_in_mid_batch_loses_nothing(chat_path: str) -> None:
    model = loaded(chat_path)
    expected = model.scores([{"role": "user", "content": PROMPT.strip()}], RESPONSES) * 3
    asked = [
        ScoreRequest(text, None, example=example, prompt=PROMPT)
        for example in range(3)
        for text in RESPONSES
    ]
    scorer = ProcessScorer(
        f"model:{chat_path}", deadline_s=60, environment={"OMP_NUM_THREADS": "1"}
    )
    with contextlib.closing(scorer):
        (worker,) = scorer._processes  # no spare worker holds the model a second time
        pid = worker._process.pid
        os.kill(pid, signal.SIGSTOP)  # the batch stays under way until the process is killed
        answers: list[Any] = []
        thread = threading.Thread(target=lambda: answers.extend(scorer.score(asked)))
        thread.start()
        time.sleep(0.5)
        os.kill(pid, signal.SIGKILL)
        thread.join(120)
        (replacement,) = scorer._processes
        assert replacement._process.pid != pid
    assert all(isinstance(answer, Score) for answer in answers), answers
    assert [answer.reward for answer in answers] == pytest.approx(expected, abs=1e-5)


def test_a_model_and_a_function_are_parts_of_a_list(one_path: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def length(response, truth):\n    return float(len(response))\n")
    reward = reward_function(json.dumps([f"model:{one_path}", f"{file}:length"]), None)
    reward.start()
    found = answers(reward, Responses(texts=RESPONSES, ground_truth=None, prompt=PROMPT))
    for answer, score, text in zip(
        found, loaded(one_path).scores(PROMPT, RESPONSES), RESPONSES, strict=True
    ):
        assert isinstance(answer, Score)
        assert answer.parts == pytest.approx({"rm": score, "length": len(text)}, abs=1e-5)
        assert answer.reward == pytest.approx(score + len(text), abs=1e-5)


# ---- Trials ------------------------------------------------------------------------------------


def test_a_trial_trains_two_rounds_on_the_scores_of_a_model(begun: Any, tmp_path: Path) -> None:
    path = write_reward_model(tmp_path / "rm", max_position_embeddings=256)
    model = loaded(path)

    def expected(text: str, tokens: int, row: dict[str, Any]) -> float:
        return model.scores(row["prompt"], [text])[0]

    config = config_of(f"model:{path}", TRL, tmp_path)
    train_two_rounds(begun(config), TRL, expected, atol=1e-5)
