"""Our side of `peers.py`: python benchmarks/peers_ours.py JOB CONTEST THREADS.

Takes a turn for every line that it reads, and says how long it took as a line of JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import measure


def main() -> None:
    path, contest, threads = sys.argv[1:]
    job = json.loads(Path(path).read_text())
    turn = {"generation": sampling}.get(contest, steps)(job, contest, float(threads))
    for _ in sys.stdin:
        began = time.perf_counter()
        turn()
        seconds = time.perf_counter() - began
        memory = measure.resident_mb()["peak_resident_mb"]
        print(json.dumps({"seconds": seconds, "peak_resident_mb": memory}), flush=True)


def config_of(job: dict[str, Any], contest: str, threads: float) -> Any:
    from grpo_trainable.config import GRPOConfig

    reward = Path(__file__).with_name("peers_reward.py")
    return GRPOConfig.from_dict(
        {
            "seed": job["seed"],
            "k": 4 if contest == "k4" else 1,
            **({"k_mode": "same_batch"} if contest == "k4" else {}),
            "model": {"preset": measure.PRESET, "packing": True},
            "task": {"reward": f"{reward}:score"},
            "rollout": {
                "prompts": len(job["prompts"]),
                "group_size": job["group_size"],
                "min_new_tokens": job["max_new_tokens"],
                "max_new_tokens": job["max_new_tokens"],
                "temperature": job["temperature"],
            },
            "optim": {"microbatch": job["microbatch"], "lr": 1e-6},
            "loss": {"kl_monitor": False, "kl_coef": 0.04 if contest == "kl" else 0.0},
            "resources": {"generator_cpus": threads, "worker_cpus": threads},
        }
    )


def requests_of(job: dict[str, Any], config: Any) -> list[Any]:
    """The job's prompts, each of them in this program's own words for a request."""
    from grpo_trainable.models.directory import policy_tokenizer
    from grpo_trainable.prompts import Prompts, build_task

    task = build_task(config)
    prompts = Prompts(config, task, policy_tokenizer(config.model))
    requests = [prompts.request("train", index) for index in range(len(job["prompts"]))]
    said = [str(task.train_example(index).prompt) for index in range(len(requests))]
    assert said == job["prompts"], "the peer was told other prompts"
    return requests


def steps(job: dict[str, Any], contest: str, threads: float) -> Callable[[], None]:
    """A round of one colocated worker: publish, load, sample, score, and k gradient steps."""
    from dataclasses import replace

    from grpo_trainable.actors.colocated import Colocated
    from grpo_trainable.transports.in_process import InProcess

    config = config_of(job, contest, threads)
    worker = Colocated(config, InProcess())
    first = requests_of(job, config)
    rounds = count()

    def turn() -> None:
        worker.load(worker.publish().handle)
        # Other indices have other draws, for the same prompts.
        ahead = next(rounds) * len(first)
        requests = [replace(own, prompt_index=own.prompt_index + ahead) for own in first]
        groups = worker.score(worker.generate(requests)).groups  # type: ignore[arg-type]
        updated = worker.update([groups])
        assert len(updated.steps) == (4 if contest == "k4" else 1)
        assert sum(group.num_tokens for group in groups) == measure.RESPONSES * measure.NEW_TOKENS

    return turn


def sampling(job: dict[str, Any], contest: str, threads: float) -> Callable[[], None]:
    import torch

    from grpo_trainable.actors.process import keep_freed_memory
    from grpo_trainable.engines.torch_engine import TorchEngine
    from grpo_trainable.models.directory import read_tokenizer
    from grpo_trainable.models.model_config import PRESETS
    from grpo_trainable.models.transformer import TransformerLM

    torch.set_num_threads(int(threads))
    keep_freed_memory()
    model = TransformerLM(PRESETS[measure.PRESET], job["seed"])
    engine = TorchEngine(model, read_tokenizer(None), seed=job["seed"])
    requests = requests_of(job, config_of(job, contest, threads))

    def turn() -> None:
        engine.generate(requests, lambda: None)

    return turn


if __name__ == "__main__":
    main()
