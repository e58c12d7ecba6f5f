"""Several learners train as one: they share the rows, sum their gradients, and agree."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from policies import write_quick_policy
from rank_threads import ThreadGroup, a_round, config_with, learner_of, together
from torch import Tensor

from grpo_trainable.config import GRPOConfig
from grpo_trainable.learner.learner import Learner
from grpo_trainable.learner.ranks import MESSAGE_BYTES, Replicas, deal
from grpo_trainable.protocol.messages import LearnerState, Updated
from grpo_trainable.protocol.rollout import RolloutGroup, TrainBatch
from grpo_trainable.storage.checkpointing import (
    LearnerFiles,
    begun,
    finish_checkpoint,
    read_checkpoint,
)
from grpo_trainable.transports.in_process import InProcess

pytestmark = pytest.mark.numerics

# Largest allowed difference between two gradients, relative to the norm of the expected one.
ALLOWED = {torch.float32: 1e-6, torch.float64: 1e-12}


@pytest.fixture(scope="module")
def policy_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_quick_policy(tmp_path_factory.mktemp("policy"))


# ---- Dealing -----------------------------------------------------------------------------------


def dealt(sizes: list[int], costs: list[int], ranks: int) -> list[list[list[int]]]:
    """Return the row numbers of each rank's microbatches, dealt from parts of these sizes.

    Row i costs costs[i]. The cost of a part is the cost of its most expensive row times its
    number of rows.
    """
    parts = torch.arange(sum(sizes)).split(sizes)
    hands = deal(parts, lambda rows: len(rows) * max(costs[row] for row in rows.tolist()), ranks)
    return [[rows.tolist() for rows in hand] for hand in hands]


def test_a_single_learner_runs_all_microbatches_in_their_order():
    assert dealt([2, 2, 1], [1, 2, 3, 4, 5], 1) == [[[0, 1], [2, 3], [4]]]


def test_the_largest_microbatch_goes_first_to_who_has_the_least_to_do():
    # The costs are 1, 2, 3 and 6. One rank gets 6 and 1, and the other rank gets 3 and 2. Each rank
    # keeps the order of its microbatches.
    assert dealt([1, 1, 1, 1], [1, 2, 3, 6], 2) == [[[0], [3]], [[1], [2]]]


def test_the_largest_microbatch_is_cut_where_ranks_would_get_unequal_numbers():
    # The parts have 2 x 2, 2 x 4 and 1 x 5 tokens. The second is split into rows of 3 and 4 tokens.
    assert dealt([2, 2, 1], [1, 2, 3, 4, 5], 2) == [[[2], [4]], [[0, 1], [3]]]
    # One part is split into four.
    assert sorted(dealt([8], [1] * 8, 4)) == [[[0, 1]], [[2, 3]], [[4, 5]], [[6, 7]]]


def test_single_rows_cannot_be_cut():
    assert dealt([1, 1, 1], [1, 1, 1], 2) == [[[0], [2]], [[1]]]
    assert dealt([1], [1], 3) == [[[0]], [], []]


@pytest.mark.slow
@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=12),
    st.integers(1, 5),
    st.lists(st.integers(1, 99), min_size=72, max_size=72),
)
def test_every_row_is_dealt_once_and_as_many_parts_to_each(
    sizes: list[int], ranks: int, costs: list[int]
):
    hands = dealt(sizes, costs, ranks)
    rows = [row for hand in hands for part in hand for row in part]
    assert sorted(rows) == list(range(sum(sizes)))
    counts = [len(hand) for hand in hands]
    assert max(counts) - min(counts) <= 1
    if sum(sizes) % ranks == 0:
        assert len(set(counts)) == 1


# ---- Sums --------------------------------------------------------------------------------------


def test_gradients_are_summed_whatever_their_layout_and_who_lacks_one():
    def gradients(group: ThreadGroup) -> list[Tensor | None]:
        by_row, by_column = torch.zeros(2, 3), torch.zeros(3, 2).t()
        parameters = [torch.nn.Parameter(t) for t in (by_row, by_column, by_row, by_row)]
        parameters[3].requires_grad_(False)
        if group.rank != 1:  # rank 1 ran no microbatch
            parameters[0].grad = torch.full((2, 3), 1.0 + group.rank)
            parameters[1].grad = torch.arange(6.0).view(2, 3) * (1 + group.rank)
        Replicas(group).sum_gradients(parameters)
        return [parameter.grad for parameter in parameters]

    for first, second, *without in together(3, gradients):
        assert torch.equal(first, torch.full((2, 3), 4.0))
        assert torch.equal(second, torch.arange(6.0).view(2, 3) * 4)
        assert without == [None, None]


def test_gradients_travel_in_messages_of_a_bounded_size(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("grpo_trainable.learner.ranks.MESSAGE_BYTES", 40)
    assert MESSAGE_BYTES == 32 << 20

    class Counting:
        rank, size = 0, 2

        def __init__(self) -> None:
            self.sizes: list[int] = []

        def sum_(self, tensor: Tensor) -> Tensor:
            self.sizes.append(tensor.numel())
            return tensor

    parameters = [torch.nn.Parameter(torch.zeros(n)) for n in (4, 6, 1, 20, 2)]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    group = Counting()
    Replicas(group).sum_gradients(parameters)
    # first, flags that say which parameters have a gradient; then messages of 40, 4, 80 and 8 bytes
    assert group.sizes == [5, 10, 1, 20, 2]


def test_each_replica_writes_a_part_of_a_checkpoint():
    tensors = {name: torch.zeros(n) for name, n in (("a", 4), ("b", 1), ("c", 2), ("d", 1))}

    def names(group: ThreadGroup) -> list[str]:
        return list(Replicas(group).held(tensors))

    assert together(1, names) == [["a", "b", "c", "d"]]
    assert together(2, names) == [["a"], ["b", "c", "d"]]


# ---- Several learners as one -------------------------------------------------------------------


def trained(
    config: GRPOConfig,
    size: int,
    dtype: torch.dtype = torch.float32,
    rounds: tuple[list[RolloutGroup], ...] = (),
) -> list[tuple[list[Updated], Learner]]:
    """Return the results of the rounds, and the final learner, of each rank."""

    def work(group: ThreadGroup) -> tuple[list[Updated], Learner]:
        learner = learner_of(config, group, dtype)
        return [learner.update([groups]) for groups in rounds or (a_round(),)], learner

    return together(size, work)


def gradient(learner: Learner) -> Tensor:
    """Return the gradient of the only step so far, up to a factor, from AdamW's first moments."""
    moments = learner.optimizer.tensors()
    return torch.cat([m.flatten() for name, m in moments.items() if name.endswith("exp_avg")])


def distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def policy_of(learner: Learner) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in learner.policy.named_parameters()}


def check_agreement(config: GRPOConfig, dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
    (((alone,), one),) = trained(config, 1, dtype)
    assert float(gradient(one).norm()) > 0
    for size in sizes:
        answers, learners = zip(*trained(config, size, dtype), strict=True)
        for (updated,), learner in zip(answers, learners, strict=True):
            assert distance(gradient(learner), gradient(one)) < ALLOWED[dtype]
            (step,), (expected,) = updated.steps, alone.steps
            assert step.loss == pytest.approx(expected.loss, rel=1e-5, abs=1e-7)
            assert step.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
            # A ratio at the edge between two bins may be counted in either bin.
            moved = zip(step.ratio_counts, expected.ratio_counts, strict=True)
            assert sum(abs(ours - theirs) for ours, theirs in moved) <= 2
            assert step.ratio_max == pytest.approx(expected.ratio_max, rel=1e-5)
            # All ranks agree, bit for bit.
            assert repr((updated.steps, updated.kl)) == repr(
                (answers[0][0].steps, answers[0][0].kl)
            )
            first, own = policy_of(learners[0]), policy_of(learner)
            assert all(torch.equal(first[name], own[name]) for name in first)


@pytest.mark.slow
def test_the_gradient_of_two_learners_is_that_of_one(policy_path: str):
    check_agreement(config_with(policy_path, loss={"kl_monitor": False}), torch.float64, (2,))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", list(ALLOWED))
def test_gradients_of_several_learners_are_those_of_one(policy_path: str, dtype: torch.dtype):
    config = config_with(policy_path, loss={"kl_monitor": False})
    check_agreement(config, dtype, (2, 4))


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"loss": {"aggregation": "token_mean"}},
        {"loss": {"aggregation": "constant", "importance_cap": 2.0}},
        {"loss": {"type": "gspo"}},
        {"loss": {"type": "clip_cov", "cov_fraction": 0.2}},
        {"loss": {"type": "m2po"}},
        {"loss": {"kl_coef": 0.1}},
        {"loss": {"kl_coef": 0.1, "kl_in": "reward"}},
        {"loss": {"type": "ppo", "advantage": "gae"}},
        {"loss": {"type": "ppo", "advantage": "gae"}, "critic": {"body": "shared"}},
        {"rollout": {"overlong": "filter"}},
        {"optim": {"microbatch": 1}},
        {"optim": {"microbatch_tokens": 20}},
        {"model": {"gradient_checkpointing": True}},
    ],
)
def test_so_are_they_with_every_kind_of_loss(policy_path: str, settings: dict[str, Any]):
    check_agreement(config_with(policy_path, **settings), torch.float32, (2, 3, 4))


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"k": 2},
        {"k": 4, "k_mode": "minibatches", "optim": {"epochs": 2}},
        {"loss": {"kl_coef": 0.1, "kl_target": 0.1}},
        {"loss": {"kl_monitor_responses": 5}},
    ],
)
def test_all_ranks_go_the_same_way_and_each_time_again(policy_path: str, settings: dict[str, Any]):
    config, rounds = config_with(policy_path, **settings), (a_round(0), a_round(1))
    first = trained(config, 3, rounds=rounds)
    again = trained(config, 3, rounds=rounds)
    alone = trained(config, 1, rounds=rounds)
    for updated, learner in (*first, *again):
        expected, own = policy_of(first[0][1]), policy_of(learner)
        assert all(torch.equal(expected[name], own[name]) for name in expected)
        for theirs, ours in zip(first[0][0], updated, strict=True):
            assert repr((theirs.steps, theirs.kl)) == repr((ours.steps, ours.kl))
        for theirs, ours in zip(alone[0][0], updated, strict=True):
            assert ours.kl_coefficient == pytest.approx(theirs.kl_coefficient)
            assert ours.kl["behaviour"].k1 == pytest.approx(theirs.kl["behaviour"].k1, rel=1e-3)
            assert (ours.responses.advantages == theirs.responses.advantages).all()


@pytest.mark.slow
def test_a_learner_among_ranks_of_one_is_a_learner_alone(policy_path: str):
    config = config_with(policy_path, k=2)
    ((updated, among),) = trained(config, 1)
    alone = Learner(config, InProcess())
    expected = alone.update([a_round()])
    assert repr((updated[0].steps, updated[0].kl)) == repr((expected.steps, expected.kl))
    own = policy_of(among)
    assert all(torch.equal(own[name], p) for name, p in policy_of(alone).items())


@pytest.mark.slow
def test_every_rank_warms_up_with_a_microbatch_of_one_row(policy_path: str):
    """All ranks take part in gathering a policy that is divided among them.

    So they would wait forever for a rank without a microbatch.
    """
    config = config_with(policy_path, optim={"microbatch": 1})

    def work(group: ThreadGroup) -> list[int]:
        learner, rows = learner_of(config, group), []
        assert learner.reference is not None
        scored = learner.reference._log_probs
        forward = scored.with_entropy

        def seen(model: Any, batch: TrainBatch) -> tuple[Tensor, Tensor]:
            rows.append(batch.num_rows)
            return forward(model, batch)

        scored.with_entropy = seen  # pyright: ignore[reportAttributeAccessIssue]
        learner.warm_up(4)
        return rows

    assert together(2, work) == [[1], [1]]


@pytest.mark.slow
def test_a_step_that_is_not_finite_on_one_rank_is_skipped_by_all(policy_path: str):
    config = config_with(policy_path, loss={"kl_monitor": False})
    first, *others = a_round()
    spoiled = first.behaviour_log_probs.clone()
    spoiled[1, 0] = torch.nan  # the shortest response, in one microbatch of one rank
    # The learner treats tokens of its current version differently, so these tokens are older.
    older = first.token_versions - 1
    groups = [replace(first, behaviour_log_probs=spoiled, token_versions=older), *others]
    for (updated,), learner in trained(config, 3, rounds=(groups,)):
        (step,) = updated.steps
        assert step.skipped
        assert updated.skipped_steps == 1
        assert step.ratio_max != step.ratio_max  # NaN
        assert learner.version == 0


@pytest.mark.slow
def test_going_back_to_where_a_round_began_leaves_no_trace_of_it(policy_path: str):
    config = config_with(policy_path)
    first, second = a_round(0), a_round(1)

    def work(group: ThreadGroup) -> Learner:
        learner = learner_of(config, group)
        learner.update([first])
        before = learner.own_state()
        learner.update([second])
        # a gradient from a step that was cut short
        learner.policy.embedding.weight.sum().backward()
        learner.rewind(before)
        learner.update([second])
        return learner

    plain = [learner for _, learner in trained(config, 2, rounds=(first, second))]
    for again, expected in zip(together(2, work), plain, strict=True):
        own = policy_of(again)
        assert all(torch.equal(own[name], p) for name, p in policy_of(expected).items())


@pytest.mark.slow
def test_a_checkpoint_of_two_goes_on_with_one_and_with_four(policy_path: str, tmp_path: Path):
    config = config_with(policy_path)
    first, second = a_round(0), a_round(1)

    def write(group: ThreadGroup) -> LearnerFiles:
        learner = learner_of(config, group)
        learner.update([first])
        return learner.write(str(tmp_path), seen_by)

    with begun(tmp_path) as seen_by:
        files = together(2, write)
    state = {"learner": files[0].counters, "pipeline": {"learner_round": 1}}
    finish_checkpoint(tmp_path, files, state, [])
    assert all(list(tmp_path.glob(f"{part}-00002-of-00002.*")) for part in ("policy", "optimizer"))
    read = read_checkpoint(tmp_path)
    stored = LearnerState(policy=read.policy, optimizer=read.optimizer, counters=files[0].counters)

    def go_on(group: ThreadGroup) -> Learner:
        learner = learner_of(config, group)
        learner.load_state(stored)
        learner.update([second])
        return learner

    (_, expected), _ = trained(config, 2, rounds=(first, second))
    for size, bound in ((2, 0.0), (1, 1e-6), (4, 1e-6)):
        for learner in together(size, go_on):
            own = policy_of(learner)
            assert learner.version == 2
            for name, p in policy_of(expected).items():
                assert float((own[name] - p).norm()) <= bound * float(p.norm())


@pytest.mark.slow
def test_only_the_first_rank_publishes_and_answers_with_tensors(policy_path: str):
    def work(group: ThreadGroup) -> tuple[Any, int, int]:
        learner = learner_of(config_with(policy_path), group)
        published, state = learner.publish(), learner.state()
        assert state.counters["round"] == published.round == 0
        return published.handle, len(state.policy), len(state.optimizer)

    (handle, parameters, _), *others = together(3, work)
    assert handle is not None
    assert parameters > 0
    assert others == [(None, 0, 0)] * 2
