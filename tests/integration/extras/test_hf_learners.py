"""Several learners, replicated or divided (FSDP2), train transformers models like one learner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import write_hf_model
from policies import Mailbox
from rank_threads import a_round, config_with, learner_of, together
from torch import Tensor, multiprocessing

from grpo_trainable.learner.learner import Learner
from grpo_trainable.learner.process_group import ProcessGroup, Rendezvous
from grpo_trainable.learner.ranks import ALONE, Ranks

pytest.importorskip("transformers")
pytest.importorskip("peft")

# (family, True if the head is tied, settings of the model)
MODELS = [("qwen3", True, {}), ("llama", False, {"gradient_checkpointing": True})]
DEADLINE_S = 60.0


def gradient(learner: Learner) -> Tensor:
    moments = dict(learner._ranks.gathered(learner.optimizer.tensors()))
    names = sorted(name for name in moments if name.endswith("exp_avg"))
    return torch.cat([moments[name].flatten() for name in names]) if names else torch.zeros(0)


def trained(path: str, model: dict[str, Any], ranks: Ranks) -> tuple[Tensor, Any]:
    """Return the gradient of one step, and the snapshots published after it."""
    mailbox = Mailbox()
    config = config_with(path, model={"path": path, **model}, loss={"kl_coef": 0.05})
    learner = Learner(config, None if ranks.rank else mailbox, ranks=ranks)
    learner.update([a_round()])
    found = gradient(learner)
    learner.publish()
    return found, mailbox.snapshots


def rank_process(rank: int, place: tuple[str, int], paths: list[str], out: str) -> None:
    torch.set_num_threads(1)
    from grpo_trainable.learner.shards import Shards

    group = ProcessGroup(torch.device("cpu"), DEADLINE_S)
    group.join(rank, 2, place)
    found = [
        trained(path, model, Shards(group))
        for path, (_, _, model) in zip(paths, MODELS, strict=True)
    ]
    if rank == 0:
        torch.save(found, out)
    group.leave()


def distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def test_models_that_two_learners_hold_between_them(tmp_path: Path):
    paths = [write_hf_model(tmp_path / name, name, tied=tied) for name, tied, _ in MODELS]
    store = Rendezvous("127.0.0.1", DEADLINE_S)
    arguments = (store.place, paths, str(tmp_path / "found"))
    multiprocessing.spawn(rank_process, arguments, nprocs=2)
    divided = torch.load(tmp_path / "found", weights_only=False)
    for path, (_, _, model), (ours, published) in zip(paths, MODELS, divided, strict=True):
        theirs, expected = trained(path, model, ALONE)
        assert distance(ours, theirs) < 1e-5
        assert published[1].tensors.keys() == expected[1].tensors.keys()
        for name, tensor in published[1].tensors.items():
            # The published weights follow one step at the learning rate 1e-3.
            assert torch.allclose(tensor, expected[1].tensors[name], atol=2e-4)


@pytest.mark.parametrize(
    ("model", "allowed"), [({"lora_rank": 4}, 1e-5), ({"dtype": "bfloat16"}, 2e-2)]
)
def test_replicas_share_adapters_and_master_weights(
    tmp_path: Path, model: dict[str, Any], allowed: float
):
    path = write_hf_model(tmp_path / "model", "qwen2", tied=True)
    config = config_with(path, model={"path": path, **model}, loss={"kl_coef": 0.05})

    def work(group: Any) -> tuple[Learner, int]:
        learner = learner_of(config, group)
        learner.update([a_round()])
        return learner, len(learner._weights().tensors)

    ((one, count),) = together(1, work)
    found = together(2, work)
    for learner, _ in found:
        moments = learner.optimizer.tensors()
        ours = torch.cat([moments[n].flatten() for n in sorted(moments) if n.endswith("exp_avg")])
        assert distance(ours, gradient(one)) < allowed
    assert [tensors for _, tensors in found] == [count, 0]  # only the first learner merges adapters
