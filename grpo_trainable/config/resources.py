"""The `resources` section: the actors of a trial and the CPUs and GPUs that they reserve."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from grpo_trainable.config.conditions import (
    COLOCATED,
    CONTROL,
    DISAGGREGATED,
    NOT_PLAYED,
    Condition,
    Config,
    Conflict,
    at_least,
    one_of,
)
from grpo_trainable.config.foreign_names import trl, verl
from grpo_trainable.config.task import PROCESSES_OF_ITS_OWN, SCORED_APART
from grpo_trainable.config.values import Settings, choice, flag, gpus, integer, number

_SEVERAL_LEARNERS = at_least("resources.num_learners", 2)
_SAMPLES_ON_GPU = Condition(
    keys=("resources.generator_gpus", "resources.worker_gpus"),
    needs="resources.generator_gpus > 0 or resources.worker_gpus > 0",
    holds=lambda *gpus: any(gpus),
)
_HAS_REFERENCE = Condition(
    keys=("loss.kl_monitor", "loss.kl_coef"),
    needs="loss.kl_monitor=true or loss.kl_coef > 0",
    holds=lambda monitored, coefficient: monitored or coefficient > 0,
)


@dataclass(frozen=True, kw_only=True)
class ResourceSettings(Settings):
    """Actors of a trial and the resources that they reserve."""

    SECTION: ClassVar[str] = "resources"

    num_generators: int = integer(
        1, "Number of generator actors in a trial.", minimum=1, read_if=DISAGGREGATED
    )
    reference: str = choice(
        ("learner", "generator"),
        "Actor that runs the forward pass of the frozen reference. With lag >= 1, a generator "
        "has time for this pass while it waits for the learner.",
        read_if=(DISAGGREGATED, _HAS_REFERENCE),
    )
    generator_cpus: float | None = number(
        None,
        "CPUs of each generator, and of a colocated worker while it samples. `none` means 0.95 / "
        "num_generators.",
        minimum=0.01,
    )
    generator_gpus: float = gpus(
        0.0,
        "GPUs of each generator. With engine=vllm and 2 or more GPUs, vLLM divides the model among "
        "them (tensor parallelism).",
        read_if=DISAGGREGATED,
        also_called=(
            trl("vllm_tensor_parallel_size"),
            verl("rollout.tensor_model_parallel_size"),
        ),
    )
    num_learners: int = integer(
        1,
        "Number of learner actors in a trial. The learners share the rows of each gradient step.",
        minimum=1,
        read_if=DISAGGREGATED,
    )
    learner_strategy: str = choice(
        ("replicated", "fsdp2"),
        "How several learners store the policy: each learner stores the whole policy "
        "(replicated), or a part of every parameter and of its AdamW moments (fsdp2).",
        read_if=(DISAGGREGATED, _SEVERAL_LEARNERS),
    )
    elastic: bool = flag(
        False,
        "Continue with the other learners when a learner is lost. This works only for learners on "
        "CPUs, and only if the lost learner is not the first. Otherwise, if a learner is "
        "lost, the trial fails and then restarts from its checkpoint.",
        read_if=(
            DISAGGREGATED,
            _SEVERAL_LEARNERS,
            one_of("resources.learner_strategy", "replicated"),
        ),
    )
    learner_cpus: float = number(0.95, "CPUs of each learner.", minimum=0.01, read_if=DISAGGREGATED)
    learner_gpus: float = gpus(
        0.0,
        "GPUs of each learner.",
        read_if=DISAGGREGATED,
        also_called=(
            verl("trainer.n_gpus_per_node", "set per actor", also=("resources.generator_gpus",)),
        ),
    )
    worker_cpus: float = number(
        0.95,
        "CPUs of a colocated worker while it trains. 1.9 gives the worker a second thread, which "
        "makes gradient steps faster. Sums are rounded differently with two threads, so rewards "
        "differ slightly.",
        minimum=0.01,
        read_if=COLOCATED,
        harmless=(1.9,),
    )
    worker_gpus: float = gpus(0.0, "GPUs of a colocated worker.", read_if=COLOCATED)
    vllm_memory_share: float | None = number(
        None,
        "Share of each GPU's memory that vLLM takes for weights, activations and KV cache. "
        "Arriving weights, a reference and a colocated learner need memory outside this share. "
        "`none` means 0.8 times the share of the GPU that the actor reserves, or 0.4 times that "
        "share with placement=colocated.",
        above=0,
        maximum=1,
        read_if=(one_of("engine", "vllm"), _SAMPLES_ON_GPU),
        also_called=(
            trl("vllm_gpu_memory_utilization"),
            verl("rollout.gpu_memory_utilization"),
        ),
    )
    spread: str = choice(
        ("pack", "spread", "one_node_learners"),
        "Placement of a trial's actors on the nodes of a cluster. `pack` uses as few nodes as "
        "possible. `spread` uses as many nodes as possible, so that losing a node costs few "
        "actors. `one_node_learners` puts all learners on one node, so gradients never leave that "
        "node, and puts generators on any node that has room.",
        read_if=DISAGGREGATED,
    )
    reward_workers: int = integer(
        1,
        "Number of processes that score the responses of each generator.",
        minimum=1,
        read_if=(SCORED_APART, NOT_PLAYED),
    )
    reward_cpus: float = number(
        0.0,
        "CPUs reserved per generator for its reward or environment processes, in addition to the "
        "generator's own CPUs.",
        minimum=0,
        read_if=PROCESSES_OF_ITS_OWN,
    )
    deadline_s: float = number(
        600.0,
        "Time limit for calls to actors, in seconds. An actor is considered lost if, after a call, "
        "it neither answers nor makes progress for this long. The same limit applies to fetching "
        "an answer from another machine.",
        above=0,
    )

    @property
    def actors(self) -> dict[str, Any]:
        """Numbers of actors, and of GPUs per actor, as arguments of `Transport.refuses_actors`."""
        names = ("generator_gpus", "learner_gpus", "num_generators", "num_learners")
        return {name: getattr(self, name) for name in names}


def conflicts(config: Config) -> Iterator[Conflict]:
    """Yield conflicts between resources and other settings."""
    r = config.resources
    several, divided = r.num_learners > 1, r.learner_strategy == "fsdp2"
    size = config.rollout.group_size
    whole = "resources.learner_strategy"

    yield (
        several and 0 < r.learner_gpus < 1,
        "resources.learner_gpus",
        f"must be 0, or >= 1, with resources.num_learners={r.num_learners}: each learner needs "
        "its own GPU",
    )
    yield (
        r.elastic and r.learner_gpus > 0,
        "resources.elastic",
        f"must be false with resources.learner_gpus={r.learner_gpus:g}: learners on GPUs use "
        "NCCL, and continuing after the loss of a learner has not been tested with NCCL",
    )
    # All ranks must run the same number of microbatches, so the number of rows must be a multiple
    # of the number of ranks.
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


# ---- Resources that the actors reserve -----------------------------------------------------------

# Environment variables of every actor. They control how an actor's threads wait for each other
# between two matrix products. GNU OpenMP reads both variables. Other implementations read only
# OMP_WAIT_POLICY. A thread polls for work for at most half a millisecond, then sleeps. Sleeping
# immediately would cost two threads a quarter of their speed, because a product of small matrices
# takes less time than waking a thread. Polling longer would occupy a core that another actor has
# reserved.
OPENMP = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "10000"}


def threads(cpus: float) -> int:
    """Return the number of compute threads for `cpus` reserved CPUs: 1 for 0.95, 2 for 1.9."""
    return max(1, math.floor(cpus + 0.1))


def generator_cpus(config: Config) -> float:
    """Return the number of CPUs per generator."""
    given = config.resources.generator_cpus
    if given is not None:
        return given
    # Ray rounds resources to 1e-4, so round down here. If 0.95 / 3 were rounded up, three
    # generators would not fit on two cores beside the 0.1 + 0.95 CPUs of the other processes. A
    # placement group that does not fit waits forever.
    return math.floor(0.95 / config.resources.num_generators * 1e4) / 1e4


def sampling_gpus(config: Config) -> float:
    """Return the number of GPUs of a generator, or of the worker of a colocated trial."""
    r = config.resources
    return r.worker_gpus if config.placement == "colocated" else r.generator_gpus


def vllm_memory_share(config: Config) -> float:
    """Return the share of memory that vLLM takes on each GPU of the sampling actor."""
    given = config.resources.vllm_memory_share
    if given is not None:
        return given
    usual = 0.4 if config.placement == "colocated" else 0.8
    return round(usual * min(1.0, sampling_gpus(config) or 1.0), 4)


def worker_cpus(config: Config) -> float:
    """Return the number of CPUs of a colocated worker, the maximum over its two roles."""
    return max(config.resources.worker_cpus, config.resources.generator_cpus or 0.0)


def learner_names(config: Config) -> list[str]:
    """Return the names of the learners. The first learner publishes the weights."""
    count = config.resources.num_learners
    return ["learner"] if count == 1 else [f"learner-{rank}" for rank in range(count)]


# The resources of the trial's own process, which mostly waits. On two cores, reserving a whole CPU
# for it would keep the trial pending forever.
OWN_BUNDLE = {"CPU": 0.1}


def bundles(config: Config) -> list[dict[str, float]]:
    """Return the resources of the trial's own process, then the resources of each actor.

    The actors are the worker, or the learners followed by the generators. Learners that must be on
    the same node share one bundle, because Ray never divides a bundle between nodes.
    """
    r = config.resources
    if config.placement == "colocated":
        return [OWN_BUNDLE, _bundle(worker_cpus(config) + r.reward_cpus, r.worker_gpus)]
    generator = _bundle(generator_cpus(config) + r.reward_cpus, r.generator_gpus)
    together = r.num_learners if _learners_share_a_bundle(config) else 1
    learner = _bundle(round(together * r.learner_cpus, 4), together * r.learner_gpus)
    return [OWN_BUNDLE, *[learner] * (r.num_learners // together), *[generator] * r.num_generators]


def bundle_of(config: Config, actor: int) -> int:
    """Return the index of an actor's bundle in `bundles`.

    Actors are counted from 0, starting with the learners or the worker.
    """
    learners = config.resources.num_learners
    if not _learners_share_a_bundle(config):
        return 1 + actor
    return 1 if actor < learners else 2 + actor - learners


def placement_strategy(config: Config) -> str:
    """Return Ray's name for the strategy that places the bundles on nodes.

    The strategy is only a preference. If the bundles do not fit that way, Ray places them in any
    way that fits.
    """
    return "SPREAD" if config.resources.spread == "spread" else "PACK"


def uses_gpus(config: Config) -> bool:
    """Return True if any actor reserves a GPU."""
    return any("GPU" in bundle for bundle in bundles(config))


def devices(config: Config) -> float:
    """Return the number of devices charged to the trial: GPUs, or CPU cores if it has no GPUs.

    Only the devices of the actors count. The trial's own process does not count.
    """
    _, *actors = bundles(config)
    on_gpus = sum(bundle.get("GPU", 0.0) for bundle in actors)
    return on_gpus or sum(bundle["CPU"] for bundle in actors)


def _learners_share_a_bundle(config: Config) -> bool:
    return config.resources.spread == "one_node_learners"


def _bundle(cpus: float, gpus: float) -> dict[str, float]:
    return {"CPU": cpus, "GPU": gpus} if gpus else {"CPU": cpus}
