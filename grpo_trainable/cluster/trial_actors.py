"""Actors of one trial: start them in their bundles, warm them up, replace them and end them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import ray
import ray.util
from ray.exceptions import RayError

from grpo_trainable.cluster.bundles import has_room, places_of_bundles
from grpo_trainable.cluster.clocks import offset_of
from grpo_trainable.cluster.colocated import Colocated
from grpo_trainable.cluster.ray_actors import RayActor, RayCall, RayRuntime
from grpo_trainable.cluster.shipping import ShippingError, ship
from grpo_trainable.cluster.transport_choice import (
    check_here,
    check_together,
    choose_transport,
    make_both_ends,
    make_receiver,
    make_sender,
)
from grpo_trainable.config import GRPOConfig, resources
from grpo_trainable.generator.generator import Generator
from grpo_trainable.learner.learner import Learner
from grpo_trainable.learner.learner_rank import LearnerRank
from grpo_trainable.pipeline.learner_group import LearnerGroup
from grpo_trainable.pipeline.liveness import Watch
from grpo_trainable.protocol.calls import Actor, ActorFailed, await_call
from grpo_trainable.protocol.rollout import Request
from grpo_trainable.telemetry.machine_load import MachineProcess, this_process
from grpo_trainable.telemetry.timers import now
from grpo_trainable.transports.network_interface import let_gloo_use
from grpo_trainable.transports.rdt import CollectiveGroup

logger = logging.getLogger(__name__)

CLOSE_DEADLINE_S = 2.0  # time limit for closing all actors of a trial


class TrialActors:
    """Learners and generators of a trial, or the colocated worker that is both."""

    def __init__(self, config: GRPOConfig, runtime: RayRuntime, files: Any = None) -> None:
        """Prepare the actors without starting any.

        Args:
            config: Config of the trial.
            runtime: Waits for the calls to actors.
            files: Ray's reference to a mapping from path to content. These files are written on the
                actors' machines.
        """
        self._config = config
        self._runtime = runtime
        self._actors: list[RayActor] = []  # the learners, or the worker, come first
        self._joining: list[RayCall] = []  # calls to learners that are connecting to each other
        self._files = files
        self._clocks: dict[str, float] = {}  # machine -> its clock minus this machine's, in s
        self._group: CollectiveGroup | None = None
        self._unidentified: list[RayCall] = []  # calls that return `MachineProcess`es

    def start(self) -> None:
        """Choose the transport and start every actor, without waiting for them.

        Raises:
            TransportError: The transport cannot work between the machines of the trial.
            PluginError: The user's transport cannot be loaded.
            ShippingError: A file that the trial reads could not be copied to a machine.
        """
        if self._files is not None:
            ship(self._files, reserved_nodes())
        config, r = self._config, self._config.resources
        self.choice = choose_transport(config, nodes_of_weights(config))
        logger.info("transport=%s: %s", self.choice.key, self.choice.why)
        if config.placement == "colocated":
            ends = MadeInActor(make_both_ends, self.choice.key)
            cpus = resources.worker_cpus(config) + r.reward_cpus
            worker = self._actor(0, Colocated, "worker", ends, cpus=cpus, gpus=r.worker_gpus)
            self._actors.append(worker)
            return
        self._start_learners()
        for index in range(r.num_learners, r.num_learners + r.num_generators):
            self._actors.append(self._generator(index))

    def _start_learners(self) -> None:
        names, r = resources.learner_names(self._config), self._config.resources
        cls = Learner if len(names) == 1 else LearnerRank
        for index, name in enumerate(names):
            sender = None if index else self._sending()
            self._actors.append(
                self._actor(index, cls, name, sender, cpus=r.learner_cpus, gpus=r.learner_gpus)
            )
        if len(names) > 1:
            self._joining = form_group(self.learners)

    def _sending(self) -> MadeInActor:
        return MadeInActor(make_sender, self.choice.key, self.choice.far_machines)

    def __iter__(self) -> Iterator[RayActor]:
        """Iterate over all actors, beginning with the learners or the worker."""
        return iter(self._actors)

    @property
    def learners(self) -> list[RayActor]:
        """Actors that train, beginning with the publishing learner. Includes a colocated worker."""
        return self._actors[: self._config.resources.num_learners]

    @property
    def generators(self) -> list[RayActor]:
        """Actors that sample. Includes a colocated worker."""
        return self._actors[self._config.resources.num_learners :] or self._actors[:]

    def learner_group(self) -> LearnerGroup:
        """Return the learners, after waiting until they have connected to each other.

        Raises:
            ActorFailed: A learner cannot start.
        """
        deadline_s = self._config.resources.deadline_s
        for call in self._joining:
            await_call(self._runtime, call, deadline_s)
        self._joining = []
        transport, learners = self.choice.transport, self.learners
        tensors = partial(learners[0].tensors, transport.name, "staged")
        return LearnerGroup(
            learners,
            self._runtime,
            deadline_s,
            tensors if transport.two_sided else None,
            elastic=self._config.resources.elastic,
        )

    def warm_up(self, requests: Sequence[Request]) -> None:
        """Warm up all actors in parallel: generators with `requests`, learners with a microbatch.

        Raises:
            ActorFailed: An actor cannot do the work of its warm-up.
        """
        longest = max(len(request.prompt_ids) for request in requests)
        if self._config.placement == "colocated":
            calls = [w.submit("warm-up", "warm_up", requests, longest) for w in self._actors]
        else:
            calls = [a.submit("warm-up", "warm_up", longest) for a in self.learners]
            calls += [a.submit("warm-up", "warm_up", requests) for a in self.generators]
        watch = Watch(self._runtime, self._config.resources.deadline_s)
        for call in calls:
            watch.result(call)

    def set_up_transport(self) -> float:
        """Set up the transport between the actors, and return how many seconds this took.

        Raises:
            ActorFailed: The transport cannot work in one of the actors.
            TransportError: The transport cannot work between the actors.
        """
        key, transport = self.choice.key, self.choice.transport
        deadline_s = self._config.resources.deadline_s
        first, others = self.learners[0], self.generators
        ends = [first, *(actor for actor in others if actor is not first)]
        calls = [actor.submit_function("sync", check_here, key) for actor in ends]
        found = [await_call(self._runtime, call, deadline_s) for call in calls]
        check_together(transport, found)
        start = now()
        if transport.two_sided and self._group is None:
            handles = [actor.handle for actor in ends]
            self._group = CollectiveGroup(transport.name, handles, deadline_s)
        return max(each.seconds for each in found) + now() - start

    @property
    def replaceable(self) -> bool:
        """True if a new generator can replace a lost one.

        A colocated generator is also the learner, and a collective group admits no new member.
        """
        return self._config.placement != "colocated" and not self.choice.transport.two_sided

    def replace(self, name: str, patience_s: float) -> Actor | None:
        """Start a new generator in place of one that was killed.

        Args:
            name: Name of the killed generator.
            patience_s: Time limit in seconds for finding a machine with room.

        Returns:
            The new generator, or None if no machine has room or the machine with room cannot be
            used.
        """
        index = [actor.name for actor in self._actors].index(name)
        if not has_room(resources.bundle_of(self._config, index), patience_s):
            return None
        try:
            self._prepare(places_of_bundles().get(resources.bundle_of(self._config, index)))
        except (RayError, ShippingError) as error:
            # The machine has died, or a file cannot be copied to it. The other actors continue, and
            # a later call of `replace` tries again.
            logger.warning("%s cannot start on the machine that has room for it: %s", name, error)
            return None
        self._actors[index] = self._generator(index)
        return self._actors[index]

    def _generator(self, index: int) -> RayActor:
        r = self._config.resources
        device = "cuda" if r.generator_gpus else "cpu"
        number = index - r.num_learners
        first = number / r.num_generators  # generators begin with different parts of a snapshot
        return self._actor(
            index,
            Generator,
            f"generator-{number}",
            MadeInActor(make_receiver, self.choice.key, r.deadline_s, device, first),
            cpus=resources.generator_cpus(self._config) + r.reward_cpus,
            gpus=r.generator_gpus,
        )

    def _actor(
        self,
        index: int,
        cls: type,
        name: str,
        ends: MadeInActor | None,
        *,
        cpus: float,
        gpus: float,
    ) -> RayActor:
        """Start the actor with the number `index`, in its own bundle.

        If an actor could use any bundle, it could take the bundle of another actor. The other actor
        would wait forever if no machine had enough room left.
        """
        actor = RayActor(
            cls,
            name,
            self._config,
            ends,
            num_cpus=cpus,
            num_gpus=gpus,
            bundle=resources.bundle_of(self._config, index),
            direct=self.choice.transport.tensor_transport,
        )
        self._unidentified.append(actor.submit_function("identify", this_process))
        return actor

    def _prepare(self, node: str | None) -> None:
        """Copy the files to a machine, and measure its clock offset."""
        if node is not None and self._files is not None:
            ship(self._files, [node])
        self._clock_ahead(node)

    def clock_offset(self, name: str) -> float:
        """Return by how many seconds the clock of an actor's machine is ahead of the local one."""
        index = [actor.name for actor in self._actors].index(name)
        return self._clock_ahead(places_of_bundles().get(resources.bundle_of(self._config, index)))

    def _clock_ahead(self, node: str | None) -> float:
        if node is None or node == ray.get_runtime_context().get_node_id():
            return 0.0
        if node not in self._clocks:
            self._clocks[node] = offset_of(node)
        return self._clocks[node]

    def new_processes(self) -> list[MachineProcess]:
        """Return the processes of those actors that have started since the previous call."""
        processes = []
        for call in self._runtime.wait(self._unidentified, 0.0) if self._unidentified else []:
            self._unidentified.remove(call)
            with contextlib.suppress(ActorFailed):  # the pipeline will report the lost actor
                processes.append(self._runtime.result(call))
        return processes

    def reset(self, config: GRPOConfig) -> None:
        """Restart every actor with a config that has the same placement, resources and transport.

        Raises:
            ActorFailed: An actor cannot restart.
        """
        self._config = config
        for call in [actor.submit("reset", "reset", config) for actor in self._actors]:
            await_call(self._runtime, call, config.resources.deadline_s)

    def end(self) -> None:
        """Let every actor release the resources that it holds outside its process, then kill it."""
        closing = [actor.submit("close", "close") for actor in self._actors]
        end = now() + CLOSE_DEADLINE_S
        for call in closing:
            # An actor that is dead or stays busy does not answer. It is killed anyway.
            with contextlib.suppress(RuntimeError):
                await_call(self._runtime, call, deadline_s=max(0.0, end - now()))
        for actor in self._actors:
            actor.kill()
        if self._group is not None:
            self._group.forget()
        self._actors, self._joining, self._group = [], [], None


class MadeInActor:
    """Argument that is created inside the actor that receives it.

    So a user's sender or receiver need not be picklable. The actor imports the user's file by its
    path.
    """

    def __init__(self, make: Callable[..., Any], *args: Any) -> None:
        self._make, self._args = make, args

    def __reduce__(self) -> tuple[Any, ...]:
        return self._make, self._args


def form_group(learners: Sequence[RayActor]) -> list[RayCall]:
    """Submit the calls that start the learners and connect them to each other.

    The learners meet at an address of the first learner. This function does not wait for any
    answer: if an argument refers to the answer to another call, Ray waits for that answer.
    """
    addresses = [learner.submit_function("start", own_address) for learner in learners]
    place = learners[0].submit("start", "host", addresses[0].ref)
    return [
        learner.submit("start", "join", rank, len(learners), place.ref)
        for rank, learner in enumerate(learners)
    ]


def own_address() -> str:
    """Return the address at which the cluster reaches this machine, and make gloo use it."""
    address = ray.util.get_node_ip_address()
    let_gloo_use(address)
    return address


def nodes_of_weights(config: GRPOConfig) -> list[str]:
    """Return the machines of the publishing learner and of the generators, in this order.

    Outside Tune, actors may be on any machine, so the function returns all machines.
    """
    nodes, r = places_of_bundles(), config.resources
    if not nodes:
        return nodes_alive()
    apart = config.placement == "disaggregated"
    generators = range(r.num_learners, r.num_learners + r.num_generators) if apart else ()
    return [nodes[resources.bundle_of(config, actor)] for actor in (0, *generators)]


def nodes_alive() -> list[str]:
    """Return Ray's ids of the machines that are alive."""
    return [node["NodeID"] for node in ray.nodes() if node["Alive"]]


def reserved_nodes() -> list[str]:
    """Return the machines that a trial's actors may be on.

    These are the machines of the trial's placement group, or all machines outside Tune.
    """
    nodes = places_of_bundles()
    if not nodes:
        return nodes_alive()
    # Bundle 0 belongs to the trial's own process.
    return sorted({node for bundle, node in nodes.items() if bundle != 0})
