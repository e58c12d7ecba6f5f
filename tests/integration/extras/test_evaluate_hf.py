"""A trained Hugging Face model, with and without adapters: its checkpoint, its export and
transformers itself answer the held-out prompts as the trial did."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from hf_models import write_hf_model
from test_evaluate import run

from grpo_trainable.models.directory import read_tokenizer
from reports.evaluations.files import read_evaluation

transformers = pytest.importorskip("transformers")
pytest.importorskip("peft")

NEW_TOKENS, PROMPTS = 16, 12
SETTINGS: dict[str, list[str]] = {
    "whole": [],
    "adapters": ["model.lora_rank=4", "model.gradient_checkpointing=true"],
}
REWARD = "def score(response, truth):\n    return response.count('e') - len(response) / 9\n"


@pytest.fixture(scope="module", params=list(SETTINGS))
def trial(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trial that really ran; it was evaluated greedily after its third and last round."""
    storage = tmp_path_factory.mktemp("storage")
    model = write_hf_model(storage / "model", "qwen2", tied=True, max_position_embeddings=96)
    (storage / "letters.py").write_text(REWARD)
    settings = [
        *(f"model.path={model}", f"task.reward={storage}/letters.py:score", "arm=sync"),
        *("rollout.prompts=4", "rollout.group_size=4", f"rollout.max_new_tokens={NEW_TOKENS}"),
        *(f"eval.prompts={PROMPTS}", "eval.samples=1", "eval.temperature=0", "eval.every=3"),
        *("optim.lr=1e-2", *SETTINGS[request.param]),
    ]
    done = run(
        "tune.py",
        *("--space", "async_vs_sync", "--name", "short", "--iterations", "3"),
        *("--storage", str(storage)),
        *(word for setting in settings for word in ("--set", setting)),
        cwd=storage,
    )
    assert done.returncode == 0, done.stderr
    (directory,) = (path.parent for path in (storage / "short").glob("*/result.json"))
    return directory


def last_row(trial: Path) -> dict[str, Any]:
    return json.loads((trial / "result.json").read_text().splitlines()[-1])


def own_responses(trial: Path, round_: int = 3) -> list[tuple[int, str]]:
    """What the trial itself sampled in its evaluation after `round_`."""
    parts = (trial / "evaluations").glob("part-*.parquet")
    rows = [row for part in sorted(parts) for row in pq.read_table(part).to_pylist()]
    return [(row["cursor"], row["response"]) for row in rows if row["round"] == round_]


def evaluated(path: Path) -> tuple[list[tuple[int, str]], float]:
    """The responses of an evaluation, and its reward."""
    data = json.loads((path / "evaluation.json").read_text())
    responses = [(own.prompt_index, own.response) for own in read_evaluation(path).generations]
    return responses, data["figures"]["reward"]["value"]


def test_checkpoint_export_and_transformers_answer_as_the_trial_did(trial, tmp_path):
    trained = own_responses(trial)
    assert len(trained) == PROMPTS
    assert trained != own_responses(trial, 0)  # training changed what it says

    reward = ("--set", f"task.reward={trial.parents[1]}/letters.py:score")
    of_trial = ("--checkpoint", str(trial), *reward, "--out", "of_trial")
    done = run("evaluate.py", *of_trial, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    own_figure = pytest.approx(last_row(trial)["reward/eval_mean"], rel=1e-6)  # of float32 rewards
    assert evaluated(tmp_path / "of_trial") == (trained, own_figure)

    done = run("export.py", str(trial), "exported", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    done = run(
        "evaluate.py",
        *("--model", "exported", "--prompts", str(PROMPTS), "--samples", "1"),
        *("--temperature", "0", "--out", "of_export"),
        *("--set", f"rollout.max_new_tokens={NEW_TOKENS}", *reward),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert evaluated(tmp_path / "of_export") == (trained, own_figure)

    assert by_transformers(tmp_path / "exported", tmp_path / "of_trial") == trained


@torch.no_grad()
def by_transformers(model: Path, evaluation: Path) -> list[tuple[int, str]]:
    """What `generate` says to the prompts of an evaluation, greedily and one by one."""
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
