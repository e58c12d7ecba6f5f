"""Train RLlib's PPO in a Gymnasium environment, to compare it with this package's control policies.

A curve is a list of (environment steps so far, mean return of held-out episodes). Held-out episodes
use the most likely actions.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium.wrappers import TransformObservation
from ray import tune
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig

from grpo_trainable.control.arm import Arm
from reports.records import TrialRecord

EPISODES = 32  # held-out episodes in an evaluation
EVALUATIONS = 8  # evaluations in training
# Settings of RLlib's tuned examples cartpole_ppo.py and pendulum_ppo.py, from the directory
# rllib/tuned_examples/ppo in commit 06ec0d18 of ray-project/ray. There is no example for
# the robot arm. It gets the settings of the pendulum, this package's gamma, and convolutions that
# fit images of 32 x 32 pixels.
TRAINING: dict[str, dict[str, Any]] = {
    "cartpole": {
        **{"gamma": 0.99, "lr": 3e-4, "num_epochs": 6},
        **{"vf_loss_coeff": 0.01, "use_kl_loss": True},
    },
    "pendulum": {"lr": 3e-4, "lambda_": 0.1, "vf_clip_param": 10.0, "num_epochs": 6},
    "arm": {"lr": 3e-4, "lambda_": 0.1, "vf_clip_param": 10.0, "num_epochs": 6, "gamma": 0.95},
}
# The examples sample in two processes. Here one process runs the environments of both.
ENVIRONMENTS = {"cartpole": 2, "pendulum": 20, "arm": 20}
MODELS = {
    "cartpole": DefaultModelConfig(
        fcnet_hiddens=[32], fcnet_activation="linear", vf_share_layers=True
    ),
    "pendulum": DefaultModelConfig(fcnet_activation="relu"),
    "arm": DefaultModelConfig(
        conv_filters=[(16, 8, 4), (32, 4, 2), (32, 3, 1)],
        conv_activation="relu",
        fcnet_activation="relu",
    ),
}


def make(name: str) -> gymnasium.Env:
    """Return an environment by its name in `TRAINING`."""
    if name == "arm":
        space = gymnasium.spaces.Box(0.0, 1.0, Arm().observation_space.shape)
        return TransformObservation(Arm(), lambda seen: np.float32(seen) / 255, space)
    return gymnasium.make({"cartpole": "CartPole-v1", "pendulum": "Pendulum-v1"}[name])


def of_trial(trial: TrialRecord) -> list[tuple[float, float]]:
    """Return the curve of a trial of this package. Each action counts as one environment step."""
    steps, at = 0.0, {0: 0.0}
    trained = 0.0
    for row in trial.rows:
        responses = (row["count/trained"] - trained) * trial.config.rollout.group_size
        trained = row["count/trained"]
        steps += responses * row["response/length_mean"]
        at[int(row["training_iteration"])] = steps
    return [(at[round_], reward) for round_, reward, _ in trial.evaluated()]


def of_rllib(name: str, seed: int, steps: float) -> list[tuple[float, float]]:
    """Train RLlib's PPO for a number of environment steps, and return its curve."""
    tune.register_env(name, lambda settings: make(name))
    config = (
        PPOConfig()
        .environment(name)
        .env_runners(num_env_runners=0, num_envs_per_env_runner=ENVIRONMENTS[name])
        .training(**TRAINING[name])
        .rl_module(model_config=MODELS[name])
        .evaluation(
            evaluation_interval=None,
            evaluation_num_env_runners=0,
            evaluation_duration=EPISODES,
            evaluation_duration_unit="episodes",
            evaluation_config=PPOConfig.overrides(explore=False),
        )
        .debugging(seed=seed)
    )
    algorithm = config.build_algo()
    try:
        curve = [(0.0, _held_out(algorithm))]
        taken = 0.0
        while taken < steps:
            taken = float(algorithm.train()["num_env_steps_sampled_lifetime"])
            if taken >= min(steps, len(curve) * steps / EVALUATIONS):
                curve.append((taken, _held_out(algorithm)))
        return curve
    finally:
        algorithm.stop()


def _held_out(algorithm: Algorithm) -> float:
    return float(algorithm.evaluate()["env_runners"]["episode_return_mean"])
