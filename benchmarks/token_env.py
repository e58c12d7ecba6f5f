"""Train RLlib's PPO on `TokenEnv`, to compare it with this package's GRPO and PPO on a task.

A curve is a list of (responses so far, mean reward of the newest `WINDOW` of them). All responses
are sampled for training, at the temperature of the trials.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import pyarrow.parquet as pq

from grpo_trainable.config import GRPOConfig
from reports.records import TrialRecord

WINDOW = 256  # responses
POINTS = 8  # points of a trial's curve


def of_trial(trial: TrialRecord) -> list[tuple[float, float]]:
    """Return the curve of a trial of this package."""
    rewards = [
        reward
        for path in sorted((trial.directory / "rollouts").glob("*.parquet"))
        for reward in pq.read_table(path, columns=["reward"]).column("reward").to_pylist()
    ]
    return curve_of(rewards)


def curve_of(rewards: Sequence[float]) -> list[tuple[float, float]]:
    """Return the curve for rewards in the order in which their responses were sampled."""
    ends = [len(rewards) * point // POINTS for point in range(1, POINTS + 1)]
    return [(float(end), statistics.fmean(rewards[max(0, end - WINDOW) : end])) for end in ends]


def of_rllib(trial: GRPOConfig, responses: int) -> list[tuple[float, float]]:
    """Train RLlib's PPO for a number of responses, and return its curve.

    As in the trial, there is one gradient step for each batch, and no discount. The number of
    tokens in a batch is the largest number that a round of the trial can have.
    """
    # These imports are not at the top, because `curve_of` does not need the extra `rllib`.
    from ray.rllib.algorithms.ppo import PPOConfig

    from grpo_trainable.rllib import TokenEnv, language_model_spec

    settings = {
        "seed": trial.seed,
        "rollout": {"max_new_tokens": trial.rollout.max_new_tokens},
    }
    at_once = trial.rollout.prompts * trial.rollout.group_size
    size = at_once * trial.rollout.max_new_tokens
    config = (
        PPOConfig()
        .environment(TokenEnv, env_config=settings)
        .env_runners(num_env_runners=0, num_envs_per_env_runner=at_once)
        .training(
            train_batch_size_per_learner=size,
            minibatch_size=size,
            num_epochs=1,
            gamma=1.0,
            lambda_=1.0,
            lr=trial.optim.lr,
            grad_clip=1.0,
            clip_param=0.2,
            use_kl_loss=False,
        )
        .rl_module(rl_module_spec=language_model_spec(settings))
        .reporting(metrics_num_episodes_for_smoothing=WINDOW)
        .debugging(seed=trial.seed)
    )
    algorithm = config.build_algo()
    try:
        curve: list[tuple[float, float]] = []
        done = 0.0
        while done < responses:
            said = algorithm.train()["env_runners"]
            done = float(said["num_episodes_lifetime"])
            curve.append((done, float(said["episode_return_mean"])))
        return curve
    finally:
        algorithm.stop()
