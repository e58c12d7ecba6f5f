"""Measure how fast weights are transferred, compared with the limits of the machine.

A real learner and real generators run under Ray, with one thread each. For each size and transport,
the benchmark times several syncs in sequence. A sync lasts from the driver's call until the checked
weights are in every generator. After each sync, the benchmark times the limits, so the sync and the
limits see the same state of the machine:

- `memcpy`: the generator's process copies the same number of bytes within its memory (one thread,
  warm);
- `summed_copy`: the generator's process copies the weights and computes their checksum, as the
  learner does when it publishes weights;
- `checksum`: the generator's process only computes the checksum;
- `empty_calls`: an empty call to the learner, followed by an empty call to a generator.

Then the benchmark repeats these measurements while another process keeps one core busy. Finally,
the benchmark measures the CPU time of the idle processes for a few seconds. Each transport takes
several turns. Each size is that of a whole policy: `tiny`, `small`, a policy of 64 MB, and
`course`.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch
from measure import parser_of, provenance, run_benchmark, write

from grpo_trainable.cluster.ray_actors import RayActor, RayRuntime
from grpo_trainable.cluster.transport_choice import check_here, make_receiver, make_sender
from grpo_trainable.config import GRPOConfig
from grpo_trainable.config.transport_catalog import TRANSPORTS as RECORDS
from grpo_trainable.config.transport_catalog import Transport
from grpo_trainable.generator.generator import Generator
from grpo_trainable.learner.learner import Learner
from grpo_trainable.models.directory import read_tokenizer
from grpo_trainable.models.model_config import ModelConfig
from grpo_trainable.models.parameters import unique_parameters
from grpo_trainable.models.store import save_policy
from grpo_trainable.models.transformer import TransformerLM
from grpo_trainable.pipeline.learner_group import LearnerGroup
from grpo_trainable.protocol.calls import await_call
from grpo_trainable.protocol.checksums import copy_with_checksum, storage_checksum
from grpo_trainable.transports.packing import layout_for
from grpo_trainable.transports.rdt import CollectiveGroup

SIXTY_FOUR_MB = ModelConfig(
    vocab_size=8192, context_length=256, d_model=512, num_layers=4, num_heads=8, d_ff=1376
)
SIZES = {"4 MB": "tiny", "16 MB": "small", "64 MB": SIXTY_FOUR_MB, "240 MB": "course"}
TRANSPORTS = ("shm", "object_store", "gloo", "nixl")
DEADLINE_S = 120.0
IDLE_S = 3.0
WARM_UP = 3  # syncs after the first one, which is reported separately


class TimedLearner(Learner):
    def step(self) -> None:
        """Change every weight, as an optimizer step does."""
        with torch.no_grad():
            for parameter in self.policy.parameters():
                parameter.mul_(1.0001)
        self._state.optimizer.steps += 1
        self._state.round += 1

    def nothing(self) -> None:
        pass

    def bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.policy.parameters())


class TimedGenerator(Generator):
    def nothing(self) -> None:
        pass

    def limits(self) -> dict[str, float]:
        """Return the seconds that copying and checksumming the weights take without a transport."""
        parameters = unique_parameters(self.engine.model)  # type: ignore[attr-defined]
        layout = layout_for(parameters)
        if not hasattr(self, "_memory"):
            self._memory = [torch.ones(layout.size, dtype=torch.uint8) for _ in range(2)]
        # Copy 4-byte words, because torch copies single bytes more slowly than memcpy does.
        source, target = (memory.view(torch.int32) for memory in self._memory)
        copies = layout.of(self._memory[1])
        return {
            "memcpy": seconds_of(lambda: target.copy_(source)),
            "summed_copy": seconds_of(lambda: copy_with_checksum(parameters, copies)),
            "checksum": seconds_of(lambda: storage_checksum(parameters)),
        }


def seconds_of(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


class Pair:
    """A learner and its generators, which use one transport."""

    def __init__(self, transport: Transport, config: GRPOConfig) -> None:
        self._runtime = RayRuntime()
        name = transport.name
        direct = transport.tensor_transport
        kwargs: dict[str, Any] = {"num_cpus": 0.5, "num_gpus": 0, "direct": direct}
        self.learner = RayActor(TimedLearner, "learner", config, make_sender(name), **kwargs)
        self.generators = [
            RayActor(
                TimedGenerator,
                f"generator-{i}",
                config,
                make_receiver(name, DEADLINE_S, "cpu"),
                **kwargs,
            )
            for i in range(config.resources.num_generators)
        ]
        self.actors = [self.learner, *self.generators]
        for actor in self.actors:
            self.ask(actor.submit_function("sync", check_here, name))
        self._group = None
        if transport.two_sided:
            self._group = CollectiveGroup(name, [a.handle for a in self.actors], DEADLINE_S)
        staged = partial(self.learner.tensors, name, "staged") if transport.two_sided else None
        self._learners = LearnerGroup([self.learner], self._runtime, DEADLINE_S, staged)
        self._round = 0  # round whose weights the generators have

    def ask(self, call: Any) -> Any:
        return await_call(self._runtime, call, DEADLINE_S)

    def sync(self) -> dict[str, float]:
        self.ask(self.learner.submit("sync", "step"))
        start = time.perf_counter()
        published = self._learners.publish(self._round)
        calls = [g.submit("sync", "load", published.handle) for g in self.generators]
        loaded = [self.ask(call) for call in calls]
        total = time.perf_counter() - start
        self._round = published.round
        return {
            "total": total,
            "publish": sum(span.seconds for span in published.spans if span.stage == "sync"),
            "transfer": max(answer.transfer_s for answer in loaded),
            "load": max(answer.load_s for answer in loaded),
        }

    def empty_calls(self) -> float:
        """Return the seconds of two empty calls in sequence, like publish and load."""
        start = time.perf_counter()
        self.ask(self.learner.submit("sync", "nothing"))
        self.ask(self.generators[0].submit("sync", "nothing"))
        return time.perf_counter() - start

    def idle_cores(self) -> float:
        """Return the mean CPU use per process, in cores, while the actors are idle."""
        before, start = self._cpu_s(), time.perf_counter()
        time.sleep(IDLE_S)
        return (self._cpu_s() - before) / (time.perf_counter() - start) / len(self.actors)

    def _cpu_s(self) -> float:
        calls = [actor.submit_function("sync", time.process_time) for actor in self.actors]
        return sum(self.ask(call) for call in calls)

    def close(self) -> None:
        for actor in self.actors:
            actor.kill()
        if self._group is not None:
            self._group.forget()


def config_of(preset: str | ModelConfig, directory: Path, generators: int, seed: int) -> GRPOConfig:
    if isinstance(preset, ModelConfig):
        path = directory / "policy"
        if not path.exists():
            save_policy(path, TransformerLM(preset, seed), read_tokenizer(None), torch.float32)
        model = {"path": str(path)}
    else:
        model = {"preset": preset}
    return GRPOConfig.from_dict(
        {
            "placement": "disaggregated",
            "seed": seed,
            "model": model,
            "loss": {"kl_monitor": False},
            "resources": {"num_generators": generators},
        }
    )


@contextlib.contextmanager
def busy_core() -> Iterator[None]:
    """Keep a core busy with a process that never pauses."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def measure(name: str, config: GRPOConfig, syncs: int) -> dict[str, Any]:
    """Run one turn of a transport, first with both cores free and then with one of them busy."""
    pair = Pair(RECORDS[name], config)
    try:
        first = pair.sync()["total"]
        for _ in range(WARM_UP):
            pair.sync()
        size = pair.ask(pair.learner.submit("sync", "bytes"))
        turn: dict[str, Any] = {"first_s": first, "bytes": size}
        turn["free"] = beside_limits(pair, syncs)
        with busy_core():
            turn["busy"] = beside_limits(pair, syncs)
        turn["idle_cores"] = pair.idle_cores()
        return turn
    finally:
        pair.close()


def beside_limits(pair: Pair, syncs: int) -> dict[str, list[float]]:
    seen: dict[str, list[float]] = defaultdict(list)
    for _ in range(syncs):
        seconds = pair.sync()
        seconds |= pair.ask(pair.generators[0].submit("sync", "limits"))
        seconds["empty_calls"] = pair.empty_calls()
        for part, own in seconds.items():
            seen[part].append(own)
    return dict(seen)


def summarise(turns: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the median milliseconds over all turns, and ratios of these medians."""
    result: dict[str, Any] = {
        "bytes": turns[0]["bytes"],
        "first_ms": 1e3 * statistics.median(turn["first_s"] for turn in turns),
        "idle_cores": statistics.median(turn["idle_cores"] for turn in turns),
    }
    for condition in ("free", "busy"):
        parts = {
            part: [1e3 * s for turn in turns for s in turn[condition][part]]
            for part in turns[0][condition]
        }
        ms = {part: statistics.median(values) for part, values in parts.items()}
        result[condition] = {
            "ms": ms,
            "of_memcpy": ms["total"] / ms["memcpy"],
            "of_memcpy_unchecked": _unchecked(ms) / ms["memcpy"],
            "turns_ms": [1e3 * statistics.median(turn[condition]["total"]) for turn in turns],
        }
    return result


def _unchecked(ms: dict[str, float]) -> float:
    """Return the time of a sync minus that of the checksums in the learner and generator."""
    return ms["total"] - (ms["summed_copy"] - ms["memcpy"]) - ms["checksum"]


def show(label: str, name: str, found: dict[str, Any]) -> str:
    shown = []
    for condition in ("free", "busy"):
        ms = found[condition]["ms"]
        shown.append(
            f"{condition}: {ms['total']:.1f} ms, {found[condition]['of_memcpy']:.2f} x memcpy "
            f"{ms['memcpy']:.1f} (unchecked {found[condition]['of_memcpy_unchecked']:.2f} x)"
        )
    idle = f"idle {found['idle_cores']:.2f} cores per process"
    return f"{label} {name:<12} first {found['first_ms']:.0f} ms; {'; '.join(shown)}; {idle}"


def main() -> None:
    parser = parser_of(
        __doc__,
        "weight_transport.json",
        seed="seed of the random weights",
        counts={
            "turns": (3, "number of turns of every transport"),
            "syncs": (20, "number of syncs per turn and condition"),
        },
    )
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=SIZES)
    parser.add_argument("--transports", nargs="+", choices=TRANSPORTS, default=TRANSPORTS)
    parser.add_argument("--generators", nargs="+", type=int, default=[1, 2, 4])
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # read by the processes that Ray starts
    missing = {name: RECORDS[name].missing_on_machine() for name in args.transports}
    here = [name for name in args.transports if missing[name] is None]
    for name in set(args.transports) - set(here):
        print(f"not available here: {name} ({missing[name]})")
    ray.init(
        address="local",
        num_cpus=8,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
    )
    with tempfile.TemporaryDirectory() as directory:

        def measured(label: str, generators: int) -> dict[str, Any]:
            """Measure all transports in turn."""
            config = config_of(SIZES[label], Path(directory), generators, args.seed)
            turns: dict[str, list[dict[str, Any]]] = defaultdict(list)
            for _ in range(args.turns):
                for name in here:
                    turns[name].append(measure(name, config, args.syncs))
            found = {name: summarise(own) for name, own in turns.items()}
            for name, own in found.items():
                print(show(f"{label} to {generators}", name, own), flush=True)
            return found

        sizes = {label: measured(label, 1) for label in args.sizes}
        several = {str(count): measured("64 MB", count) for count in args.generators}
    ray.shutdown()
    result = {"not_available": {name: missing[name] for name in missing if missing[name]}}
    broadcast = {name: {count: own[name] for count, own in several.items()} for name in here}
    write(args.out, {**provenance(args), **result, "sizes": sizes, "broadcast_64_mb": broadcast})


if __name__ == "__main__":
    run_benchmark(main)
