"""TRL's side of `peers.py`: python benchmarks/peers_trl.py JOB CONTEST THREADS, in an environment
with trl. It is set for speed: no gradient checkpointing, one generate call for all rows of a step,
SDPA, float32, nothing logged, nothing saved.

Takes a turn for every line that it reads, and says how long it took as a line of JSON.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peers_reward import score
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, TrainerCallback

LOADED = {"dtype": "float32", "attn_implementation": "sdpa"}
FOREVER = 10**6  # steps; the other side ends the race


def main() -> None:
    path, contest, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    job = json.loads(Path(path).read_text())
    if contest == "generation":
        sample(job)
    else:
        train(job, contest)


def answer(seconds: float) -> None:
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
    print(json.dumps({"seconds": seconds, "peak_resident_mb": memory}), flush=True)


# ---- transformers.generate -------------------------------------------------------------------


def sample(job: dict[str, Any]) -> None:
    """All rows in one call, as GRPOTrainer makes it."""
    tokenizer = AutoTokenizer.from_pretrained(job["model"], local_files_only=True)
    tokenizer.padding_side = "left"
    model = AutoModelForCausalLM.from_pretrained(job["model"], local_files_only=True, **LOADED)
    model.eval()
    rows = [prompt for prompt in job["prompts"] for _ in range(job["group_size"])]
    settings = GenerationConfig(
        do_sample=True,
        temperature=job["temperature"],
        top_k=0,
        top_p=1.0,
        min_new_tokens=job["max_new_tokens"],
        max_new_tokens=job["max_new_tokens"],
        pad_token_id=tokenizer.pad_token_id or 0,
        eos_token_id=tokenizer.eos_token_id,
    )
    for _ in sys.stdin:
        began = time.perf_counter()
        encoded = tokenizer(rows, return_tensors="pt", padding=True)
        encoded.pop("token_type_ids", None)
        with torch.no_grad():
            out = model.generate(**encoded, generation_config=settings)
        assert out.shape[1] - encoded["input_ids"].shape[1] == job["max_new_tokens"]
        answer(time.perf_counter() - began)


# ---- GRPOTrainer -----------------------------------------------------------------------------


class Turns(TrainerCallback):
    """Waits for its turn before the first gradient step of a batch, and answers after the last."""

    def __init__(self, steps: int) -> None:
        self._steps = steps  # gradient steps of a turn
        self._began = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self._steps == 0:
            if not sys.stdin.readline():
                sys.exit(0)
            self._began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self._steps == 0:
            answer(time.perf_counter() - self._began)


def train(job: dict[str, Any], contest: str) -> None:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    rows = len(job["prompts"]) * job["group_size"]
    gradient_steps = 4 if contest == "k4" else 1
    tokenizer = AutoTokenizer.from_pretrained(job["model"], local_files_only=True)
    arguments = GRPOConfig(
        output_dir=job["out"],
        use_cpu=True,
        seed=job["seed"],
        model_init_kwargs=LOADED,
        bf16=False,
        gradient_checkpointing=False,
        max_steps=FOREVER,
        per_device_train_batch_size=job["microbatch"],
        gradient_accumulation_steps=rows // job["microbatch"],
        num_generations=job["group_size"],
        num_iterations=gradient_steps,
        shuffle_dataset=False,
        max_completion_length=job["max_new_tokens"],
        temperature=job["temperature"],
        generation_kwargs={"min_new_tokens": job["max_new_tokens"]},
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        beta=0.04 if contest == "kl" else 0.0,
        epsilon=0.2,
        loss_type="grpo",
        scale_rewards="group",
        logging_steps=FOREVER,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=job["model"],
        args=arguments,
        reward_funcs=reward,
        processing_class=tokenizer,
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in job["prompts"]]),
        callbacks=[Turns(gradient_steps)],
    )
    trainer.train()


def reward(completions: Sequence[str], **_: Any) -> list[float]:
    return [score(completion, None) for completion in completions]


if __name__ == "__main__":
    main()
