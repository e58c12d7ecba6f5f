"""A trained Hugging Face model, with and without adapters, evaluated in three ways.

The checkpoint, the exported model and transformers' `generate` answer the held-out prompts as the
trial did.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import parts
from conftest import fit, rows, trial_config
from hf_models import write_hf_model
from ray import tune

from callbacks import grpo_callbacks
from grpo_trainable.models.directory import read_tokenizer
from grpo_trainable.trainable import DetailedGRPO
from launch import evaluate, export
from reports.evaluations.files import read_evaluation

transformers = pytest.importorskip("transformers")
pytest.importorskip("peft")

NEW_TOKENS, PROMPTS = 16, 12
SETTINGS: dict[str, dict[str, Any]] = {
    "whole": {},
    "adapters": {"lora_rank": 4, "gradient_checkpointing": True},
}
REWARD = "def score(response, truth):\n    return response.count('e') - len(response) / 9\n"


@pytest.fixture(scope="module")
def reward(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("reward") / "letters.py"
    file.write_text(REWARD)
    return f"{file}:score"


@pytest.fixture(scope="module")
def trials(
    ray_session: None, reward: str, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Run a trial of three rounds, evaluated greedily at the end, for each of `SETTINGS`.

    Return the directories of the trials.
    """
    storage = tmp_path_factory.mktemp("storage")
    model = write_hf_model(storage / "model", "qwen2", tied=True, max_position_embeddings=96)
    config = trial_config(
        rounds=3,
        rollout={"max_new_tokens": NEW_TOKENS},
        eval={"prompts": PROMPTS, "samples": 1, "temperature": 0.0},
        optim={"lr": 5e-2, "schedule": "constant"},
        task={"reward": reward},
    )
    models = [{"path": model, **settings} for settings in SETTINGS.values()]
    grid = fit(
        {**config, "model": tune.grid_search(models)},
        storage,
        DetailedGRPO,
        one_by_one=True,
        callbacks=grpo_callbacks(console=False),
    )
    assert [str(error) for error in grid.errors] == []
    return {
        "adapters" if "lora_rank" in result.config["model"] else "whole": Path(result.path)
        for result in grid
    }


def own_responses(trial: Path, round_: int = 3) -> list[tuple[int, str]]:
    """Return the prompts and responses of the trial's own evaluation after `round_`."""
    entries = parts(trial, "evaluations")
    return [(row["cursor"], row["response"]) for row in entries if row["round"] == round_]


def evaluated(path: Path) -> tuple[list[tuple[int, str]], float]:
    """Return the responses and the mean reward of an evaluation."""
    data = json.loads((path / "evaluation.json").read_text())
    responses = [(own.prompt_index, own.response) for own in read_evaluation(path).generations]
    return responses, data["figures"]["reward"]["value"]


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize("settings", SETTINGS)
def test_checkpoint_export_and_transformers_answer_as_the_trial_did(
    trials: dict[str, Path], reward: str, tmp_path: Path, settings: str
) -> None:
    trial = trials[settings]
    trained = own_responses(trial)
    assert len(trained) == PROMPTS
    assert trained != own_responses(trial, 0)  # training changed the responses

    scored = ("--set", f"task.reward={reward}")
    assert evaluate.main(["--checkpoint", str(trial), *scored, "--out", "of_trial"]) == 0
    # The trial computes its mean from float32 rewards.
    own_figure = pytest.approx(rows(trial)[-1]["reward/eval_mean"], rel=1e-6)
    assert evaluated(tmp_path / "of_trial") == (trained, own_figure)

    assert export.main([str(trial), "exported"]) == 0
    status = evaluate.main(
        [
            *("--model", "exported", "--prompts", str(PROMPTS), "--samples", "1"),
            *("--temperature", "0", "--out", "of_export"),
            *("--set", f"rollout.max_new_tokens={NEW_TOKENS}", *scored),
        ]
    )
    assert status == 0
    assert_all_but_one_equal(evaluated(tmp_path / "of_export")[0], trained)
    found = by_transformers(tmp_path / "exported", tmp_path / "of_trial")
    assert_all_but_one_equal(found, trained)


def assert_all_but_one_equal(found: list[Any], expected: list[Any]) -> None:
    """Check that at most one item differs, because rounding may decide between two tokens."""
    assert sum(one != other for one, other in zip(found, expected, strict=True)) <= 1


@torch.no_grad()
def by_transformers(model: Path, evaluation: Path) -> list[tuple[int, str]]:
    """Return the greedy responses of `generate` to an evaluation's prompts, run one by one."""
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(model)
    tokenizer = read_tokenizer(str(model))
    found = []
    for own in read_evaluation(evaluation).generations:
        ids = torch.tensor([tokenizer.encode_prompt(own.prompt)])
        new = loaded.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
        )[0, ids.shape[1] :]
        found.append((own.prompt_index, tokenizer.decode(new.tolist())))
    return found
