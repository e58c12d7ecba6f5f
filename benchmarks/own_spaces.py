"""Search spaces of the benchmarks: shipped spaces with fewer arms, and spaces for campaigns.

`launch/tune.py --space benchmarks/own_spaces.py:LAG_EXACT_SHORT` runs one of these spaces.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from search_spaces.columns import DRIFT, LEARNING, SPEED, Column
from search_spaces.presets import PRESETS
from search_spaces.search_space import SearchSpace
from search_spaces.spaces import SPACES


def short(name: str, *arms: str) -> SearchSpace:
    """Return a shipped space with only some of its arms."""
    space = SPACES[name]
    return replace(space, name=f"{name}_short", arms={arm: space.arms[arm] for arm in arms})


GRADIENT_STEPS_SHORT = short("gradient_steps", "k1", "same_batch_k4", "minibatches_k4")
LAG_EXACT_SHORT = short("lag_exact", "lag0", "lag2", "lag8")
REPLAY_SHORT = short("replay", "no_replay", "capacity2", "capacity4_mixed")
ASYNC_VS_SYNC_SHORT = short("async_vs_sync", "sync", "async_k1", "colocated_k8")
SHORT = {
    space.name: space
    for space in (GRADIENT_STEPS_SHORT, LAG_EXACT_SHORT, REPLAY_SHORT, ASYNC_VS_SYNC_SHORT)
}

# ---- What does a critic buy? ---------------------------------------------------------------------


def algorithm(preset: str, **settings: Any) -> dict[str, Any]:
    """Return a preset's settings with changes. KL and aggregation are the same for all arms."""
    same = {"placement": "colocated", "loss.kl_coef": 0.0, "loss.aggregation": "token_mean"}
    return {**PRESETS[preset].settings, **same, **settings}


FOUR_STEPS = {"k": 4, "k_mode": "minibatches"}

CRITIC = SearchSpace(
    name="critic",
    question="does a value for each state help, from a critic or from completions, at equal "
    "numbers of samples?",
    arms={
        "grpo": algorithm("grpo"),
        "ppo": algorithm("ppo"),
        "ppo_lambda95": algorithm("ppo", **{"loss.gae_lambda": 0.95}),
        "ppo_shared": algorithm("ppo", **{"critic.body": "shared"}),
        "ppo_slow_critic": algorithm("ppo", **{"critic.lr": 2e-4}),
        "ppo_fast_critic": algorithm("ppo", **{"critic.lr": 5e-3}),
        "grpo_k4": algorithm("grpo", **FOUR_STEPS),
        "ppo_k4": algorithm("ppo", **FOUR_STEPS),
        "vineppo": algorithm("vineppo"),
    },
    columns=(
        Column(
            name="explained_variance",
            title="explained variance",
            metric="critic/explained_variance",
            over="late",
        ),
        *LEARNING,
        *DRIFT,
        SPEED,
    ),
)

# ---- GRPO and PPO for control --------------------------------------------------------------------

PPO_OF_CONTROL = {
    "placement": "colocated",
    **{"loss.type": "ppo", "loss.advantage": "gae", "loss.gae_lambda": 0.95},
}
# A quarter of the default batch, and eight steps on each batch: 32 times as many gradient steps as
# in `grpo`, and eight times as many as in `ppo`.
MANY_STEPS = {"rollout.prompts": 2, "k": 8, "k_mode": "same_batch"}

CONTROL = SearchSpace(
    name="control",
    question="does GRPO or PPO learn faster in this environment?",
    arms={
        "grpo": {"placement": "colocated"},
        "ppo": {**PPO_OF_CONTROL, **FOUR_STEPS},
        "grpo_steps": {"placement": "colocated", **MANY_STEPS},
        "ppo_steps": {**PPO_OF_CONTROL, **MANY_STEPS},
    },
    columns=(*LEARNING, SPEED),
)
OWN = {**SHORT, CRITIC.name: CRITIC, CONTROL.name: CONTROL}
