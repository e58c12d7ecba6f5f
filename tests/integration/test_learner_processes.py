"""Learners in separate processes, replicated and divided (FSDP2), compared with one learner."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from policies import Mailbox, sharpened, write_quick_policy
from rank_threads import a_round, config_with
from torch import Tensor, multiprocessing

from grpo_trainable.config import GRPOConfig
from grpo_trainable.learner.learner import Learner
from grpo_trainable.learner.process_group import ProcessGroup, Rendezvous
from grpo_trainable.learner.ranks import ALONE, Ranks, Replicas
from grpo_trainable.protocol.messages import LearnerState
from grpo_trainable.protocol.rollout import PolicyWeights

SIZES = (4, 2)  # group sizes: four processes form a group, and then two of them form another
DEADLINE_S = 60.0
DTYPES = (torch.float32, torch.float64)
ALLOWED = {
    ("replicated", torch.float32): 1e-6,
    ("fsdp2", torch.float32): 1e-5,
    ("replicated", torch.float64): 1e-12,
    ("fsdp2", torch.float64): 1e-12,
}


def settings(path: str) -> GRPOConfig:
    # The gradient norm exceeds `grad_clip`. So learners would clip differently if each of them used
    # the norm of its own part of the gradient.
    packing = torch.get_default_dtype() == torch.float64  # the runs in float64 use packing
    model, optim = {"path": path, "packing": packing}, {"grad_clip": 0.05}
    return config_with(path, model=model, optim=optim, loss={"kl_coef": 0.05})


def two_rounds(path: str, ranks: Ranks) -> dict[str, Any]:
    """Return a learner's results and state after its first round and after its second round.

    Also return the state of another learner, which loads the state after the first round and trains
    the second round.
    """
    config = settings(path)
    mailbox = Mailbox()

    def new() -> Learner:
        return Learner(config, None if ranks.rank else mailbox, ranks=ranks)

    learner = new()
    learner.warm_up(4)
    found: dict[str, Any] = {"updated": learner.update([a_round(0)])}
    found["state"] = learner.state()
    found["published"] = learner.publish().handle
    found["held"] = held_bytes(learner)
    found["next"] = learner.update([a_round(1)])
    found["last"] = learner.state()

    resumed = new()
    states = [found["state"] if ranks.rank == 0 else None]
    if ranks.size > 1:
        torch.distributed.broadcast_object_list(states, src=0)
    resumed.update([a_round(2)])  # the load must replace what this step changes
    resumed.load_state(states[0])
    resumed.update([a_round(1)])
    found["resumed"] = resumed.state()
    found["snapshots"] = mailbox.snapshots
    sampled = replace(config, loss=replace(config.loss, kl_coef=0.0, kl_monitor_responses=4))
    found["sampled"] = Learner(sampled, None, ranks=ranks).update([a_round(0)])
    return found


def held_bytes(learner: Learner) -> int:
    """Return the number of bytes that parameters and AdamW moments take in this process."""
    tensors = [*learner.policy.parameters(), *learner.optimizer.tensors().values()]
    local = [getattr(t, "to_local", lambda t=t: t)() for t in tensors]
    return sum(tensor.nbytes for tensor in local)


def rank_process(rank: int, places: dict[Any, tuple[str, int]], path: str, out: str) -> None:
    torch.set_num_threads(1)
    from grpo_trainable.learner.shards import Shards

    for size in SIZES:
        if rank >= size:
            return
        group = ProcessGroup(torch.device("cpu"), DEADLINE_S)
        group.join(rank, size, places[size])
        for dtype in DTYPES:
            torch.set_default_dtype(dtype)
            for strategy, ranks in (("replicated", Replicas(group)), ("fsdp2", Shards(group))):
                found = two_rounds(path, ranks)
                torch.save(found, Path(out) / f"{strategy}-{size}-{dtype}-{rank}")
        group.leave()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    # With weights of the usual size, terms of the float32 gradient cancel, and the gradient is only
    # accurate to 1.5e-5.
    return write_quick_policy(tmp_path_factory.mktemp("policy"), make=sharpened)


@pytest.fixture(scope="module")
def alone(path: str) -> dict[torch.dtype, dict[str, Any]]:
    found = {}
    for dtype in DTYPES:
        torch.set_default_dtype(dtype)
        try:
            found[dtype] = two_rounds(path, ALONE)
        finally:
            torch.set_default_dtype(torch.float32)
    return found


@pytest.fixture(scope="module")
def several(path: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that reads all ranks' results for a strategy, a group size and a dtype."""
    out = tmp_path_factory.mktemp("ranks")
    stores = {size: Rendezvous("127.0.0.1", DEADLINE_S) for size in SIZES}
    places = {size: store.place for size, store in stores.items()}
    multiprocessing.spawn(rank_process, (places, path, str(out)), nprocs=max(SIZES))

    def found(strategy: str, size: int, dtype: torch.dtype) -> list[dict[str, Any]]:
        files = [out / f"{strategy}-{size}-{dtype}-{rank}" for rank in range(size)]
        return [torch.load(file, weights_only=False) for file in files]

    return found


def gradient(state: LearnerState) -> Tensor:
    """Return the gradient of the only step, up to a constant factor, as AdamW's first moments."""
    moments = sorted(name for name in state.optimizer if name.endswith("exp_avg"))
    return torch.cat([state.optimizer[name].flatten() for name in moments])


def same(a: LearnerState, b: LearnerState) -> bool:
    return all(
        ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours)
        for ours, theirs in ((a.policy, b.policy), (a.optimizer, b.optimizer))
    )


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="the addresses of the processes need Linux"),
]
every_group = pytest.mark.parametrize("size", SIZES)
every_strategy = pytest.mark.parametrize("strategy", ["replicated", "fsdp2"])


@every_group
@every_strategy
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_are_those_of_one_learner(
    alone: Any, several: Any, strategy: str, size: int, dtype: torch.dtype
):
    expected, (first, *others) = alone[dtype], several(strategy, size, dtype)
    assert first["updated"].steps[0].grad_norm > 0.05
    ours, theirs = gradient(first["state"]), gradient(expected["state"])
    assert ours.dtype == dtype
    assert float((ours - theirs).norm() / theirs.norm()) < ALLOWED[strategy, dtype]
    for rank in (first, *others):
        said, wanted = rank["updated"], expected["updated"]
        assert repr(said.steps) == repr(first["updated"].steps)
        assert said.steps[0].grad_norm == pytest.approx(wanted.steps[0].grad_norm, rel=1e-5)
        assert said.steps[0].loss == pytest.approx(wanted.steps[0].loss, rel=1e-4, abs=1e-6)
        assert said.kl["reference"].k3 == pytest.approx(wanted.kl["reference"].k3, rel=1e-3)


@every_group
@every_strategy
def test_all_learners_together_measure_the_kl_of_a_sample(
    alone: Any, several: Any, strategy: str, size: int
):
    expected = alone[torch.float64]["sampled"]
    for rank in several(strategy, size, torch.float64):
        found = rank["sampled"]
        for name, drift in expected.kl.items():
            assert found.kl[name].k1 == pytest.approx(drift.k1, rel=1e-3, abs=1e-6)
            assert found.kl[name].k3_se > 0
            assert found.kl[name].k3_se == pytest.approx(drift.k3_se, rel=1e-3)
        assert found.reference_nll_nats == pytest.approx(expected.reference_nll_nats)


@every_group
@every_strategy
def test_a_state_goes_on_bit_for_bit_with_as_many(several: Any, strategy: str, size: int):
    first, *others = several(strategy, size, torch.float32)
    assert same(first["resumed"], first["last"])
    assert not same(first["state"], first["last"])
    assert all(rank["state"].policy == {} for rank in others)


@every_group
@every_strategy
def test_what_is_published_is_stored_as_one_learner_stores_it(
    alone: Any, several: Any, strategy: str, size: int
):
    first, *others = several(strategy, size, torch.float32)
    expected: PolicyWeights = alone[torch.float32]["snapshots"][1]
    published: PolicyWeights = first["snapshots"][1]
    assert published.tensors.keys() == expected.tensors.keys()
    for name, tensor in published.tensors.items():
        assert torch.equal(tensor, first["state"].policy[name])
        assert tensor.stride() == expected.tensors[name].stride()
    assert all(rank["published"] is None for rank in others)


@every_group
def test_divided_parameters_and_moments_take_their_part_of_memory(
    alone: Any, several: Any, size: int
):
    whole = alone[torch.float32]["held"]
    for rank in several("fsdp2", size, torch.float32):
        assert rank["held"] <= (1 / size + 0.01) * whole
    assert {rank["held"] for rank in several("replicated", size, torch.float32)} == {whole}
