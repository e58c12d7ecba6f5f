"""Trains by TRL's GRPOTrainer what `real_model.py` trains here, as the JSON file JOB says.

python benchmarks/trl_peer.py JOB, in an environment with trl. The prompts come in the order of the
job, and the trainer's own tokenizer must make the same ids of them. Weights are float32 and, where
the CPU has instructions for bfloat16, computed under its autocast, which is what TRL has in place
of a bfloat16 body with float32 master weights.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from grade_school import GradeSchool
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer


class Timed(GRPOTrainer):
    """Notes how long sampling and rewards take; the rest of a step is the gradient step's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seconds = {"rollout": 0.0, "reward": 0.0}

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        return self._timed("rollout", super()._generate, *args, **kwargs)

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
        return self._timed("reward", super()._calculate_rewards, *args, **kwargs)

    def _timed(self, stage: str, work: Any, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return work(*args, **kwargs)
        finally:
            self.seconds[stage] += time.perf_counter() - began


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(job["threads"])
    tokenizer = AutoTokenizer.from_pretrained(job["model"], local_files_only=True)
    refuse_other_ids(tokenizer, job["prompts"])
    trainer = Timed(
        model=job["model"],
        args=arguments(job),
        reward_funcs=reward,
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(
            [{"prompt": own["messages"], "truth": own["truth"]} for own in job["prompts"]]
        ),
    )
    began = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - began
    trainer.model.to(torch.bfloat16).save_pretrained(job["out"])
    tokenizer.save_pretrained(job["out"])
    stages = {**trainer.seconds, "optimize": seconds - sum(trainer.seconds.values())}
    Path(job["report"]).write_text(
        json.dumps(
            {
                "wall_clock_s": seconds,
                "stages_s": stages,
                "rewards": [row["reward"] for row in trainer.state.log_history if "reward" in row],
                "response_tokens": sum(
                    row["completions/mean_length"] * job["prompts_a_round"] * job["group_size"]
                    for row in trainer.state.log_history
                    if "completions/mean_length" in row
                ),
                "packages": {
                    name: importlib.metadata.version(name)
                    for name in ("trl", "transformers", "accelerate", "torch")
                },
            }
        )
    )


def refuse_other_ids(tokenizer: Any, prompts: Sequence[dict[str, Any]]) -> None:
    for own in prompts:
        ids = tokenizer.apply_chat_template(
            own["messages"], add_generation_prompt=True, tokenize=True, return_dict=True
        )["input_ids"]
        if ids != own["ids"]:
            sys.exit(f"other ids for {own['messages'][-1]['content']!r}: {ids}, not {own['ids']}")


def arguments(job: dict[str, Any]) -> GRPOConfig:
    rows, microbatch = job["prompts_a_round"] * job["group_size"], job["microbatch"]
    return GRPOConfig(
        output_dir=job["out"],
        use_cpu=True,
        seed=job["seed"],
        model_init_kwargs={"dtype": "float32"},
        bf16=job["bf16"],
        gradient_checkpointing=True,
        max_steps=job["rounds"],
        per_device_train_batch_size=microbatch,
        gradient_accumulation_steps=rows // microbatch,
        num_generations=job["group_size"],
        shuffle_dataset=False,
        max_completion_length=job["max_new_tokens"],
        temperature=job["temperature"],
        learning_rate=job["lr"],
        lr_scheduler_type="constant",
        adam_beta1=job["betas"][0],
        adam_beta2=job["betas"][1],
        weight_decay=0.0,
        max_grad_norm=1.0,
        beta=0.0,
        epsilon=0.2,
        loss_type="grpo",
        scale_rewards="group",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def reward(completions: Sequence[Any], truth: Sequence[int], **_: Any) -> list[float]:
    task = GradeSchool(seed=0)
    return [
        task.reward(completion[0]["content"], own).reward
        for completion, own in zip(completions, truth, strict=True)
    ]


if __name__ == "__main__":
    main()
