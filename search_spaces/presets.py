"""Presets: named settings that `--preset` adds to every arm of a search space.

A preset of a published algorithm has the common name of the algorithm. docs/algorithms.md lists
these presets in a table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from grpo_trainable.config import GRPOConfig
from search_spaces.columns import DRIFT, SPEED
from search_spaces.search_space import SearchSpace


@dataclass(frozen=True, kw_only=True)
class Preset:
    """Named settings. Arms and `--set` override them."""

    name: str
    meaning: str  # a noun phrase that completes “what is the result of …?”
    settings: Mapping[str, Any]  # dotted key -> value
    paper: str | None = None  # the arXiv number, or an address
    differs: str = ""  # differences from the paper, in sentences
    # Keys that name files. The preset is meant for a task that reads at least one of these files.
    needs: tuple[str, ...] = ()

    def lacks(self, trial: GRPOConfig) -> str | None:
        """Return the key that a trial should set but does not.

        Returns:
            The key, or None if no key is missing or the preset is meant for a different task.
        """
        if not self.needs or trial.task.name != self.settings["task.name"]:
            return None
        return self.needs[0] if all(trial[key] is None for key in self.needs) else None

    @property
    def address(self) -> str | None:
        """Address of the paper."""
        if self.paper is None or self.paper.startswith("https:"):
            return self.paper
        return f"https://arxiv.org/abs/{self.paper}"

    @property
    def space(self) -> SearchSpace:
        """A space with a single trial of the preset, for commands that name no search space."""
        return SearchSpace(
            name=self.name,
            question=f"what is the result of {self.meaning}?",
            arms={self.name: {}},
            columns=(SPEED, *DRIFT),
        )

    def under(self, space: SearchSpace) -> SearchSpace:
        """Return the space with these settings added to each arm. The arm's own settings win."""
        arms = {arm: {**self.settings, **keys} for arm, keys in space.arms.items()}
        return replace(space, arms=arms)


# ---- Published algorithms ------------------------------------------------------------------------

MINIBATCHES = {"k": 4, "k_mode": "minibatches"}

ALGORITHMS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset(
            name="grpo",
            meaning="GRPO",
            settings={"loss.kl_coef": 0.04},
            paper="2402.03300",
        ),
        Preset(
            name="dr_grpo",
            meaning="Dr. GRPO",
            settings={"loss.advantage": "group_mean", "loss.aggregation": "constant"},
            paper="2503.20783",
        ),
        Preset(
            name="dapo",
            meaning="DAPO",
            settings={
                "loss.type": "dapo",
                "loss.aggregation": "token_mean",
                "rollout.overlong": "penalty",
                "rollout.overlong_penalty": 0.5,
                "rollout.zero_advantage": "resample",
            },
            paper="2503.14476",
            differs="There is one gradient step per round; the paper takes 16. Rewards are 0 and 1 "
            "here and ±1 in the paper, so the paper's penalty of 1 becomes 0.5 here.",
        ),
        Preset(
            name="cispo",
            meaning="CISPO",
            settings={"loss.type": "cispo", "loss.aggregation": "token_mean"},
            paper="2506.13585",
            differs="The paper gives no number for ε_high.",
        ),
        Preset(
            name="gspo",
            meaning="GSPO",
            settings={"loss.type": "gspo", **MINIBATCHES},
            paper="2507.18071",
        ),
        Preset(
            name="gmpo",
            meaning="GMPO",
            settings={"loss.type": "gmpo", **MINIBATCHES},
            paper="2507.20673",
        ),
        Preset(
            name="sapo",
            meaning="SAPO",
            settings={"loss.type": "sapo"},
            paper="2511.20347",
            differs="With one gradient step per round, the gate never closes at lag 0.",
        ),
        Preset(
            name="topr",
            meaning="TOPR",
            settings={
                "loss.type": "topr",
                "loss.advantage": "group_mean",
                "loss.aggregation": "constant",
            },
            paper="2503.14286",
            differs="The paper trains on rewards of ±1 minus a constant. With one gradient step "
            "per round, no weight is below 1 at lag 0.",
        ),
        Preset(
            name="dppo_tv",
            meaning="DPPO with the total variation",
            settings={
                "loss.type": "dppo_tv",
                "loss.advantage": "group_mean",
                "loss.aggregation": "constant",
            },
            paper="2602.04879",
            differs="The authors' code also caps ρ. With one gradient step per round, no token is "
            "masked at lag 0.",
        ),
        Preset(
            name="dppo_kl",
            meaning="DPPO with the KL",
            settings={
                "loss.type": "dppo_kl",
                "loss.advantage": "group_mean",
                "loss.aggregation": "constant",
            },
            paper="2602.04879",
            differs="The authors' code also caps ρ. With one gradient step per round, no token is "
            "masked at lag 0.",
        ),
        Preset(
            name="m2po",
            meaning="M2PO",
            settings={"loss.type": "m2po", "loss.aggregation": "token_mean"},
            paper="2510.01161",
            differs="The preset runs at lag 0, but the paper is about very stale rollouts: add "
            "`placement=disaggregated lag=8`.",
        ),
        Preset(
            name="clip_cov",
            meaning="Clip-Cov",
            settings={"loss.type": "clip_cov", "loss.aggregation": "token_mean"},
            paper="2505.22617",
        ),
        Preset(
            name="kl_cov",
            meaning="KL-Cov",
            # The KL of this loss has no gradient at the first step of a round, so there are several
            # steps.
            settings={"loss.type": "kl_cov", "loss.aggregation": "token_mean", **MINIBATCHES},
            paper="2505.22617",
        ),
        Preset(
            name="maxrl",
            meaning="MaxRL",
            settings={
                "loss.type": "reinforce_with_baseline",
                "loss.advantage": "maxrl",
                "loss.aggregation": "constant",
            },
            paper="2602.02710",
            differs="The preset is meant for rewards of 0 and 1.",
        ),
        Preset(
            name="rloo",
            meaning="RLOO",
            settings={
                "loss.type": "reinforce_with_baseline",
                "loss.advantage": "rloo",
                "loss.aggregation": "constant",
                "loss.kl_coef": 0.05,
                "loss.kl_in": "reward",
            },
            paper="2402.14740",
            differs="β is taken from TRL.",
        ),
        Preset(
            name="reinforce",
            meaning="REINFORCE",
            settings={
                "loss.type": "no_baseline",
                "loss.advantage": "none",
                "loss.aggregation": "constant",
            },
            paper="https://doi.org/10.1007/BF00992696",
        ),
        Preset(
            name="reinforce_pp",
            meaning="REINFORCE++",
            settings={
                "loss.advantage": "batch",
                "loss.kl_coef": 0.01,
                "loss.kl_in": "reward",
            },
            paper="2501.03262",
            differs="In the paper, a token's advantage is lowered by the KL of this token and of "
            "the tokens after it. Here, it is lowered by the KL of the whole response. In the "
            "paper, long responses weigh more in the mean and the standard deviation.",
        ),
        Preset(
            name="reinforce_pp_baseline",
            meaning="REINFORCE++ with the group's mean as baseline",
            settings={
                "loss.advantage": "group_mean_batch_std",
                "loss.kl_coef": 0.01,
                "loss.kl_estimator": "k2",
            },
            paper="2501.03262",
            differs="In the paper, long responses weigh more in the standard deviation. β is our "
            "choice.",
        ),
        Preset(
            name="icepop",
            meaning="GRPO with IcePop",
            settings={
                "loss.importance_cap": 5,
                "loss.importance_floor": 0.5,
                "loss.importance_rule": "mask",
            },
            paper="2510.18855",
            differs="The paper is about a sampler whose log-probs differ from the learner's. Here "
            "the weights have an effect only with a lag.",
        ),
        Preset(
            name="gdpo",
            meaning="GDPO",
            settings={
                "loss.advantage": "batch",
                "task.normalize_parts": True,
                "task.reward_weights": '{"answer":1,"format":1}',
            },
            paper="2601.05242",
            differs="The parts of the reward and their weights are your choice.",
        ),
        Preset(
            name="olmo_rl",
            meaning="OlmoRL",
            settings={
                "loss.advantage": "group_mean",
                "loss.aggregation": "token_mean",
                "loss.clip_high": 0.272,
                "loss.importance_cap": 2,
                "rollout.zero_advantage": "resample",
            },
            paper="2512.13961",
            differs="Dynamic sampling replaces the paper's active sampling.",
        ),
        Preset(
            name="ppo",
            meaning="PPO with a critic",
            settings={
                "loss.type": "ppo",
                "loss.advantage": "gae",
                "loss.aggregation": "token_mean",
            },
            paper="1707.06347",
            differs="There is one gradient step per round, and λ = 1.",
        ),
        Preset(
            name="vineppo",
            meaning="VinePPO",
            settings={
                "loss.type": "ppo",
                "loss.advantage": "vine",
                "loss.aggregation": "token_mean",
                "loss.kl_coef": 1e-4,
                "vine.samples": 9,
            },
            paper="2410.01679",
            differs="States are a fixed number of tokens apart; in the paper they are at the ends "
            "of steps. There is one gradient step per round. The authors' code caps the KL of a "
            "token at 10.",
        ),
        Preset(
            name="rlhf_ppo",
            meaning="PPO with a critic and a target for the KL to the starting policy",
            settings={
                "loss.type": "ppo",
                "loss.advantage": "gae",
                "loss.gae_lambda": 0.95,
                "loss.aggregation": "token_mean",
                "loss.kl_coef": 0.1,
                "loss.kl_in": "reward",
                "loss.kl_target": 6,
            },
            paper="1909.08593",
            differs="There is one gradient step per round. The initial β and the target are our "
            "choice.",
        ),
        Preset(
            name="rlhf_grpo",
            meaning="GRPO with a target for the KL to the starting policy",
            settings={
                "loss.kl_coef": 0.1,
                "loss.kl_in": "reward",
                "loss.kl_target": 6,
            },
            paper="2402.03300",
            differs="The paper puts the KL into the loss, with a fixed β. Here β is adapted as in "
            "`rlhf_ppo`.",
        ),
        Preset(
            name="areal",
            meaning="AReaL",
            settings={
                "placement": "disaggregated",
                "lag": 4,
                "weight_update": "interrupt_recompute",
                "loss.importance_cap": 2,
            },
            paper="2505.24298",
            differs="The cap is our choice.",
        ),
        Preset(
            name="pipeline_rl",
            meaning="PipelineRL",
            settings={
                "placement": "disaggregated",
                "lag": 1,
                "weight_update": "in_flight",
                "loss.type": "cispo",
                "loss.clip_high": 4,
                "loss.advantage": "group_mean",
                "loss.aggregation": "constant",
            },
            paper="2509.19128",
            differs="The paper sets no bound on the lag. The baseline is the mean of the group "
            "here. A weight is limited to 1 + loss.clip_high, which is 5.",
        ),
    )
}

# ---- A course ----------------------------------------------------------------------------------

# The settings of the alignment assignment of CSE 599-O, adapted from assignment 5 of Stanford's
# CS336.
COURSE_KEYWORD = Preset(
    name="course_keyword",
    meaning="a university course's settings for stories with a keyword",
    settings={
        "task.name": "keyword",
        "rounds": 100,
        "rollout.group_size": 4,
        "rollout.temperature": 0.8,
        "rollout.max_new_tokens": 60,
        "loss.type": "grpo_clip",
        "loss.advantage": "group_std",
        "loss.advantage_eps": 1e-8,
        "optim.lr": 5e-4,
    },
)
COURSE_MATH = Preset(
    name="course_math",
    meaning="a university course's settings for MATH with Qwen2.5-Math-1.5B",
    needs=("task.train_file", "task.eval_file"),
    settings={
        "model.path": "Qwen/Qwen2.5-Math-1.5B",
        "model.dtype": "bfloat16",
        "task.name": "math",
        "task.template": "r1_zero",
        "rounds": 200,
        "rollout.prompts": 32,  # 256 responses per round
        "rollout.group_size": 8,
        "rollout.temperature": 1.0,
        "rollout.min_new_tokens": 4,
        "rollout.max_new_tokens": 1024,
        "eval.temperature": 1.0,
        "loss.advantage": "group_std",
        "loss.advantage_eps": 1e-6,
        "optim.lr": 1e-5,
        "optim.betas": (0.9, 0.95),
        "optim.weight_decay": 0.0,
        "optim.grad_clip": 1.0,
        "optim.microbatch": 2,  # 128 accumulation steps
    },
)

PRESETS: dict[str, Preset] = {
    **{preset.name: preset for preset in (COURSE_KEYWORD, COURSE_MATH)},
    **ALGORITHMS,
}
