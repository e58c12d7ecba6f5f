"""The actors of one trial: started in their bundles, warmed up, replaced and ended."""

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

CLOSE_DEADLINE_S = 2.0  # all actors of a trial together have this long to close


class TrialActors:
    """The learners and the generators of a trial, or the colocated worker that is both."""

    def __init__(self, config: GRPOConfig, runtime: RayRuntime, files: Any = None) -> None:
        """`start` starts them. `files`: a reference to what `shipping.contents` gives, for the
        machines they run on."""
        self._config = config
        self._runtime = runtime
        self._actors: list[RayActor] = []  # the learners, or the worker, come first
        self._joining: list[RayCall] = []  # the calls of learners that look for one another
        self._files = files
        self._clocks: dict[str, float] = {}  # machine -> seconds that its clock is ahead of ours
        self._group: CollectiveGroup | None = None
        self._unidentified: list[RayCall] = []  # calls that will tell where an actor runs

    def start(self) -> None:
        """Chooses the transport and starts every actor, without waiting for any.

        Raises:
            TransportError: the transport cannot work between the machines of the trial.
            PluginError: the user's transport cannot be loaded.
            ShippingError: a machine cannot have a file that the trial reads.
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
        """Every actor, the learners or the worker first."""
        return iter(self._actors)

    @property
    def learners(self) -> list[RayActor]:
        """Those that train, first the one that publishes: a colocated worker does so as well."""
        return self._actors[: self._config.resources.num_learners]

    @property
    def generators(self) -> list[RayActor]:
        """Those that sample: a colocated worker does so as well."""
        return self._actors[self._config.resources.num_learners :] or self._actors[:]

    def learner_group(self) -> LearnerGroup:
        """The learners, once several have found one another.

        Raises:
            ActorFailed: one of them cannot begin.
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
        """Lets all actors do at once what a round will ask of them, with the requests of a chunk.

        Raises:
            ActorFailed: one of them cannot do it.
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
        """Seconds that setting up the transport between the actors took.

        Raises:
            ActorFailed: the transport cannot work in one of the actors.
            TransportError: it cannot work between them.
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
        """Whether another generator may take the place of a lost one.

        A colocated one was the learner as well, and a collective group admits no new member.
        """
        return self._config.placement != "colocated" and not self.choice.transport.two_sided

    def replace(self, name: str, patience_s: float) -> Actor | None:
        """A new generator in place of the one of this name, which was killed; None where no machine
        has had room for it for `patience_s`, or the one that has cannot take it."""
        index = [actor.name for actor in self._actors].index(name)
        if not has_room(resources.bundle_of(self._config, index), patience_s):
            return None
        try:
            self._prepare(places_of_bundles().get(resources.bundle_of(self._config, index)))
        except (RayError, ShippingError) as error:
            # It has died meanwhile, or cannot have a file: others go on, and it is tried again.
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
        """The actor at this index, in its bundle. If actors shared the placement group at will, one
        could take the room of another, which would wait for ever where no machine has as much left.
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
        """Brings to a machine what an actor needs there, and reads its clock."""
        if node is not None and self._files is not None:
            ship(self._files, [node])
        self._clock_ahead(node)

    def clock_offset(self, name: str) -> float:
        """Seconds that the clock of an actor's machine is ahead of ours."""
        index = [actor.name for actor in self._actors].index(name)
        return self._clock_ahead(places_of_bundles().get(resources.bundle_of(self._config, index)))

    def _clock_ahead(self, node: str | None) -> float:
        if node is None or node == ray.get_runtime_context().get_node_id():
            return 0.0
        if node not in self._clocks:
            self._clocks[node] = offset_of(node)
        return self._clocks[node]

    def new_processes(self) -> list[MachineProcess]:
        """The processes of actors that have started since the last call."""
        processes = []
        for call in self._runtime.wait(self._unidentified, 0.0) if self._unidentified else []:
            self._unidentified.remove(call)
            with contextlib.suppress(ActorFailed):  # it has ended, which the pipeline notices
                processes.append(self._runtime.result(call))
        return processes

    def reset(self, config: GRPOConfig) -> None:
        """Lets every actor begin anew with a config of the same placement, resources and transport.

        Raises:
            ActorFailed: one of them cannot.
        """
        self._config = config
        for call in [actor.submit("reset", "reset", config) for actor in self._actors]:
            await_call(self._runtime, call, config.resources.deadline_s)

    def end(self) -> None:
        """Ends every actor; what it holds outside its process is closed first."""
        closing = [actor.submit("close", "close") for actor in self._actors]
        end = now() + CLOSE_DEADLINE_S
        for call in closing:
            # An actor that is dead or busy for good is killed all the same.
            with contextlib.suppress(RuntimeError):
                await_call(self._runtime, call, deadline_s=max(0.0, end - now()))
        for actor in self._actors:
            actor.kill()
        if self._group is not None:
            self._group.forget()
        self._actors, self._joining, self._group = [], [], None


class MadeInActor:
    """An argument that is made in the process of the actor it is given to.

    A user's sender or receiver may hold what no pickle can carry, and its file is imported by path.
    """

    def __init__(self, make: Callable[..., Any], *args: Any) -> None:
        self._make, self._args = make, args

    def __reduce__(self) -> tuple[Any, ...]:
        return self._make, self._args


def form_group(learners: Sequence[RayActor]) -> list[RayCall]:
    """Has the learners look for one another, in the process of the first, and begin.

    Nobody waits: an argument that is the answer to another call is filled in by Ray.
    """
    addresses = [learner.submit_function("start", own_address) for learner in learners]
    place = learners[0].submit("start", "host", addresses[0].ref)
    return [
        learner.submit("start", "join", rank, len(learners), place.ref)
        for rank, learner in enumerate(learners)
    ]


def own_address() -> str:
    """The address by which the cluster reaches this machine, and gloo from now on."""
    address = ray.util.get_node_ip_address()
    let_gloo_use(address)
    return address


def nodes_of_weights(config: GRPOConfig) -> list[str]:
    """The machines of the learner that publishes and of the generators, in this order. Outside of
    Tune actors may be on any: all there are."""
    nodes, r = places_of_bundles(), config.resources
    if not nodes:
        return nodes_alive()
    apart = config.placement == "disaggregated"
    generators = range(r.num_learners, r.num_learners + r.num_generators) if apart else ()
    return [nodes[resources.bundle_of(config, actor)] for actor in (0, *generators)]


def nodes_alive() -> list[str]:
    return [node["NodeID"] for node in ray.nodes() if node["Alive"]]


def reserved_nodes() -> list[str]:
    """The machines that a trial's actors may be on: of its placement group, or all there are."""
    nodes = places_of_bundles()
    if not nodes:
        return nodes_alive()
    return sorted({node for bundle, node in nodes.items() if bundle != 0})  # 0: the trial's own
