"""A learner over DeepSpeed's engine, for `benchmarks/learners.py`: ZeRO stages 1 to 3 on CPUs.

Objective, rows and dealing are the product's; gradients, their norm and AdamW's step are
DeepSpeed's. Parameters are stored by row, since DeepSpeed sends them as plain memory, and moments
and the copy of the parameters that the optimizer changes are flat, one part on each rank. What it
has of its own for CPUs is compiled at its first start, which needs a compiler and ninja.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

INSTALL = "pip install deepspeed ninja"
STAGES = {"zero1": 1, "zero2": 2, "zero3": 3}


def missing() -> str | None:
    """What this environment lacks; None where it has DeepSpeed."""
    if importlib.util.find_spec("deepspeed") is not None:
        return None
    return f"the library deepspeed is not installed: {INSTALL}"


def environment(compiled: Path, size: int) -> dict[str, str]:
    """What DeepSpeed reads. `compiled` is a directory for what it compiles: a process that is ended
    meanwhile leaves a lock there, for which all others wait without a word, so it is not the one
    that others use as well."""
    return {
        "DS_ACCELERATOR": "cpu",
        "DEEPSPEED_LOG_LEVEL": "error",
        "LOCAL_SIZE": str(size),
        "TORCH_EXTENSIONS_DIR": str(compiled),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",  # ninja's
    }


@dataclass
class _Optimizer:
    """DeepSpeed's engine as a learner's optimizer."""

    engine: Any
    config: Any
    steps: int = 0
    skipped: int = 0

    def step(self, loss: float) -> Any:
        from grpo_trainable.actors.optimizer import StepTaken

        self.engine.step()
        self.steps += 1
        norm = float(self.engine.get_global_grad_norm())
        return StepTaken(grad_norm=norm, lr=self.config.optim.lr, skipped=False, critic_grad_norm=0)

    def tensors(self) -> dict[str, Any]:
        """Moments, and the parts of the parameters that AdamW changes."""
        state = self.engine.optimizer.optimizer.state
        groups = self.engine.optimizer.optimizer.param_groups
        found = [value for own in state.values() for value in own.values() if hasattr(value, "dim")]
        found += [parameter for group in groups for parameter in group["params"]]
        return {str(i): tensor for i, tensor in enumerate(found)}


def learner_over_deepspeed(config: Any, group: Any, stage: int) -> Any:
    """A learner that takes its gradient steps by ZeRO of this stage. torch.distributed is there
    already, and DeepSpeed uses it."""
    import deepspeed
    import torch
    from torch import Tensor, nn

    from grpo_trainable.actors.learner import Learner
    from grpo_trainable.actors.ranks import Replicas
    from grpo_trainable.models.scoring import response_states
    from grpo_trainable.transports.in_process import InProcess

    class Summed(torch.autograd.Function):
        """Ranks' gradients are averaged by DeepSpeed, and are shares of a sum here."""

        @staticmethod
        def forward(ctx: Any, values: Tensor) -> Tensor:
            return values.view_as(values)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * group.size

    class Scoring(nn.Module):
        """DeepSpeed listens to a module's `forward` alone."""

        def __init__(self, learner: Any) -> None:
            super().__init__()
            self.policy = learner.policy
            self.learner = (learner,)

        def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
            states = response_states(self.policy, batch.input_ids, batch.response_mask)
            log_probs, entropy = self.learner[0]._log_probs.of_states(self.policy, states, batch)
            return Summed.apply(log_probs), entropy

    learner = Learner(config, None if group.rank else InProcess(), ranks=Replicas(group))
    for parameter in learner.policy.parameters():
        parameter.data = parameter.data.contiguous()
    parameters = [p for p in learner.policy.parameters() if p.requires_grad]
    optim = config.optim
    adamw = torch.optim.AdamW(
        parameters, lr=optim.lr, betas=optim.betas, weight_decay=optim.weight_decay, fused=True
    )
    os.environ["LOCAL_RANK"] = str(group.rank)
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    engine, *_ = deepspeed.initialize(
        model=Scoring(learner),
        optimizer=adamw,
        config={
            "train_micro_batch_size_per_gpu": 1,  # a number it only reports
            "gradient_accumulation_steps": 1,
            "managed_gradient_accumulation": False,  # a step is taken when it is asked for
            "gradient_clipping": optim.grad_clip,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": stage, "overlap_comm": False},
        },
    )
    steps: Any = learner._steps
    learner.optimizer = learner._state.optimizer = _Optimizer(engine, config)
    steps.forward = lambda batch: (*engine(batch), None)
    return learner


def gathered(parameters: Iterable[Any], stage: int) -> Any:
    """A context in which every rank has all parameters whole."""
    if stage < 3:
        return contextlib.nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(list(parameters))


def held(parameter: Any) -> Any:
    """What this rank holds of a parameter."""
    return getattr(parameter, "ds_tensor", parameter)
