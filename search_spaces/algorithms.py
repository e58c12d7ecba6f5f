"""Published algorithms as presets, under the names that people use for them.

Each is nothing but other settings. docs/algorithms.md shows this table.
"""

from __future__ import annotations

from search_spaces.preset import Preset

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
            differs="One gradient step a round, in the paper 16. Rewards are 0 and 1, in the paper "
            "±1, so its penalty of 1 is 0.5 here.",
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
            differs="One gradient step a round: at lag 0 its gate never closes.",
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
            differs="The paper trains on rewards of ±1 less a constant. One gradient step a round: "
            "at lag 0 no weight is below 1.",
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
            differs="The authors' code also cuts ρ. One gradient step a round: at lag 0 no token "
            "is masked.",
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
            differs="The authors' code also cuts ρ. One gradient step a round: at lag 0 no token "
            "is masked.",
        ),
        Preset(
            name="m2po",
            meaning="M2PO",
            settings={"loss.type": "m2po", "loss.aggregation": "token_mean"},
            paper="2510.01161",
            differs="At lag 0; the paper is about rollouts that are far behind: add "
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
            # Its KL has no gradient at the first step of a round.
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
            differs="Meant for rewards of 0 and 1.",
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
            differs="β is TRL's.",
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
            differs="In the paper each token answers for the KL of what follows it, here the "
            "response does; there long responses weigh more in mean and standard deviation.",
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
            differs="In the paper long responses weigh more in the standard deviation. β is ours.",
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
            differs="The paper is about a sampler whose log-probs are not the learner's; here the "
            "weights act at a lag.",
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
            differs="Which parts there are, and their weights, is yours to say.",
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
            differs="Its active sampling is dynamic sampling here.",
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
            differs="One gradient step a round, λ = 1.",
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
            differs="States every so many tokens; in the paper at the ends of steps. One gradient "
            "step a round. The authors' code holds the KL of a token at 10.",
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
            differs="The cap is ours.",
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
            differs="The paper bounds no lag. Its baseline is here the mean of the group. A weight "
            "is held at 1 + loss.clip_high, 5.",
        ),
    )
}
