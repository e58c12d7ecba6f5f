"""What the settings of TRL and verl are called here, for those who come from there."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """A setting of another library."""

    library: str
    name: str  # their spelling
    ours: tuple[
        str, ...
    ]  # our keys, or assignments, that do the same; none: there is nothing alike
    hint: str = ""  # how it differs, or why there is nothing alike

    @property
    def advice(self) -> str:
        """What to set here in its place."""
        what = f"{self.library}'s {self.name}"
        if not self.ours:
            return f"{what} has no counterpart here: {self.hint}"
        means = f"{what} is {' and '.join(self.ours)} here"
        return f"{means}: {self.hint}" if self.hint else means


ROUNDS = "in rounds, each of which has k gradient steps"
WHOLE_LAW = "responses are sampled from the whole distribution, whose log-probs the loss needs"
NEVER_CUT = "prompts are never cut; one that does not fit the context of the model is refused"
SCHEDULE = "constant, linear or cosine, over all gradient steps and without warm-up"
AGGREGATION = "token_mean, sequence_mean or constant"
MICROBATCH = (
    "responses of one forward and backward pass; a gradient step has rollout.prompts × "
    "rollout.group_size of them, less with k_mode=minibatches"
)
LENGTH = "or --samples N for so many responses, which are cut into rounds"
ENTROPY = "no loss has an entropy bonus; loss.type=clip_cov and kl_cov keep entropy up"

_TRL: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("model_name_or_path", ("model.path",), ""),
    ("learning_rate", ("optim.lr",), ""),
    ("lr_scheduler_type", ("optim.schedule",), SCHEDULE),
    ("warmup_ratio", (), "optim.schedule has no warm-up"),
    ("warmup_steps", (), "optim.schedule has no warm-up"),
    ("adam_beta1", ("optim.betas",), "both as [0.9, 0.95]"),
    ("adam_beta2", ("optim.betas",), "both as [0.9, 0.95]"),
    ("max_grad_norm", ("optim.grad_clip",), ""),
    ("num_generations", ("rollout.group_size",), ""),
    ("generation_batch_size", ("rollout.prompts",), "in prompts, not in responses"),
    ("per_device_train_batch_size", ("optim.microbatch",), MICROBATCH),
    (
        "gradient_accumulation_steps",
        ("rollout.prompts",),
        "a gradient step has all responses of its batch, in microbatches of optim.microbatch",
    ),
    ("steps_per_generation", ("k", "k_mode=minibatches"), ""),
    (
        "num_iterations",
        ("optim.epochs",),
        "with k_mode=minibatches; else k, with k_mode=same_batch",
    ),
    ("max_completion_length", ("rollout.max_new_tokens",), ""),
    ("max_prompt_length", (), NEVER_CUT),
    ("top_p", (), WHOLE_LAW),
    ("top_k", (), WHOLE_LAW),
    ("min_p", (), WHOLE_LAW),
    ("repetition_penalty", (), WHOLE_LAW),
    ("beta", ("loss.kl_coef",), ""),
    ("epsilon", ("loss.clip",), ""),
    ("epsilon_high", ("loss.clip_high",), ""),
    ("delta", ("loss.dual_clip",), ""),
    (
        "loss_type",
        ("loss.type", "loss.aggregation"),
        "grpo averages by sequence_mean, dapo and bnpo by token_mean, dr_grpo by constant; "
        "--preset NAME sets what a paper does",
    ),
    (
        "importance_sampling_level",
        ("loss.type",),
        "sequence is gspo; loss.importance_level is about weights against stale rollouts",
    ),
    (
        "scale_rewards",
        ("loss.advantage",),
        "group is group_std, none group_mean, mean maxrl; batch divides r - group mean by the "
        "standard deviation of all rewards: write that as an advantage of your own",
    ),
    ("mask_truncated_completions", ("rollout.overlong=filter",), ""),
    ("reward_funcs", ("task.reward",), "my_rewards.py:score"),
    ("sapo_temperature_pos", ("loss.tau_positive",), ""),
    ("sapo_temperature_neg", ("loss.tau_negative",), ""),
    ("use_vllm", ("engine=vllm", "placement=disaggregated"), ""),
    ("vllm_importance_sampling_correction", ("loss.importance_cap",), "0 turns it off"),
    ("lora_r", ("model.lora_rank",), ""),
    ("lora_target_modules", ("model.lora_targets",), ""),
    ("bf16", ("model.dtype=bfloat16",), "of the body of the model; optimizer and head are float32"),
    ("max_steps", ("rounds",), f"{ROUNDS}; {LENGTH}"),
    ("num_train_epochs", ("rounds",), f"passes over the prompts are not counted; {LENGTH}"),
    ("eval_steps", ("eval.every",), ROUNDS),
    ("save_steps", ("checkpoint.every",), ROUNDS),
    ("save_total_limit", ("checkpoint.keep",), ""),
    ("logging_steps", (), "every round is logged"),
    ("output_dir", (), "it is STORAGE/NAME, of --storage and --name"),
)

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_VERL: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("data.train_files", ("task.train_file",), "JSONL"),
    ("data.val_files", ("task.eval_file",), "JSONL"),
    ("data.train_batch_size", ("rollout.prompts",), ""),
    ("data.max_prompt_length", (), NEVER_CUT),
    ("data.max_response_length", ("rollout.max_new_tokens",), ""),
    ("actor_rollout_ref.model.path", ("model.path",), ""),
    (
        "actor_rollout_ref.model.enable_gradient_checkpointing",
        ("model.gradient_checkpointing",),
        "",
    ),
    ("actor_rollout_ref.model.use_remove_padding", ("model.packing",), ""),
    ("actor_rollout_ref.model.lora_rank", ("model.lora_rank",), ""),
    (f"{_ACTOR}.optim.lr", ("optim.lr",), ""),
    (f"{_ACTOR}.optim.weight_decay", ("optim.weight_decay",), ""),
    (f"{_ACTOR}.grad_clip", ("optim.grad_clip",), ""),
    (
        f"{_ACTOR}.ppo_mini_batch_size",
        ("k", "k_mode=minibatches"),
        "k is train_batch_size / ppo_mini_batch_size",
    ),
    (f"{_ACTOR}.ppo_micro_batch_size_per_gpu", ("optim.microbatch",), MICROBATCH),
    (f"{_ACTOR}.ppo_max_token_len_per_gpu", ("optim.microbatch_tokens",), ""),
    (f"{_ACTOR}.use_dynamic_bsz", ("optim.microbatch_tokens",), "the tokens of one pass"),
    (f"{_ACTOR}.ppo_epochs", ("optim.epochs",), "with k_mode=minibatches"),
    (f"{_ACTOR}.clip_ratio", ("loss.clip",), ""),
    (f"{_ACTOR}.clip_ratio_low", ("loss.clip",), ""),
    (f"{_ACTOR}.clip_ratio_high", ("loss.clip_high",), ""),
    (f"{_ACTOR}.clip_ratio_c", ("loss.dual_clip",), ""),
    (f"{_ACTOR}.loss_agg_mode", ("loss.aggregation",), AGGREGATION),
    (f"{_ACTOR}.policy_loss.loss_mode", ("loss.type",), ""),
    (f"{_ACTOR}.entropy_coeff", (), ENTROPY),
    (f"{_ACTOR}.use_kl_loss", ("loss.kl_coef",), "0 is without; loss.kl_in says where it counts"),
    (f"{_ACTOR}.kl_loss_coef", ("loss.kl_coef",), ""),
    (
        f"{_ACTOR}.kl_loss_type",
        ("loss.kl_estimator",),
        "mse is k2, low_var_kl k3; kl has the expected gradient 0",
    ),
    (f"{_ROLLOUT}.name", ("engine",), ""),
    (f"{_ROLLOUT}.n", ("rollout.group_size",), ""),
    (f"{_ROLLOUT}.temperature", ("rollout.temperature",), ""),
    (f"{_ROLLOUT}.top_p", (), WHOLE_LAW),
    (f"{_ROLLOUT}.top_k", (), WHOLE_LAW),
    (f"{_ROLLOUT}.response_length", ("rollout.max_new_tokens",), ""),
    (f"{_ROLLOUT}.max_num_seqs", ("rollout.slots",), ""),
    (f"{_ROLLOUT}.val_kwargs.n", ("eval.samples",), ""),
    (f"{_ROLLOUT}.val_kwargs.temperature", ("eval.temperature",), ""),
    ("critic.optim.lr", ("critic.lr",), ""),
    ("critic.cliprange_value", ("critic.clip",), ""),
    ("algorithm.gamma", ("loss.gamma",), ""),
    ("algorithm.lam", ("loss.gae_lambda",), ""),
    (
        "algorithm.adv_estimator",
        ("loss.advantage",),
        "grpo is group_std, reinforce_plus_plus batch, reinforce_plus_plus_baseline "
        "group_mean_batch_std; rloo and gae are called so here too",
    ),
    (
        "algorithm.norm_adv_by_std_in_grpo",
        ("loss.advantage",),
        "true is group_std, false group_mean",
    ),
    ("algorithm.use_kl_in_reward", ("loss.kl_in=reward",), "with a loss.kl_coef"),
    ("algorithm.kl_ctrl.kl_coef", ("loss.kl_coef",), ""),
    ("algorithm.kl_ctrl.target_kl", ("loss.kl_target",), "in nats of a response"),
    ("algorithm.filter_groups.enable", ("rollout.zero_advantage=resample",), ""),
    ("algorithm.filter_groups.max_num_gen_batches", ("rollout.redraws",), ""),
    ("custom_reward_function.path", ("task.reward",), "my_rewards.py:score"),
    ("trainer.total_training_steps", ("rounds",), f"{ROUNDS}; {LENGTH}"),
    ("trainer.total_epochs", ("rounds",), f"passes over the prompts are not counted; {LENGTH}"),
    ("trainer.test_freq", ("eval.every",), ROUNDS),
    ("trainer.save_freq", ("checkpoint.every",), ROUNDS),
    ("trainer.max_actor_ckpt_to_keep", ("checkpoint.keep",), ""),
    (
        "trainer.n_gpus_per_node",
        ("resources.learner_gpus", "resources.generator_gpus"),
        "a trial's",
    ),
    ("trainer.project_name", (), "an experiment has --name"),
    ("trainer.experiment_name", (), "an experiment has --name"),
)

TRL = {name: Elsewhere("TRL", name, ours, hint) for name, ours, hint in _TRL}
VERL = {name: Elsewhere("verl", name, ours, hint) for name, ours, hint in _VERL}
PAGE = "docs/howto/from-trl.md"


def advice_for(key: str) -> str | None:
    """What to set in place of a key that TRL or verl has, also where somebody gave TRL's name one
    of our sections; None for other keys."""
    found = VERL.get(key) or TRL.get(key.rpartition(".")[2])
    if found is not None:
        return found.advice
    if any(name.startswith(f"{key}.") for name in VERL):
        return f"a section of verl's; {PAGE} says what its keys are called here"
    return None
