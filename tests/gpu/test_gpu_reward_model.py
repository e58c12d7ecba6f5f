"""A reward model gives the same rewards on a GPU as on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hf_models import write_reward_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
PROMPT = "The old fox\n"
RESPONSES = ["", "a", " slept.", " ran home. The fox slept.", " ran"]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_rewards_on_a_gpu_equal_those_of_transformers_on_a_cpu(family: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from grpo_trainable.models.hf.reward_model import RewardModel

    path = write_reward_model(tmp_path / "rm", family)
    model = RewardModel(Path(path))
    model.load()
    assert model._model.device.type == "cuda"
    reference = transformers.AutoModelForSequenceClassification.from_pretrained(
        path, dtype=torch.float32
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    with torch.no_grad():
        expected = [
            reference(
                **tokenizer(f"{PROMPT}{text}<|endoftext|>", return_tensors="pt")
            ).logits.item()
            for text in RESPONSES
        ]
    assert model.scores(PROMPT, RESPONSES) == pytest.approx(expected, abs=1e-4)
