"""How fast several learners take a gradient step, and what each of them holds: replicated, divided
(FSDP2), by torch's DistributedDataParallel, and by DeepSpeed's ZeRO where that is installed, beside
one learner. One thread each."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import learners_deepspeed
import measure
from measure import ROOT

from grpo_trainable.command_line import number
from grpo_trainable.threads import WAITING

MICROBATCH = 16
STRATEGIES = ("replicated", "ddp", "fsdp2", *learners_deepspeed.STAGES)
DEADLINE_S = 600.0


def config_of(args: argparse.Namespace) -> Any:
    from grpo_trainable.config import GRPOConfig

    return GRPOConfig.from_dict(
        {
            "seed": args.seed,
            "placement": "disaggregated",
            "model": {"preset": args.preset},
            "rollout": {
                "prompts": measure.PROMPTS,
                "group_size": measure.GROUP_SIZE,
                "max_new_tokens": measure.NEW_TOKENS,
            },
            "optim": {"microbatch": MICROBATCH, "lr": 1e-6},
            "loss": {"kl_monitor": False},
        }
    )


def groups_of(args: argparse.Namespace) -> list[Any]:
    """Random tokens, as long as in the other benchmarks."""
    import torch

    from grpo_trainable.models.model_config import PRESETS
    from grpo_trainable.rollout import RolloutGroup

    draws = torch.Generator().manual_seed(args.seed)
    vocab, shape = PRESETS[args.preset].vocab_size, (measure.GROUP_SIZE, measure.NEW_TOKENS)
    zeros = torch.zeros(shape, dtype=torch.int32)
    return [
        RolloutGroup(
            prompt_index=index,
            prompt_ids=torch.randint(2, vocab, (length,), generator=draws),
            response_ids=torch.randint(2, vocab, shape, generator=draws),
            response_mask=torch.ones(shape, dtype=torch.bool),
            behaviour_log_probs=torch.full(shape, -float(torch.tensor(vocab).log())),
            rewards=torch.rand(measure.GROUP_SIZE, generator=draws),
            finished=torch.ones(measure.GROUP_SIZE, dtype=torch.bool),
            token_versions=zeros,
            token_rounds=zeros,
            uses=1,
        )
        for index, length in enumerate(measure.prompt_lengths(args.seed))
    ]


# ---- In the process of a rank ----------------------------------------------------------------


def ddp_learner(config: Any, group: Any) -> Any:
    """A learner whose gradients torch's DistributedDataParallel sums, while the last microbatch is
    still running backward."""
    import torch
    from torch import Tensor, nn

    from grpo_trainable.actors.learner import Learner
    from grpo_trainable.actors.minibatches import microbatches
    from grpo_trainable.actors.ranks import Replicas
    from grpo_trainable.models.scoring import response_states
    from grpo_trainable.transports.in_process import InProcess

    class Summed(Replicas):
        def sum_gradients(self, parameters: Any) -> None:
            for parameter in parameters:
                parameter.grad.mul_(self.size)  # DDP averages

    class Scoring(nn.Module):
        """DDP listens to a module's `forward` alone."""

        def __init__(self, learner: Any) -> None:
            super().__init__()
            self.policy = learner.policy
            self.learner = (learner,)

        def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
            states = response_states(self.policy, batch.input_ids, batch.response_mask)
            return self.learner[0]._log_probs.of_states(self.policy, states, batch)

    assert torch.distributed.is_initialized()
    ranks = Summed(group)
    learner = Learner(config, None if group.rank else InProcess(), ranks=ranks)
    ddp = nn.parallel.DistributedDataParallel(Scoring(learner))
    steps: Any = learner._steps
    own_take, left = steps.take, 0

    def take(scored: Any) -> Any:
        nonlocal left
        left = len(list(microbatches(scored.batch, config, ranks)))
        return own_take(scored)

    def forward(batch: Any) -> Any:
        nonlocal left
        left -= 1
        ddp.require_backward_grad_sync = left == 0
        return *ddp(batch), None

    steps.take, steps.forward = take, forward
    return learner


def learner_of(strategy: str, config: Any, group: Any) -> Any:
    from grpo_trainable.actors.learner import Learner
    from grpo_trainable.actors.ranks import Replicas
    from grpo_trainable.transports.in_process import InProcess

    if strategy == "ddp":
        return ddp_learner(config, group)
    if strategy in learners_deepspeed.STAGES:
        stage = learners_deepspeed.STAGES[strategy]
        return learners_deepspeed.learner_over_deepspeed(config, group, stage)
    ranks: Any = Replicas(group)
    if strategy == "fsdp2":
        from grpo_trainable.actors.shards import Shards

        ranks = Shards(group)
    return Learner(config, None if group.rank else InProcess(), ranks=ranks)


def private_mb() -> float:
    """Memory that this process alone has written, in units of 10⁶ bytes."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("Private_Dirty"))
    return int(line.split()[1]) * 1024 / 1e6


def held_mb(learner: Any) -> float:
    """Parameters and moments of this process."""
    parameters = map(learners_deepspeed.held, learner.policy.parameters())
    tensors = [*parameters, *learner.optimizer.tensors().values()]
    local = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]
    # Flat parameters are memory that others may be views of.
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in local}
    return sum(storage.nbytes() for storage in storages.values()) / 1e6


def in_rank(args: argparse.Namespace) -> dict[str, Any]:
    import torch

    from grpo_trainable.actors.process_group import ProcessGroup

    group = ProcessGroup(torch.device("cpu"), DEADLINE_S)
    group.join(args.rank, args.size, ("127.0.0.1", args.port))
    learner, groups = learner_of(args.inside, config_of(args), group), groups_of(args)
    seconds, cpu = [], []
    for repeat in range(3 + args.repeats):
        torch.distributed.barrier()
        wall, used = time.perf_counter(), time.process_time()
        (step,) = learner.update([groups]).steps
        assert not step.skipped
        if repeat >= 3:
            seconds.append(time.perf_counter() - wall)
            cpu.append(time.process_time() - used)
    start = time.perf_counter()
    stage = learners_deepspeed.STAGES.get(args.inside, 0)
    with learners_deepspeed.gathered(learner.policy.parameters(), stage):
        learner.publish()
    found = {
        "seconds": seconds,
        "cpu_seconds_median": statistics.median(cpu),
        "publish_s": time.perf_counter() - start,
        "held_mb": held_mb(learner),
        "private_mb": private_mb(),
        "grad_norm": step.grad_norm,
    }
    group.leave()
    return found


# ---- Around it -------------------------------------------------------------------------------


def measured(args: argparse.Namespace, strategy: str, size: int, compiled: Path) -> dict[str, Any]:
    """One row: `size` learners in processes of their own. `compiled`: as
    `learners_deepspeed.environment` takes it."""
    from grpo_trainable.actors.process_group import Rendezvous
    from grpo_trainable.noise import Meter

    store = Rendezvous("127.0.0.1", DEADLINE_S)
    command = [sys.executable, sys.argv[0], "--inside", strategy, "--port", str(store.place[1])]
    command += ["--size", str(size), "--preset", args.preset]
    command += ["--repeats", str(args.repeats), "--seed", str(args.seed)]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        **WAITING,
        **learners_deepspeed.environment(compiled, size),
    }
    meter = Meter()
    meter.begin()
    ranks = [
        subprocess.Popen(
            [*command, "--rank", str(rank)], env=environment, stdout=subprocess.PIPE, text=True
        )
        for rank in range(size)
    ]
    outputs = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        sys.exit(f"{strategy}, {size} learners: a rank ended with an error")
    others = meter.take()
    found = [json.loads(output.splitlines()[-1]) for output in outputs]
    seconds = found[0]["seconds"]
    return {
        "strategy": strategy,
        "learners": size,
        "seconds": {"median": statistics.median(seconds), "min": min(seconds), "all": seconds},
        "cores_used_by_others": others and others.foreign_s / others.seconds,
        **{key: [rank[key] for rank in found] for key in found[0] if key != "seconds"},
    }


def available(strategies: Sequence[str]) -> list[str]:
    """Those that can be measured here; the others are named."""
    why = learners_deepspeed.missing()
    if why is None:
        return list(strategies)
    for strategy in filter(learners_deepspeed.STAGES.__contains__, strategies):
        print(f"not available here: {strategy} ({why})")
    return [s for s in strategies if s not in learners_deepspeed.STAGES]


def main() -> None:
    parser = measure.parser_of(
        __doc__,
        "learners.json",
        seed="of weights and rows",
        counts={"repeats": (10, "steps timed")},
    )
    parser.add_argument("--preset", default=measure.PRESET, help="of the policy (small)")
    sizes = "numbers of learners beside one (2)"
    parser.add_argument("--learners", type=number(int, 2), nargs="+", default=[2], help=sizes)
    which = f"how they hold the policy ({' '.join(STRATEGIES)})"
    parser.add_argument(
        "--strategies", nargs="+", choices=STRATEGIES, default=STRATEGIES, help=which
    )
    parser.add_argument("--inside", choices=STRATEGIES, help=argparse.SUPPRESS)
    for name in ("--rank", "--size", "--port"):
        parser.add_argument(name, type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        print(json.dumps(in_rank(args)))
        return
    result = measure.provenance(args)
    strategies = available(args.strategies)
    with tempfile.TemporaryDirectory() as directory:
        compiled = Path(directory)
        rows = [measured(args, "replicated", 1, compiled)]
        rows += [measured(args, s, size, compiled) for size in args.learners for s in strategies]
    alone = rows[0]
    for row in rows:
        row["speed_up"] = alone["seconds"]["median"] / row["seconds"]["median"]
        row["held_share"] = max(row["held_mb"]) / max(alone["held_mb"])
        print(
            f"{row['learners']} {row['strategy']:<10}  median {row['seconds']['median']:.3f} s, "
            f"least {row['seconds']['min']:.3f} s, {row['speed_up']:.2f} x one learner; "
            f"parameters and moments {max(row['held_mb']):.1f} MB ({row['held_share']:.3f} x), "
            f"private {max(row['private_mb']):.0f} MB; publishes in {row['publish_s'][0]:.3f} s; "
            f"others used {row['cores_used_by_others'] or 0:.2f} cores"
        )
    result["workload"]["preset"] = args.preset
    measure.write(args.out, {**result, "microbatch": MICROBATCH, "results": rows})


if __name__ == "__main__":
    measure.run_benchmark(main)
