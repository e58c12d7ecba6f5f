"""Settings that are each valid by themselves and contradict each other, by the part of a trial."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeAlias

from grpo_trainable.config.schema import CONTROL, GAMES, MIX, fresh_wanted
from grpo_trainable.engines import engine_record
from grpo_trainable.plugins import is_reference
from grpo_trainable.transports import TRANSPORTS

if TYPE_CHECKING:
    from grpo_trainable.config.trial import GRPOConfig

# Whether it applies, the key to blame, and why.
Rule: TypeAlias = tuple[bool, str, str]


def contradictions(config: GRPOConfig) -> Iterator[tuple[str, str]]:
    """The key to blame and the reason, for each contradiction in `config`."""
    for rules in (
        _transport,
        _learners,
        _engine,
        _advantage,
        _token_advantage,
        _own_reward,
        _kl_and_importance,
        _signal,
        _rollout,
        _pools,
        _evaluation,
        _steps,
        _replay,
        _task,
        _environment,
        _control,
        _mix,
    ):
        yield from ((key, reason) for applies, key, reason in rules(config) if applies)


def _transport(config: GRPOConfig) -> Iterator[Rule]:
    colocated = config.placement == "colocated"
    # A user's transport has no record here: it is asked before the trial starts, where its file is.
    transport, r = TRANSPORTS.get(config.transport), config.resources
    in_process = transport is not None and transport.sidedness == "in_process"
    refused = transport and transport.refuses_actors(**r.actors)

    yield config.lag > 0 and colocated, "lag", "needs placement=disaggregated, got colocated"
    yield (
        colocated and not in_process and config.transport != "auto",
        "transport",
        "placement=colocated moves weights inside one actor; valid: auto, in_process",
    )
    yield (
        not colocated and in_process,
        "transport",
        f"needs placement=colocated, got {config.placement}",
    )
    yield bool(refused), "transport", refused or ""


def _learners(config: GRPOConfig) -> Iterator[Rule]:
    r = config.resources
    several, divided = r.num_learners > 1, r.learner_strategy == "fsdp2"
    size = config.rollout.group_size
    whole = "resources.learner_strategy"

    yield (
        several and 0 < r.learner_gpus < 1,
        "resources.learner_gpus",
        f"must be 0, or >= 1, with resources.num_learners={r.num_learners}: each needs its own",
    )
    yield (
        r.elastic and r.learner_gpus > 0,
        "resources.elastic",
        f"must be false with resources.learner_gpus={r.learner_gpus:g}: nothing has shown yet that "
        "learners on GPUs, which NCCL connects, go on without a lost one",
    )
    # Each rank runs as many microbatches as the others: a multiple of rows can be dealt so.
    yield (
        divided and size % r.num_learners != 0,
        "rollout.group_size",
        f"must be a multiple of resources.num_learners={r.num_learners} with {whole}=fsdp2",
    )
    yield (
        r.spread == "one_node_learners" and not several,
        "resources.spread",
        f"one_node_learners needs resources.num_learners >= 2, got {r.num_learners}",
    )
    yield (
        divided and config.task.name == CONTROL,
        whole,
        f"must be replicated with task.name={CONTROL}: its networks are small",
    )
    yield divided and config.has_critic, whole, "must be replicated with loss.advantage=gae"
    yield (
        divided and config.model.lora_rank is not None,
        whole,
        "must be replicated with model.lora_rank: adapters are small",
    )
    yield (
        divided and config.model.dtype != "float32",
        whole,
        f"must be replicated with model.dtype={config.model.dtype}",
    )


def _engine(config: GRPOConfig) -> Iterator[Rule]:
    # `auto` takes an engine that works with everything.
    record = engine_record(config.engine)
    placement = record.refused_placements.get(config.placement)
    transport = TRANSPORTS.get(config.transport)
    lowest, gpus = record.lowest_temperature, config.resources.generator_gpus
    sampler = config.model.sampler_dtype

    yield (
        placement is not None,
        "engine",
        f"does not work with placement={config.placement}: {placement}",
    )
    yield (
        bool(record.refuses_two_sided) and transport is not None and transport.two_sided,
        "transport",
        f"not with engine={config.engine}: {record.refuses_two_sided}; use auto",
    )
    yield (
        gpus > 0 and not record.gpus,
        "resources.generator_gpus",
        f"must be 0 with engine={config.engine}, which samples on CPUs",
    )
    yield (
        config.rollout.slots is not None and config.engine != "auto" and not record.queues,
        "rollout.slots",
        f"must be none with engine={config.engine}; needs engine=torch",
    )
    yield (
        sampler != "float32" and config.engine != "auto" and not record.narrows,
        "model.sampler_dtype",
        f"must be float32 with engine={config.engine}; needs engine=torch",
    )
    yield (
        sampler != "float32" and config.importance_cap is None and not config.corrects_itself,
        "loss.importance_cap",
        f"must be above 0 with model.sampler_dtype={sampler}, by which log-probs change",
    )
    yield (
        config.rollout.overlong == "interrupt"
        and config.engine != "auto"
        and not record.interrupts,
        "rollout.overlong",
        f"not with engine={config.engine}, which cannot feed a text to a response; needs "
        "engine=torch or hf",
    )
    for section in ("rollout", "eval"):
        temperature = config[f"{section}.temperature"]
        yield (
            0 < temperature < lowest,
            f"{section}.temperature",
            f"must be >= {lowest:g} with engine={config.engine}, which rounds lower ones up",
        )


# The parts that every reward has.
PARTS = ("format", "answer")

# Advantages that compare the responses of a group.
_COMPARE_A_GROUP = (
    *("group_std", "group_mean", "rloo", "group_mean_batch_std", "maxrl"),
    "group_to_go",
)


def compares_a_group(advantage: str) -> bool:
    """Whether an advantage learns nothing from a group of equal rewards, as far as its name tells:
    a function of the user's is taken to compare."""
    return advantage in _COMPARE_A_GROUP or is_reference(advantage)


def _advantage(config: GRPOConfig) -> Iterator[Rule]:
    advantage, loss = config.loss.advantage, config.loss.type
    alone = config.rollout.group_size == 1

    yield (
        alone and advantage in _COMPARE_A_GROUP,
        "rollout.group_size",
        f"must be >= 2 with loss.advantage={advantage}: it compares the responses of a group",
    )
    yield (
        alone and config.task.normalize_parts,
        "rollout.group_size",
        "must be >= 2 with task.normalize_parts=true: each part is compared within its group",
    )
    yield (
        alone and advantage == "batch" and config.rollout.prompts == 1,
        "rollout.prompts",
        "must be >= 2 with loss.advantage=batch and rollout.group_size=1",
    )
    yield (
        loss == "no_baseline" and advantage != "none",
        "loss.type",
        f"needs loss.advantage=none, got {advantage}",
    )
    yield (
        loss != "no_baseline" and not is_reference(loss) and advantage == "none",
        "loss.advantage",
        f"needs loss.type=no_baseline or a loss of your own, got {loss}",
    )
    yield (
        advantage == "zero" and config.loss.teacher is None,
        "loss.advantage",
        "needs loss.teacher: without one there would be nothing to learn",
    )


# Losses whose ratio, or whose choice of a weight, is that of a whole response.
_OF_RESPONSES = ("gspo", "gmpo", "topr")


def _token_advantage(config: GRPOConfig) -> Iterator[Rule]:
    advantage, loss = config.loss.advantage, config.loss.type
    of_tokens = advantage in ("gae", "vine", "group_to_go")
    tells_apart = f"loss.advantage={advantage}" if of_tokens else "loss.teacher"

    yield (
        loss == "ppo" and not of_tokens,
        "loss.type",
        f"needs loss.advantage=gae or vine, got {advantage}, with which grpo_clip is the same",
    )
    yield (
        (of_tokens or config.loss.teacher is not None) and loss in _OF_RESPONSES,
        "loss.type",
        f"takes a response as a whole, and {tells_apart} tells its tokens apart; "
        "valid: dapo, cispo, sapo, and others with a ratio for each token",
    )
    yield (
        advantage == "vine" and config.in_mid_batch,
        "weight_update",
        "must be between_batches with loss.advantage=vine: values are those of one policy",
    )
    yield (
        advantage == "vine" and config.rollout.overlong == "interrupt",
        "rollout.overlong",
        "must be score or filter: completions of loss.advantage=vine are not interrupted, so they "
        "would value states by another law",
    )


# Advantages of the task's own reward, and why nothing else may be taken off it.
_OF_THE_TASK = {
    "vine": "loss.advantage=vine values states by the task's reward alone",
    "maxrl": "loss.advantage=maxrl divides by the mean of rewards that are 0 and above",
}


def _own_reward(config: GRPOConfig) -> Iterator[Rule]:
    why = _OF_THE_TASK.get(config.loss.advantage)
    alone = why is not None

    yield alone and config.kl_in_reward, "loss.kl_in", f"must be loss: {why}"
    yield (
        alone and config.rollout.overlong == "penalty",
        "rollout.overlong",
        f"must be score or filter: {why}",
    )
    yield alone and config.task.length_penalty > 0, "task.length_penalty", f"must be 0: {why}"
    yield (
        alone and bool(config.task.part_weights),
        "task.reward_weights",
        f"must be none: {why}",
    )


def _kl_and_importance(config: GRPOConfig) -> Iterator[Rule]:
    cap, floor = config.loss.importance_cap, config.loss.importance_floor

    yield (
        config.loss.kl_estimator == "k1",
        "loss.kl_estimator",
        "has the expected gradient 0 inside the loss, so it would hold nothing near the reference; "
        "valid: k2, whose gradient is the KL's, and k3; or loss.kl_in=reward",
    )
    yield (
        cap is not None and floor is not None and floor >= cap,
        "loss.importance_floor",
        f"must be below loss.importance_cap={cap}",
    )


def _signal(config: GRPOConfig) -> Iterator[Rule]:
    rollout, advantage = config.rollout, config.loss.advantage
    left_out = rollout.zero_advantage != "keep"

    yield (
        left_out and config.loss.teacher is not None,
        "rollout.zero_advantage",
        "must be keep with loss.teacher, from which groups of equal rewards learn as well",
    )
    yield (
        left_out and not compares_a_group(advantage),
        "rollout.zero_advantage",
        f"must be keep with loss.advantage={advantage}, by which groups of equal rewards teach "
        f"something; needs one of {', '.join(_COMPARE_A_GROUP)} or a function of your own",
    )
    yield (
        left_out and rollout.group_size == 1,
        "rollout.zero_advantage",
        "must be keep with rollout.group_size=1: one reward alone is always equal to itself",
    )
    yield (
        config.redraws > 0 and config.most_drawn == rollout.prompts,
        "rollout.oversample",
        "leaves no prompt to draw in place of one of "
        f"rollout.prompts={rollout.prompts}; raise it, or set rollout.zero_advantage=filter",
    )


def _rollout(config: GRPOConfig) -> Iterator[Rule]:
    rollout = config.rollout
    thinking = rollout.max_new_tokens - config.overlong_buffer

    yield (
        rollout.min_new_tokens > rollout.max_new_tokens,
        "rollout.min_new_tokens",
        f"must be <= rollout.max_new_tokens={rollout.max_new_tokens}",
    )
    yield (
        config.overlong_buffer > rollout.max_new_tokens,
        "rollout.overlong_buffer",
        f"must be <= rollout.max_new_tokens={rollout.max_new_tokens}",
    )
    yield (
        rollout.overlong == "interrupt" and config.overlong_buffer >= rollout.max_new_tokens,
        "rollout.overlong_buffer",
        f"must be < rollout.max_new_tokens={rollout.max_new_tokens} with "
        "rollout.overlong=interrupt: else there is no token to think",
    )
    # The learner counts sampled tokens, the sampler all: before the interruption they are the same.
    yield (
        rollout.overlong == "interrupt" and rollout.min_new_tokens - 1 > thinking,
        "rollout.min_new_tokens",
        f"must be <= {thinking + 1} with rollout.overlong=interrupt, which interrupts a response "
        f"after {thinking} tokens",
    )
    yield (
        (rollout.unit_prompts or 1) > rollout.prompts,
        "rollout.unit_prompts",
        f"must be <= rollout.prompts={rollout.prompts}",
    )
    yield (
        (rollout.slots or 0) >= config.most_rows,
        "rollout.slots",
        f"must be < {config.most_rows}, the responses of the largest call of a generator: none "
        "would wait; none decodes all of them at once",
    )
    yield (
        config.resources.num_generators > config.chunks_at_once,
        "resources.num_generators",
        f"only {config.chunks_at_once} can sample at a time, one chunk each; set it to "
        f"{config.chunks_at_once}, "
        + (
            "or raise rollout.prompts"
            if config.unit_prompts == 1
            else "or rollout.unit_prompts to none, which shares a round out"
        ),
    )


def _pools(config: GRPOConfig) -> Iterator[Rule]:
    pools = config.pools

    yield (
        pools.easy + pools.mid + pools.hard == 0,
        "pools.mid",
        "the shares of all pools are 0, so no prompt could be drawn",
    )
    yield (
        pools.hard_below > pools.easy_above,
        "pools.hard_below",
        f"must be <= pools.easy_above={pools.easy_above:g}",
    )


def _evaluation(config: GRPOConfig) -> Iterator[Rule]:
    yield (
        config.eval.temperature == 0 and config.eval.samples > 1,
        "eval.samples",
        "must be 1 with eval.temperature=0, where all responses to a prompt are the same",
    )


def _steps(config: GRPOConfig) -> Iterator[Rule]:
    epochs, prompts = config.optim.epochs, config.rollout.prompts
    split = config.k_mode == "minibatches"
    tokens, longest = config.optim.microbatch_tokens, config.rollout.max_new_tokens

    yield (
        tokens is not None and tokens < longest,
        "optim.microbatch_tokens",
        f"must be >= rollout.max_new_tokens={longest}: a response alone may have as many",
    )
    yield (
        split and config.k % epochs != 0,
        "k",
        f"must be a multiple of optim.epochs={epochs} with k_mode=minibatches",
    )
    yield (
        split and config.k // epochs > prompts,
        "k",
        f"must be <= optim.epochs × rollout.prompts, {epochs * prompts} here: each minibatch needs "
        "a group",
    )


def _replay(config: GRPOConfig) -> Iterator[Rule]:
    sampling, sample = config.buffer_sampling, config.buffer.sample_batches
    replay = config.buffer_capacity > 1
    drawn = sample * config.rollout.prompts

    yield (
        sample > config.buffer_capacity,
        "buffer.sample_batches",
        f"must be <= buffer_capacity={config.buffer_capacity}",
    )
    yield (
        sampling == "recency" and config.buffer_capacity > sample,
        "buffer_capacity",
        f"buffer_sampling=recency never reuses a group unless it is <= "
        f"buffer.sample_batches={sample}; valid: fifo, uniform, mixed sampling",
    )
    # Each draw would be filled by fresh groups alone.
    yield (
        replay and sampling == "fifo" and sample == 1,
        "buffer.sample_batches",
        "must be >= 2 with buffer_sampling=fifo, which never reuses a group while there are "
        "unused ones",
    )
    yield (
        replay
        and sampling == "mixed"
        and fresh_wanted(config.buffer.fresh_fraction, drawn) >= drawn
        and sample == 1,
        "buffer.fresh_fraction",
        "never reuses a group with buffer.sample_batches=1; lower it",
    )
    yield (
        replay and config.max_age == config.lag,
        "buffer.max_age",
        f"a group that was first used at lag={config.lag} is never reused; must be above it",
    )
    yield config.max_age < config.lag, "buffer.max_age", f"must be >= lag={config.lag}"


def _task(config: GRPOConfig) -> Iterator[Rule]:
    task = config.task
    # A generator that waits for a score must not pass for one that hangs itself.
    enough_s = 2 * task.reward_deadline_s

    yield (
        task.length_penalty > 0 and task.length_target is None,
        "task.length_target",
        f"task.length_penalty={task.length_penalty:g} needs the number of tokens to aim at",
    )
    yield (
        (task.length_target or 0) > config.rollout.max_new_tokens,
        "task.length_target",
        f"must be <= rollout.max_new_tokens={config.rollout.max_new_tokens}, which no response is "
        "longer than",
    )
    yield (
        not task.has_custom_reward
        and not config.env.plays
        and not set(task.part_weights) <= set(PARTS)
        and task.name != MIX,  # whose tasks are asked one by one
        "task.reward_weights",
        f"the reward of task.name={task.name} has the parts {' and '.join(PARTS)}",
    )
    yield (
        task.name == "reasoning_gym" and task.dataset is None,
        "task.dataset",
        "task.name=reasoning_gym needs the name of a data set, such as chain_sum",
    )
    yield (
        task.is_scored_apart and not config.env.plays and enough_s > config.resources.deadline_s,
        "resources.deadline_s",
        f"must be >= {enough_s:g}, twice task.reward_deadline_s={task.reward_deadline_s:g}",
    )


def _environment(config: GRPOConfig) -> Iterator[Rule]:
    env, enough_s = config.env, 2 * config.env.step_deadline_s
    can_play = config.engine == "auto" or engine_record(config.engine).plays

    yield (
        config.task.name in GAMES and env.name != config.task.name,
        "env.name",
        f"must be {config.task.name} with task.name={config.task.name}, which only that plays",
    )
    yield (
        env.plays and not can_play,
        "engine",
        f"cannot extend a response by what an environment says; env.name={env.name} needs "
        "engine=torch",
    )
    yield (
        env.plays and config.loss.advantage == "vine",
        "loss.advantage",
        f"must not be vine with env.name={env.name}: completions would need an environment in the "
        "middle of its episode",
    )
    yield (
        env.plays and config.rollout.overlong == "interrupt",
        "rollout.overlong",
        f"must not be interrupt with env.name={env.name}: an episode is answered by its "
        "environment alone",
    )
    yield (
        env.plays and enough_s > config.resources.deadline_s,
        "resources.deadline_s",
        f"must be >= {enough_s:g}, twice env.step_deadline_s={env.step_deadline_s:g}",
    )


def _control(config: GRPOConfig) -> Iterator[Rule]:
    acts, engine = config.task.name == CONTROL, config.engine
    advantage, overlong = config.loss.advantage, config.rollout.overlong

    yield (
        acts and config.model.env is None,
        "model.env",
        f"task.name={CONTROL} needs the environment to act in, such as CartPole-v1",
    )
    yield (
        acts and engine not in ("auto", CONTROL),
        "engine",
        f"samples no actions; task.name={CONTROL} needs engine=auto or {CONTROL}",
    )
    yield (
        not acts and engine == CONTROL,
        "engine",
        f"acts in environments; needs task.name={CONTROL}",
    )
    yield (
        acts and advantage == "vine",
        "loss.advantage",
        f"must not be vine with task.name={CONTROL}: an environment cannot be put back",
    )
    yield (
        not acts and advantage == "group_to_go",
        "loss.advantage",
        f"group_to_go compares episodes step by step; needs task.name={CONTROL}",
    )
    yield (
        acts and overlong == "interrupt",
        "rollout.overlong",
        f"must not be interrupt with task.name={CONTROL}, which has no text",
    )


def _mix(config: GRPOConfig) -> Iterator[Rule]:
    task, tasks = config.task, len(config.parts)
    mixed = tasks > 0

    yield (
        task.name == MIX and not mixed,
        "task.name",
        'needs task.mix, the tasks and their weights, such as {"math": 0.5, "keyword": 0.5}',
    )
    yield (
        mixed and config.env.plays,
        "env.name",
        "must be off with task.mix: the tasks of a mix are answered in one turn",
    )
    yield (
        mixed and task.reward is not None,
        "task.reward",
        "must be none with task.mix: name it beside the weight of the task that it scores",
    )
    yield (
        mixed and config.pools.enabled,
        "pools.enabled",
        "must be false with task.mix: pools draw by difficulty, a mix by its weights",
    )
    yield (
        mixed and config.loss.advantage == "batch",
        "loss.advantage",
        "compares the rewards of different tasks with task.mix; choose one that compares the "
        "responses of a group, such as group_std",
    )
    yield (
        mixed and config.has_critic and config.loss.whiten,
        "loss.whiten",
        "compares the rewards of different tasks with task.mix; set it to false",
    )
    yield (
        config.eval.prompts < tasks,
        "eval.prompts",
        f"must be >= {tasks}, so that each task of task.mix is evaluated",
    )
