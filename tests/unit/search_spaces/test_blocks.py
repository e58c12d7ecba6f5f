"""Trials run in randomised blocks, and Tune takes the trials in that order."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
from ray import tune
from ray.tune.experiment import Experiment

from grpo_trainable.config import ConfigError, schedule
from search_spaces import SPACES
from search_spaces.search_space import in_blocks
from tuning.grid import OrderedGrid

SPACE = SPACES["async_vs_sync"]
SEEDS = (3, 0, 7, 1)


def test_every_block_is_one_seed_with_every_arm_once():
    trials = in_blocks(SPACE.trials({}, SEEDS))
    size = len(SPACE.arms)

    assert len(trials) == size * len(SEEDS)
    for place, seed in enumerate(SEEDS):
        block = trials[place * size : (place + 1) * size]
        assert {trial.seed for trial in block} == {seed}
        assert {trial.arm for trial in block} == set(SPACE.arms)


@pytest.mark.slow
def test_the_order_within_a_block_depends_on_its_seed_alone():
    def orders(*seeds: int) -> dict[int, tuple[str, ...]]:
        trials = in_blocks(SPACE.trials({}, seeds))
        return {seed: tuple(t.arm for t in trials if t.seed == seed) for seed in seeds}

    assert orders(7)[7] == orders(*SEEDS)[7]
    assert len(set(orders(*range(20)).values())) == 20


@pytest.mark.slow
def test_over_many_blocks_no_arm_has_a_place_of_its_own():
    seeds = range(400)
    places: dict[str, list[int]] = {arm: [] for arm in SPACE.arms}
    trials = in_blocks(SPACE.trials({}, seeds))
    for place, trial in enumerate(trials):
        places[trial.arm].append(place % len(SPACE.arms))

    # The places in a block, 0 to 7, have mean 3.5 and standard deviation 2.3. So the mean of 400
    # places is within 4 x 0.115 of 3.5.
    assert all(abs(sum(p) / len(p) - 3.5) < 0.46 for p in places.values())


@pytest.fixture
def experiment(tmp_path: Path) -> Experiment:
    tune.register_trainable("blocks", tune.Trainable)
    searched = {"arm": tune.grid_search(["a", "b"]), "seed": tune.grid_search([0, 1])}
    config = {**searched, "optim": {"lr": 0.1}}
    return Experiment("blocks", run="blocks", config=config, storage_path=str(tmp_path))


ORDER = [("b", 0), ("a", 0), ("a", 1), ("b", 1)]


def test_tune_runs_the_trials_in_the_order_that_is_given(experiment):
    grid = OrderedGrid(ORDER, lambda: False)
    grid.add_configurations([experiment])
    trials = [grid.next_trial() for _ in ORDER]

    assert grid.total_samples == len(ORDER)
    assert [(t.config["arm"], t.config["seed"]) for t in trials] == ORDER
    assert [t.config["optim"] for t in trials] == [{"lr": 0.1}] * 4
    # The values of the searched settings, as TensorBoard's hparams show them.
    assert [t.evaluated_params for t in trials] == [{"arm": arm, "seed": s} for arm, s in ORDER]
    assert len({t.trial_id for t in trials}) == 4
    assert grid.next_trial() is None
    assert grid.is_finished()


def test_a_search_is_not_finished_while_a_trial_waits(experiment):
    waiting = [True]
    grid = OrderedGrid(ORDER, lambda: waiting[0])
    grid.add_configurations([experiment])
    assert [grid.next_trial() is None for _ in range(len(ORDER) + 2)] == [False] * 4 + [True] * 2
    assert not grid.is_finished()
    waiting[0] = False
    assert grid.is_finished()


def test_a_resumed_search_goes_on_in_its_order(experiment, tmp_path):
    grid = OrderedGrid(ORDER, lambda: False)
    grid.add_configurations([experiment])
    grid.next_trial()
    grid.save_to_dir(str(tmp_path), "session")
    resumed = OrderedGrid([], lambda: False)
    resumed.restore_from_dir(str(tmp_path))

    others = [resumed.next_trial() for _ in ORDER[1:]]
    assert [(t.config["arm"], t.config["seed"]) for t in others] == ORDER[1:]
    assert resumed.next_trial() is None


def test_trials_that_a_resumed_search_has_yet_to_start_keep_its_settings(experiment, tmp_path):
    def search(packing: bool) -> OrderedGrid:
        grid, own = OrderedGrid(ORDER, lambda: False), copy.copy(experiment)
        own.spec = {**own.spec, "config": {**own.spec["config"], "model": {"packing": packing}}}
        grid.add_configurations([own])
        return grid

    began = search(packing=False)
    began.next_trial()
    began.save_to_dir(str(tmp_path), "session")
    resumed = search(packing=True)  # the default of a later version
    resumed.restore_from_dir(str(tmp_path))

    others = [resumed.next_trial() for _ in ORDER[1:]]
    assert [trial.config["model"] for trial in others] == [{"packing": False}] * 3
    assert resumed.next_trial() is None


# ---- Equal samples ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", SPACES)
@pytest.mark.parametrize(
    ("samples", "evaluated"),
    # Arms with k = 8 have rounds of 512 responses, so 512 samples leave one evaluation.
    [(512, {512}), (4096, {1024, 2048, 3072, 4096}), (1536, {512, 1024, 1536})],
)
def test_samples_are_cut_into_the_rounds_of_every_arm(name, samples, evaluated):
    space = SPACES[name]
    widest = max(schedule.responses_per_round(trial) for trial in space.trials({}, [0]))
    for trial in space.trials({}, [0], samples=samples):
        assert trial.rounds * schedule.responses_per_round(trial) == samples
        every = trial.eval.every * schedule.responses_per_round(trial)
        if widest == 512:
            assert set(range(every, samples + 1, every)) == evaluated


def test_samples_that_an_arm_cannot_have_are_refused_with_those_next_to_them():
    with pytest.raises(ConfigError, match=r"64, 128, 256, 512 responses.*: 1024 and 1536$"):
        SPACE.trials({}, [0], samples=1100)
    with pytest.raises(ConfigError, match=r"nearest valid: 512$"):
        SPACE.trials({}, [0], samples=100)
    # For one arm alone, rounds have 64 responses.
    with pytest.raises(ConfigError, match=r"nearest valid: 1088 and 1152$"):
        SPACE.trials({"arm": "sync"}, [0], samples=1100)


def test_evaluations_that_the_user_fixes_stay_as_they_are():
    assert {t.eval.every for t in SPACE.trials({"eval.every": 3}, [0], samples=1024)} == {3}


def test_samples_leave_a_spaces_own_trials_as_they_are():
    assert SPACE.trials({}, [0], samples=6144) == SPACE.trials({}, [0])


def test_defaults_follow_the_number_of_rounds(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    model = {"model.path": str(tmp_path), "arm": "sync"}
    assert [t.optim.warmup_rounds for t in SPACE.trials(model, [0])] == [5]
    (trial,) = SPACE.trials(model, [0], samples=1024)
    assert (trial.rounds, trial.optim.warmup_rounds) == (16, 1)
