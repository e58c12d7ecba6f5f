"""GRPO as an RLlib user sees it: an ordinary trial under RLlib's names."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from conftest import assert_no_actor_left, untimed
from fake_hub import FakeHub
from pyarrow.fs import LocalFileSystem, SubTreeFileSystem
from ray import cloudpickle, tune

from grpo_trainable.config import ConfigError, GRPOConfig, resources
from grpo_trainable.plugins import PluginError
from grpo_trainable.storage.checkpointing import CheckpointError, read_checkpoint

pytest.importorskip("gymnasium", reason="needs the extra rllib")

import torch
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.callbacks.callbacks import RLlibCallback

from grpo_trainable.rllib import GRPO, NAME, GRPOAlgorithmConfig
from grpo_trainable.rllib.settings import ENDLESS, trial_data

ROOT = Path(__file__).resolve().parents[3]

# Ray's processes cannot import this file.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

SMALL: dict[str, Any] = {
    "rollout": {"prompts": 4, "unit_prompts": 2, "group_size": 4, "max_new_tokens": 12},
    "task": {"match": "substring"},
    "eval": {"prompts": 6, "samples": 2},
    "resources": {"deadline_s": 120.0},
}


class Told(RLlibCallback):
    """A callback that records RLlib's calls in the algorithm object."""

    def on_algorithm_init(self, *, algorithm: Any, **kwargs: Any) -> None:
        algorithm.told = ["init"]

    def on_train_result(self, *, algorithm: Any, result: dict[str, Any], **kwargs: Any) -> None:
        algorithm.told.append("train_result")
        result["mine"] = 1

    def on_checkpoint_loaded(self, *, algorithm: Any, **kwargs: Any) -> None:
        algorithm.told.append("checkpoint_loaded")

    def on_evaluate_end(
        self, *, algorithm: Any, evaluation_metrics: dict[str, Any], **kwargs: Any
    ) -> None:
        algorithm.told.append("evaluate_end")


def config_of(**grpo: Any) -> GRPOAlgorithmConfig:
    return (
        GRPOAlgorithmConfig()
        .training(lr=1e-3, grpo={**SMALL, **grpo})
        .evaluation(evaluation_interval=2)
        .debugging(seed=7)
    )


def told_of(result: dict[str, Any]) -> dict[str, float]:
    """Return the columns of a result that describe the training, as docs/metrics.md names them."""
    return untimed(tune.utils.util.flatten_dict(result))


# ---- Settings --------------------------------------------------------------------------------


def test_settings_that_need_the_models_files_are_valid(tmp_path, monkeypatch) -> None:
    hub = FakeHub(tmp_path, monkeypatch)
    hub.add("org/chat", chat_template="{{ messages }}")
    config = config_of(model={"path": "org/chat", "system": "Be short."})
    config.validate()
    assert GRPOConfig.from_dict(trial_data(config)).model.chat_template == "on"
    absent = config_of(model={"path": "org/none"}).env_runners(num_env_runners=2)
    assert len(GRPO.default_resource_request(absent).bundles) == 4
    with pytest.raises(ConfigError, match=r"^model\.path=org/none: no such directory, and"):
        absent.validate()


def test_rllibs_settings_are_those_of_a_trial() -> None:
    config = (
        GRPOAlgorithmConfig()
        .training(lr=3e-4, grad_clip=0.5, grpo={"lag": 1, "rounds": 9})
        .training(grpo={"rollout": {"prompts": 8}})
        .env_runners(num_env_runners=2)
        .learners(num_learners=1)
        .evaluation(evaluation_interval=3)
        .debugging(seed=5)
    )
    config.validate()
    settings = GRPOConfig.from_dict(trial_data(config))
    assert settings == GRPOConfig.from_dict(
        {
            "placement": "disaggregated",
            "lag": 1,
            "rounds": 9,
            "seed": 5,
            "rollout": {"prompts": 8},
            "optim": {"lr": 3e-4, "grad_clip": 0.5},
            "eval": {"every": 3},
            "resources": {"num_generators": 2},
        }
    )
    assert GRPO.default_resource_request(config).bundles == resources.bundles(settings)
    # Tune passes the config as a dict.
    back = GRPOAlgorithmConfig().update_from_dict({**config.to_dict(), "__stdout_file__": "x"})
    back.validate()
    assert trial_data(back) == trial_data(config) == trial_data(config.copy())


def test_a_config_that_says_nothing_is_the_default_trial_without_an_end() -> None:
    config = GRPOAlgorithmConfig()
    config.validate()
    endless = {"rounds": ENDLESS, "eval": {"every": ENDLESS}}
    assert GRPOConfig.from_dict(trial_data(config)) == GRPOConfig.from_dict(endless)
    # A single process, which samples and trains in turn, can have an exact lag.
    exact = {"lag": 1, "lag_mode": "exact"}
    given = GRPOAlgorithmConfig().training(grpo=exact)
    assert GRPOConfig.from_dict(trial_data(given)) == GRPOConfig.from_dict({**endless, **exact})
    # The defaults of a task, such as its learning rate, still apply.
    math = {"task": {"name": "math"}}
    expected = GRPOConfig.from_dict({**endless, **math})
    assert expected.optim.lr != GRPOConfig().optim.lr
    assert GRPOConfig.from_dict(trial_data(config.training(grpo=math))) == expected


def unread() -> dict[str, AlgorithmConfig]:
    """Return invalid configs. Each key is a pattern that the error message must match."""

    class Episodes(RLlibCallback):
        def on_episode_end(self, **kwargs: Any) -> None:
            pass

    new = GRPOAlgorithmConfig
    return {
        "gamma: has no effect": new().training(gamma=0.9),
        "train_batch_size_per_learner: .*rollout": new().training(train_batch_size_per_learner=9),
        "num_envs_per_env_runner: has no effect": new().env_runners(num_envs_per_env_runner=4),
        "env: has no effect with GRPO; use .*task": new().environment("CartPole-v1"),
        "evaluation_num_env_runners: ": new().evaluation(evaluation_num_env_runners=1),
        "rl_module_spec: ": new().rl_module(rl_module_spec=object()),
        "callbacks_on_episode_end: ": new().callbacks(on_episode_end=print),
        "callbacks: Episodes.on_episode_end is never called": new().callbacks(Episodes),
        "min_time_s_per_iteration: ": new().reporting(min_time_s_per_iteration=5),
        "lerning_rate.* unknown key": new().update_from_dict({"lerning_rate": 1}),
        "lagg.*did you mean lag": new().training(grpo={"lagg": 1}),
        "^lr=-1: must be a number >= 0": new().training(lr=-1),
        r"^lr=\[\[0, 0.001\], .*: must be a number; for a schedule, use training\(grpo=": (
            new().training(lr=[[0, 1e-3], [1000, 1e-4]])
        ),
        r"grpo: optim.lr .*; use training\(lr": new().training(grpo={"optim": {"lr": 1e-4}}),
        "grpo: placement .*; use env_runners": new().training(grpo={"placement": "colocated"}),
        "grpo: eval.every .*; use evaluation": new().training(grpo={"eval": {"every": 3}}),
        "grpo: checkpoint.keep .*; use Tune": new().training(grpo={"checkpoint": {"keep": 1}}),
        "lag=1: needs env_runners": new().training(grpo={"lag": 1}),
        "num_learners=1: needs env_runners": new().learners(num_learners=1),
        "num_learners=-1: must be": new().learners(num_learners=-1),
        "num_env_runners=-1: must be": new().env_runners(num_env_runners=-1),
        "optim.schedule=cosine: needs .*rounds": new().training(
            grpo={"optim": {"schedule": "cosine"}}
        ),
    }


@pytest.mark.parametrize("words", unread())
def test_what_means_nothing_here_is_refused_by_name(words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        unread()[words].validate()
    assert "\n" not in str(refused.value)


def test_settings_are_a_mapping() -> None:
    with pytest.raises(ConfigError, match="grpo=5: must be a mapping"):
        GRPOAlgorithmConfig().training(grpo=5)


def test_relative_paths_mean_the_directory_in_which_they_were_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = GRPOAlgorithmConfig().training(grpo={"task": {"keywords_file": "words.txt"}})
    monkeypatch.chdir("/")
    assert trial_data(config)["task"]["keywords_file"] == str(tmp_path / "words.txt")


# ---- A user's path ---------------------------------------------------------------------------


@pytest.fixture
def algorithms(ray_session: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yield a function that builds algorithms, and stop them after the test."""
    monkeypatch.setattr("ray.tune.trainable.trainable.DEFAULT_STORAGE_PATH", str(tmp_path / "r"))
    built = []

    def build(config: AlgorithmConfig) -> GRPO:
        built.append(config.build_algo())
        return built[-1]

    yield build
    for algorithm in built:
        algorithm.stop()
    assert_no_actor_left()


CONTINUED = """
import json, sys
import ray
ray.init(address="local", num_cpus=2, num_gpus=0, include_dashboard=False, log_to_driver=False)
from grpo_trainable.rllib import GRPO
algo = GRPO.from_checkpoint(sys.argv[1])
result = algo.train()
algo.stop()
json.dump(
    {"round": result["training_iteration"], "tokens": result["num_env_steps_sampled_lifetime"],
     "reward": result["reward"]["train_mean"], "loss": result["loss"], "kl": result["kl"],
     "evaluation": result["evaluation"]["env_runners"]["episode_return_mean"]},
    open(sys.argv[2], "w"),
)
"""


def test_an_rllib_users_walk(algorithms: Any, tmp_path: Path) -> None:
    algo = algorithms(config_of().callbacks(Told))
    first, second = algo.train(), algo.train()
    assert [first["training_iteration"], second["training_iteration"]] == [1, 2]
    assert first["mine"] == 1
    assert not second["done"]
    # Columns with RLlib's names.
    assert 0 <= first["env_runners"]["episode_return_mean"] <= 1
    assert first["env_runners"]["num_episodes_lifetime"] == 16
    assert second["env_runners"]["num_episodes_lifetime"] == 32
    assert second["num_env_steps_sampled_lifetime"] > first["num_env_steps_sampled_lifetime"] > 16
    learner = second["learners"]["default_policy"]
    assert learner.keys() >= {"total_loss", "curr_lr", "entropy"}
    assert learner["curr_lr"] == 1e-3
    assert second["timers"]["env_runner_sampling_timer"] == second["time"]["rollout_s"] > 0
    # An evaluation runs when it is due, and on request.
    assert "evaluation" not in first
    due = second["evaluation"]["env_runners"]
    assert due == {"episode_return_mean": second["reward"]["eval_mean"], "num_episodes": 12}
    assert algo.evaluate()["env_runners"] == due
    assert algo.told == ["init", "train_result", "evaluate_end", "train_result", "evaluate_end"]

    path = tmp_path / "checkpoint"
    assert algo.save_to_path(path) == str(path)
    assert read_checkpoint(path / "grpo").state["pipeline"]["learner_round"] == 2
    third, fourth = algo.train(), algo.train()
    measured = algo.evaluate()["env_runners"]
    assert measured == fourth["evaluation"]["env_runners"]
    # A restored algorithm gives the same results again.
    algo.restore_from_path(path)
    again = algo.train()
    assert again["training_iteration"] == 3
    assert told_of(again) == told_of(third)
    assert again["env_runners"]["num_episodes_lifetime"] == 48

    # A new process that has only the checkpoint gives the same results, too.
    algo.save_to_path(path)
    told = tmp_path / "told.json"
    done = subprocess.run(
        [sys.executable, "-c", CONTINUED, str(path), str(told)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(told.read_text()) == {
        "round": 4,
        "tokens": fourth["num_env_steps_sampled_lifetime"],
        "reward": fourth["reward"]["train_mean"],
        "loss": fourth["loss"],
        "kl": fourth["kl"],
        "evaluation": measured["episode_return_mean"],
    }


def test_tunes_own_save_and_restore_work_too(algorithms: Any, tmp_path: Path) -> None:
    algo = algorithms(config_of().callbacks(Told))
    algo.train()
    algo.save(str(tmp_path / "checkpoint"))
    expected = algo.train()
    algo.restore(str(tmp_path / "checkpoint"))
    assert algo.told[-1] == "checkpoint_loaded"
    again = algo.train()
    assert again["training_iteration"] == 2
    assert told_of(again) == told_of(expected)


@pytest.mark.parametrize("runners", [0, 1])
def test_a_trial_through_rllib_is_the_same_bits_as_through_tune(
    algorithms: Any, trainable: Any, runners: int
) -> None:
    placement = "disaggregated" if runners else "colocated"
    config = config_of(k=2, rounds=3).env_runners(num_env_runners=runners)
    grpo = {**SMALL, "eval": {**SMALL["eval"], "every": 2}, "optim": {"lr": 1e-3}}
    ours = trainable({**grpo, "placement": placement, "k": 2, "rounds": 3, "seed": 7})
    theirs = algorithms(config)
    for _ in range(3):
        expected, got = ours.step(), theirs.train()
        assert told_of(got) == told_of(expected)
        assert got["done"] == expected["done"]
    expected = ours.trial.learner_state()
    got = theirs.trial.learner_state()
    for name, tensor in expected.policy.items():
        assert got.policy[name].equal(tensor)
    for name, tensor in expected.optimizer.items():
        assert got.optimizer[name].equal(tensor)
    with_all = expected.counters.keys()
    assert {k: got.counters[k] for k in with_all} == expected.counters


def test_an_algorithm_that_has_ended_trains_no_further(algorithms: Any, tmp_path: Path) -> None:
    algo = algorithms(config_of(rounds=1))
    assert algo.train()["done"]
    with pytest.raises(RuntimeError, match=r"^the trial ended after round 1; restore an earlier"):
        algo.train()
    algo.restore_from_path(algo.save_to_path(tmp_path / "last"))
    assert algo.train() == {"__duplicate__": True, "done": True, "training_iteration": 1}


def test_a_module_has_the_learners_weights_and_law(algorithms: Any) -> None:
    algo = algorithms(config_of())
    algo.train()
    weights = algo.get_weights()["default_policy"]
    module = algo.get_module()
    live = module.policy.trained()
    assert weights.keys() == live.keys()
    assert all((live[name].detach().numpy() == weights[name]).all() for name in weights)
    assert algo.get_module("other") is None
    assert algo.get_weights(["other"]) == {}
    ids = torch.tensor([[5, 6, 7], [8, 9, 4]])
    padded = torch.full((2, module.policy.context_length), -1)
    padded[0, :3], padded[1, :2] = ids[0], ids[1, :2]
    logits = module.forward_inference({"obs": padded})["action_dist_inputs"]
    with torch.no_grad():
        states, head = module.policy.head_operands(module.policy.hidden_states(ids))
    assert torch.allclose(logits[0], states[0, 2] @ head.t() / 0.8, atol=1e-5)
    assert torch.allclose(logits[1], states[1, 1] @ head.t() / 0.8, atol=1e-5)


def test_evaluation_before_the_first_round_is_that_of_round_0(algorithms: Any) -> None:
    algo = algorithms(config_of(lag=1).env_runners(num_env_runners=1))
    first = algo.evaluate()["env_runners"]["episode_return_mean"]
    result = algo.train()
    assert result["reward"]["eval_first"] == first
    assert algo.evaluate()["env_runners"]["num_episodes"] == 12
    result = algo.train()
    assert result["lag"]["max"] == 1
    assert result["eval"]["round"] == 2


def test_tune_finds_it_by_name_and_its_checkpoint_goes_on(
    ray_session: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = tune.Tuner(
        NAME,
        param_space=config_of().training(lr=tune.grid_search([1e-3, 0.0]), grpo={"rounds": 2}),
        run_config=tune.RunConfig(
            name="experiment",
            storage_path=str(tmp_path),
            verbose=0,
            checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=True),
        ),
    ).fit()
    assert [str(error) for error in grid.errors] == []
    assert sorted(result.config["lr"] for result in grid) == [0.0, 1e-3]
    best = grid.get_best_result("env_runners/episode_return_mean", "max")
    assert best.metrics["training_iteration"] == 2
    assert best.metrics["done"]
    assert_no_actor_left()
    monkeypatch.setattr("ray.tune.trainable.trainable.DEFAULT_STORAGE_PATH", str(tmp_path / "r"))
    with best.checkpoint.as_directory() as directory:
        # RLlib can also restore the algorithm without being given its class.
        algo = Algorithm.from_checkpoint(directory)
    assert isinstance(algo, GRPO)
    assert algo.training_iteration == algo.trial.rounds_trained == 2
    # There are no more rounds.
    assert algo.train() == {"__duplicate__": True, "done": True, "training_iteration": 2}
    algo.stop()


# ---- Failures --------------------------------------------------------------------------------


def test_a_sample_with_invalid_settings_fails_alone(ray_session: None, tmp_path: Path) -> None:
    sampled = {"lag": tune.grid_search([0, 1]), "rounds": 1}
    grid = tune.Tuner(
        NAME,
        param_space=config_of().training(grpo=sampled),
        run_config=tune.RunConfig(
            name="experiment",
            storage_path=str(tmp_path),
            verbose=0,
            failure_config=tune.FailureConfig(max_failures=2),
        ),
    ).fit()
    assert [result.error is not None for result in grid] == [False, True]
    (error,) = grid.errors
    assert isinstance(error, ConfigError)
    assert "lag=1: needs env_runners(num_env_runners=…) >= 1" in str(error)
    (failed,) = (result for result in grid if result.error)
    assert (Path(failed.path) / "error.txt").read_text().count("Failure #") == 1
    assert_no_actor_left()


def test_under_tune_an_invalid_config_or_task_fails_the_first_step(
    ray_session: None, tmp_path: Path
) -> None:
    storage: Any = SimpleNamespace(
        trial_fs_path=str(tmp_path), trial_working_directory=str(tmp_path)
    )
    (tmp_path / "tasks.py").write_text("class Rhymes:\n    pass\n")
    for grpo, error, words in (
        ({"lag": 1}, ConfigError, "lag=1: needs env_runners"),
        ({"task": {"name": f"{tmp_path}/tasks.py:Rymes"}}, PluginError, "Rymes: cannot be"),
    ):
        config = GRPOAlgorithmConfig().training(grpo=grpo)
        with pytest.raises(error, match=words):
            config.build_algo()
        algo = GRPO(config.to_dict(), storage=storage)
        with pytest.raises(error, match=words):
            algo.train()
        algo.stop()


def test_a_checkpoint_elsewhere_is_the_same_files(algorithms: Any, tmp_path: Path) -> None:
    algo = algorithms(config_of())
    algo.train()
    # pyarrow cannot tell that this is the machine's own file system.
    elsewhere = SubTreeFileSystem(str(tmp_path), LocalFileSystem())
    algo.save_to_path("far/away", filesystem=elsewhere)
    assert read_checkpoint(tmp_path / "far" / "away" / "grpo").state["learner"]["round"] == 1
    expected = algo.train()
    algo.restore_from_path("far/away", filesystem=elsewhere)
    assert told_of(algo.train()) == told_of(expected)


def test_a_checkpoint_without_our_part_or_with_a_foreign_file_in_it_is_refused(
    algorithms: Any, tmp_path: Path
) -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return (tmp_path / "exploded").touch, ()

    algo = algorithms(config_of())
    algo.train()
    path = tmp_path / "checkpoint"
    algo.save_to_path(path)
    written = {file.name for file in path.rglob("*") if file.is_file()}
    pickled = {"algorithm_state.pkl", "class_and_ctor_args.pkl"}
    assert {name for name in written if name.endswith(".pkl")} == pickled
    (path / "grpo" / "_dict_checkpoint.pkl").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(CheckpointError, match=r"_dict_checkpoint\.pkl: does not belong"):
        algo.restore_from_path(path)
    assert not (tmp_path / "exploded").exists()
    (path / "grpo").rename(tmp_path / "gone")
    other = algorithms(config_of())
    with pytest.raises(
        CheckpointError, match="iteration 1, but the checkpoint's folder grpo/ is missing"
    ):
        other.restore_from_path(path)


def test_an_error_in_the_constructor_says_why_and_leaves_no_actor(ray_session: None) -> None:
    remote = ray.remote(num_cpus=0.1)(GRPO).remote({"grpo": {"lagg": 1}})
    with pytest.raises(Exception, match=r"lagg.*did you mean lag") as failed:
        ray.get(remote.train.remote(), timeout=120)
    assert "SYSTEM_ERROR" not in str(failed.value)
    assert_no_actor_left()


def test_weights_cannot_be_set(ray_session: None) -> None:
    algo = object.__new__(GRPO)
    assert repr(algo) == "GRPO()"
    with pytest.raises(NotImplementedError, match="model"):
        algo.set_weights({})


def test_an_algorithm_that_cannot_be_set_up_leaves_no_actor(
    ray_session: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray.tune.trainable.trainable.DEFAULT_STORAGE_PATH", str(tmp_path / "r"))
    with pytest.raises(ValueError, match=r"nowhere: no such directory"):
        config_of(model={"path": str(tmp_path / "nowhere")}).build_algo()
    assert_no_actor_left()
