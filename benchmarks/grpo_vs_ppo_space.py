"""The question of `grpo_vs_ppo.py`, and GRPO's side of it. PPO's trials are written beside them."""

from search_spaces import Column, SearchSpace
from search_spaces.columns import SPEED

WORKLOAD = {"placement": "colocated", "rounds": 24, "eval.every": 4}

GRPO_VS_PPO = SearchSpace(
    name="grpo_vs_ppo",
    question="GRPO here or PPO in RLlib: which learns more from equal samples, and how fast?",
    arms={
        "grpo": WORKLOAD,
        # PPO takes as many gradient steps on as many responses.
        "grpo_4_steps": {**WORKLOAD, "k": 4, "k_mode": "minibatches"},
    },
    columns=(
        Column(name="training", title="training reward", metric="reward/train_mean", over="late"),
        Column(
            name="length", title="tokens a response", metric="response/length_mean", over="mean"
        ),
        SPEED,
    ),
)
