"""How fast weights travel, beside what the machine can do at best.

A real learner and real generators, one thread each, under Ray. For each size and transport, some
syncs one after the other: from the driver's call until the weights stand, checked, in every
generator. Between any two syncs the generator's process copies as many bytes within its memory
(`memcpy`, one thread, warm), through a file in /dev/shm and back, copies them as a snapshot is
copied, summed on the way, sums them by themselves, and takes an empty call of each actor, so that a
sync and its limits see the same minute of the machine. Then the same beside a process that keeps
one core busy, and some seconds in which nothing is asked of anybody. Each transport gets its turn
several times. Sizes are those of whole policies: tiny, small, one of 64 MB, and `course`.

With `--gpu` the weights are on a GPU, one for all actors (with `nccl` one each), and the limit is a
copy within it; beside it one through the CPU's memory.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch
from measure import RESULTS, parser_of, provenance, run_benchmark, write

from grpo_trainable.actors.generator import Generator
from grpo_trainable.actors.learner import Learner
from grpo_trainable.calls import await_call
from grpo_trainable.checksums import copy_with_checksum, storage_checksum
from grpo_trainable.config import GRPOConfig
from grpo_trainable.learner_group import LearnerGroup
from grpo_trainable.models.directory import read_tokenizer
from grpo_trainable.models.model_config import ModelConfig
from grpo_trainable.models.parameters import unique_parameters
from grpo_trainable.models.store import save_policy
from grpo_trainable.models.transformer import TransformerLM
from grpo_trainable.remote import RayActor, RayRuntime
from grpo_trainable.transports import TRANSPORTS as RECORDS
from grpo_trainable.transports import Transport
from grpo_trainable.transports.choice import check_here, make_receiver, make_sender
from grpo_trainable.transports.packing import layout_for
from grpo_trainable.transports.rdt import Group

SIXTY_FOUR_MB = ModelConfig(
    vocab_size=8192, context_length=256, d_model=512, num_layers=4, num_heads=8, d_ff=1376
)
SIZES = {"4 MB": "tiny", "16 MB": "small", "64 MB": SIXTY_FOUR_MB, "240 MB": "course"}
TRANSPORTS = ("shm", "object_store", "gloo", "nixl")
GPU_TRANSPORTS = ("cuda_ipc", "nixl", "shm", "object_store", "nccl")
DEADLINE_S = 120.0
IDLE_S = 3.0
WARM_UP = 3  # syncs after the first, which is told apart


class TimedLearner(Learner):
    def step(self) -> None:
        """Every weight written anew, as an optimizer step does."""
        with torch.no_grad():
            for parameter in self.policy.parameters():
                parameter.mul_(1.0001)
        self.version += 1
        self.round += 1

    def nothing(self) -> None:
        pass

    def bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.policy.parameters())


class TimedGenerator(Generator):
    def nothing(self) -> None:
        pass

    def limits(self, size: int) -> dict[str, float]:
        """Seconds that so many bytes take without any transport."""
        parameters = unique_parameters(self.engine.model)  # type: ignore[attr-defined]
        layout = layout_for(parameters)
        if not hasattr(self, "_memory"):
            device = next(iter(parameters.values())).device
            self._memory = [
                torch.ones(layout.size, dtype=torch.uint8, device=device) for _ in range(2)
            ]
            fd, path = tempfile.mkstemp(dir="/dev/shm", prefix="grpo-benchmark-")
            os.unlink(path)
            os.ftruncate(fd, size)
            self._file = torch.frombuffer(mmap.mmap(fd, size), dtype=torch.uint8)
            os.close(fd)
            self._file.zero_()
        # Words are copied: torch is slower than memcpy with single bytes.
        source, target, file = (
            memory[:size].view(torch.int32) for memory in (*self._memory, self._file)
        )
        copies = layout.of(self._memory[1])

        def through_dev_shm() -> None:
            file.copy_(source)
            target.copy_(file)

        return {
            "memcpy": _seconds(lambda: target.copy_(source)),
            "dev_shm": _seconds(through_dev_shm),
            "summed_copy": _seconds(lambda: copy_with_checksum(parameters, copies)),
            "checksum": _seconds(lambda: storage_checksum(parameters)),
        }


def _seconds(do: Any) -> float:
    start = time.perf_counter()
    do()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter() - start


class Pair:
    """A learner and its generators on one transport."""

    def __init__(self, transport: Transport, config: GRPOConfig) -> None:
        self._runtime = RayRuntime()
        name = transport.name
        gpus = config.resources.generator_gpus
        direct = transport.tensor_transport
        kwargs: dict[str, Any] = {"num_cpus": 0.5, "num_gpus": gpus, "direct": direct}
        device = "cuda" if gpus else "cpu"
        self.learner = RayActor(TimedLearner, "learner", config, make_sender(name), **kwargs)
        self.generators = [
            RayActor(
                TimedGenerator,
                f"generator-{i}",
                config,
                make_receiver(name, DEADLINE_S, device),
                **kwargs,
            )
            for i in range(config.resources.num_generators)
        ]
        self.actors = [self.learner, *self.generators]
        for actor in self.actors:
            self.ask(actor.submit_function("sync", check_here, name))
        self._group = None
        if transport.two_sided:
            self._group = Group(name, [a.handle for a in self.actors], DEADLINE_S)
        staged = partial(self.learner.tensors, name, "staged") if transport.two_sided else None
        self._learners = LearnerGroup([self.learner], self._runtime, DEADLINE_S, staged)
        self._round = 0  # the weights that the generators have are of this round

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
        """Two, one after the other, as publish and load are."""
        start = time.perf_counter()
        self.ask(self.learner.submit("sync", "nothing"))
        self.ask(self.generators[0].submit("sync", "nothing"))
        return time.perf_counter() - start

    def idle_cores(self) -> float:
        """Cores that a process of the pair keeps busy while nothing is asked of it; the mean."""
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


def config_of(
    preset: str | ModelConfig, directory: Path, generators: int, seed: int, gpus: float = 0.0
) -> GRPOConfig:
    """`gpus`: of each actor."""
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
            "resources": {
                "num_generators": generators,
                "generator_gpus": gpus,
                "learner_gpus": gpus,
            },
        }
    )


@contextlib.contextmanager
def busy_core(busy: bool) -> Iterator[None]:
    """Keeps a core busy with a process that computes without a pause."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if busy else None
    try:
        yield
    finally:
        if process is not None:
            process.kill()
            process.wait()


def measure(name: str, config: GRPOConfig, syncs: int) -> dict[str, Any]:
    """One turn of a transport: with both cores free, then beside a busy one."""
    pair = Pair(RECORDS[name], config)
    try:
        first = pair.sync()["total"]
        for _ in range(WARM_UP):
            pair.sync()
        size = pair.ask(pair.learner.submit("sync", "bytes"))
        turn: dict[str, Any] = {"first_s": first, "bytes": size}
        for condition in ("free", "busy"):
            seen: dict[str, list[float]] = defaultdict(list)
            with busy_core(condition == "busy"):
                for _ in range(syncs):
                    for part, seconds in pair.sync().items():
                        seen[part].append(seconds)
                    limits = pair.ask(pair.generators[0].submit("sync", "limits", size))
                    limits["empty_calls"] = pair.empty_calls()
                    for part, seconds in limits.items():
                        seen[part].append(seconds)
            turn[condition] = dict(seen)
        turn["idle_cores"] = pair.idle_cores()
        return turn
    finally:
        pair.close()


def summarise(turns: list[dict[str, Any]]) -> dict[str, Any]:
    """Milliseconds over all turns; ratios are of the medians."""
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
        total = sorted(parts["total"])
        result[condition] = {
            "ms": ms,
            "p99_ms": total[min(len(total) - 1, round(0.99 * len(total)))],
            "of_memcpy": ms["total"] / ms["memcpy"],
            "of_memcpy_unchecked": _unchecked(ms) / ms["memcpy"],
            "over_empty_calls_ms": ms["total"] - ms["empty_calls"],
            "turns_ms": [1e3 * statistics.median(turn[condition]["total"]) for turn in turns],
        }
    return result


def _unchecked(ms: dict[str, float]) -> float:
    """A sync without what proves it whole: the sums on the way out, the pass over what arrived."""
    return ms["total"] - (ms["summed_copy"] - ms["memcpy"]) - ms["checksum"]


def show(label: str, name: str, found: dict[str, Any]) -> str:
    shown = []
    for condition in ("free", "busy"):
        ms = found[condition]["ms"]
        shown.append(
            f"{condition}: {ms['total']:.1f} ms (p99 {found[condition]['p99_ms']:.1f}; publish "
            f"{ms['publish']:.1f}, transfer {ms['transfer']:.1f}, load {ms['load']:.1f}), "
            f"{found[condition]['of_memcpy']:.2f} x memcpy {ms['memcpy']:.1f}, unchecked "
            f"{found[condition]['of_memcpy_unchecked']:.2f} x; /dev/shm {ms['dev_shm']:.1f}, empty "
            f"calls {ms['empty_calls']:.1f}, copy with checksum {ms['summed_copy']:.1f}, checksum "
            f"{ms['checksum']:.1f}"
        )
    return (
        f"{label} {name:<12} first {found['first_ms']:.0f} ms; {'; '.join(shown)}; idle "
        f"{found['idle_cores']:.2f} cores a process"
    )


def main() -> None:
    parser = parser_of(
        __doc__,
        seed="of the random weights",
        counts={"turns": (3, "of every transport"), "syncs": (20, "of a turn, in each condition")},
    )
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--gpu", action="store_true", help="weights on a GPU")
    names = tuple(dict.fromkeys((*TRANSPORTS, *GPU_TRANSPORTS)))
    parser.add_argument("--transports", nargs="+", choices=names, help="all that can be had")
    parser.add_argument("--generators", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--out", type=Path, help="weight_transport.json, or weight_transport_gpu")
    args = parser.parse_args()
    if args.gpu and not torch.cuda.is_available():
        parser.error("--gpu: torch sees no CUDA device")
    out = args.out or RESULTS / f"weight_transport{'_gpu' if args.gpu else ''}.json"
    asked = args.transports or (GPU_TRANSPORTS if args.gpu else TRANSPORTS)
    os.environ["OMP_NUM_THREADS"] = "1"  # read by the processes that Ray starts
    missing = {name: RECORDS[name].missing_on_machine() for name in (*asked, "nccl", "cuda_ipc")}
    here = [name for name in asked if missing[name] is None]
    for name, reason in missing.items():
        if reason is not None:
            print(f"not available here: {name} ({reason})")
    results: dict[str, Any] = {}
    broadcast: dict[str, Any] = {}
    ray.init(
        address="local",
        num_cpus=8,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
    )
    with tempfile.TemporaryDirectory() as directory:

        def turn(label: str, name: str, generators: int) -> dict[str, Any]:
            gpus = (1 if name == "nccl" else 1 / (1 + generators)) if args.gpu else 0.0
            config = config_of(SIZES[label], Path(directory), generators, args.seed, gpus)
            return measure(name, config, args.syncs)

        for label in args.sizes:
            turns: dict[str, list[dict[str, Any]]] = defaultdict(list)
            for _ in range(args.turns):
                for name in here:
                    turns[name].append(turn(label, name, 1))
            results[label] = {name: summarise(own) for name, own in turns.items()}
            for name, found in results[label].items():
                print(show(label, name, found), flush=True)
        for count in args.generators:
            turns = defaultdict(list)
            for _ in range(args.turns):
                for name in here:
                    turns[name].append(turn("64 MB", name, count))
            for name, own in turns.items():
                found = broadcast.setdefault(name, {})[str(count)] = summarise(own)
                print(show(f"64 MB to {count}", name, found), flush=True)
    ray.shutdown()
    result = {
        **provenance(args),
        "not_available": {name: why for name, why in missing.items() if why is not None},
        "sizes": results,
        "broadcast_64_mb": broadcast,
    }
    write(out, result)
    if not args.gpu:
        print(json.dumps({"bounds": bounds(results)}, indent=1))


def bounds(results: dict[str, Any]) -> dict[str, Any]:
    """The bounds for a machine without a GPU, and whether they hold."""
    found: dict[str, Any] = {}
    if "240 MB" in results:
        large = results["240 MB"]
        for condition, limit in (("free", 1.7), ("busy", 2.2)):
            best = min(large, key=lambda name: large[name][condition]["of_memcpy"])
            ratios = {
                key: large[best][condition][key] for key in ("of_memcpy", "of_memcpy_unchecked")
            }
            found[f"240 MB {condition}, at most {limit}"] = {best: ratios}
        if "object_store" in large:
            found["240 MB object_store, at most 3"] = {
                condition: large["object_store"][condition]["of_memcpy"]
                for condition in ("free", "busy")
            }
    if "16 MB" in results:
        found["16 MB over empty calls, at most 10 ms"] = {
            name: {
                condition: own[condition]["over_empty_calls_ms"] for condition in ("free", "busy")
            }
            for name, own in results["16 MB"].items()
        }
    found["auto (shm) over the fastest, at most 1.2"] = {
        label: own["shm"]["free"]["ms"]["total"]
        / min(other["free"]["ms"]["total"] for other in own.values())
        for label, own in results.items()
        if "shm" in own
    }
    return found


if __name__ == "__main__":
    run_benchmark(main)
