"""How long a policy takes to machines that fetch it at the same time: whole, and in parts.

Machines are network namespaces with links of a given rate (`tests/cluster/machines.py`), which need
root. The learner's end of the transport `object_store` is on one, a generator's end on each of the
others. A sync is timed from the call that publishes until the last machine has checked what it got;
both ways take turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from measure import parser_of, provenance, run_benchmark, write
from product import ROOT

from grpo_trainable.command_line import UsageError, number

sys.path.append(str(ROOT / "tests" / "cluster"))

import machines
from ray_cluster import ray_cluster

ROWS = 1000  # rows of each matrix, which is 4 MB
START_S, DEADLINE_S = 600.0, 120.0
WAYS = ("whole", "parts")
WARM_UP = 1  # syncs of each way that are not counted


# ---- On the machines -------------------------------------------------------------------------


class Publisher:
    """The learner's end; every weight is new in every round."""

    def __init__(self, matrices: int, far_machines: int) -> None:
        import torch

        from grpo_trainable.transports.choice import make_sender

        torch.set_num_threads(1)
        self._tensors = {str(i): torch.randn(ROWS, ROWS).t() for i in range(matrices)}
        self._senders = {
            "whole": make_sender("object_store"),
            "parts": make_sender("object_store", far_machines),
        }

    def publish(self, way: str, round_: int) -> tuple[Any, str, float]:
        """The handle, the checksum and the seconds that the learner was busy."""
        from grpo_trainable.checksums import storage_checksum
        from grpo_trainable.rollout import LiveWeights

        for tensor in self._tensors.values():
            tensor.add_(1.0)
        weights = LiveWeights(version=round_, round=round_, tensors=self._tensors)
        start = time.perf_counter()
        handle = self._senders[way].publish(weights)
        return handle, storage_checksum(self._tensors), time.perf_counter() - start

    def sent_mb(self) -> float:
        return _sent_mb()


class Fetcher:
    """A generator's end."""

    def __init__(self, first: float) -> None:
        import torch

        from grpo_trainable.transports.choice import make_receiver

        torch.set_num_threads(1)
        self._receiver = make_receiver("object_store", DEADLINE_S, first=first)

    def fetch(self, handle: Any) -> tuple[int, str, float]:
        """The round and the checksum of what arrived, and the seconds it took."""
        from grpo_trainable.checksums import storage_checksum

        start = time.perf_counter()
        weights = self._receiver.fetch(handle)
        return weights.round, storage_checksum(weights.tensors), time.perf_counter() - start

    def sent_mb(self) -> float:
        return _sent_mb()


def _sent_mb() -> float:
    """What this machine has sent through its cable since it was made, in units of 10⁶ bytes."""
    (line,) = (x for x in Path("/proc/self/net/dev").read_text().splitlines() if "eth0:" in x)
    return int(line.partition(":")[2].split()[8]) / 1e6


def in_cluster(args: argparse.Namespace) -> dict[str, Any]:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ray.init(address=args.inside, log_to_driver=False, logging_level="ERROR")
    home = ray.get_runtime_context().get_node_id()
    others = sorted(node["NodeID"] for node in ray.nodes() if node["NodeID"] != home)

    def on(node: str, cls: type, *words: Any) -> Any:
        place = NodeAffinitySchedulingStrategy(node, soft=False)
        return ray.remote(num_cpus=1, scheduling_strategy=place)(cls).remote(*words)

    learner = on(home, Publisher, args.matrices, len(others))
    readers = [on(node, Fetcher, i / len(others)) for i, node in enumerate(others)]
    ends = [learner, *readers]
    ray.get([end.sent_mb.remote() for end in ends], timeout=START_S)
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for turn in range(WARM_UP + args.repeats):
        for i, way in enumerate(WAYS):
            round_ = turn * len(WAYS) + i
            before = ray.get([end.sent_mb.remote() for end in ends], timeout=DEADLINE_S)
            start = time.perf_counter()
            handle, checksum, busy_s = ray.get(learner.publish.remote(way, round_))
            calls = [reader.fetch.remote(handle) for reader in readers]
            answers = ray.get(calls, timeout=DEADLINE_S)
            seconds = time.perf_counter() - start
            assert {answer[:2] for answer in answers} == {(round_, checksum)}
            del handle
            after = ray.get([end.sent_mb.remote() for end in ends], timeout=DEADLINE_S)
            if turn >= WARM_UP:
                found[way].append(
                    {
                        "seconds": seconds,
                        "learner_busy_s": busy_s,
                        "fetch_s": [answer[2] for answer in answers],
                        "sent_mb": [b - a for a, b in zip(before, after, strict=True)],
                    }
                )
    ray.shutdown()
    return found


# ---- Around them -----------------------------------------------------------------------------


def measured(args: argparse.Namespace) -> dict[str, Any]:
    environment = {
        "RAY_enable_worker_prestart": "0",
        "RAY_prestart_worker_first_driver": "0",
        "PYTHONPATH": str(ROOT),
    }
    with ray_cluster(1 + args.machines, **environment) as cluster:
        for machine in cluster.machines:
            machine.limit(args.mbit)
        command = [sys.executable, str(Path(__file__).resolve()), "--inside", cluster.address]
        command += ["--matrices", str(args.matrices), "--repeats", str(args.repeats)]
        status, printed = cluster.machines[0].run(command, cluster.environment)
    if status != 0:
        sys.exit(f"the machines could not be measured\n{printed}")
    return json.loads(printed.splitlines()[-1])


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    seconds = [run["seconds"] for run in runs]
    shares = [run["sent_mb"][0] / sum(run["sent_mb"]) for run in runs]
    return {
        "seconds": {
            "median": statistics.median(seconds),
            "min": min(seconds),
            "max": max(seconds),
        },
        "learner_busy_s": statistics.median(run["learner_busy_s"] for run in runs),
        "sent_by_learner_share": statistics.median(shares),
        "runs": runs,
    }


def main() -> None:
    parser = parser_of(
        __doc__, "broadcast.json", counts={"repeats": (10, "syncs timed of each way")}
    )
    parser.add_argument(
        "--machines", type=number(int, 1), default=4, help="that fetch, beside the learner's (4)"
    )
    parser.add_argument("--mbit", type=number(int, 1), default=400, help="a second, each way (400)")
    parser.add_argument("--matrices", type=number(int, 1), default=15, help="of 4 MB each (15)")
    parser.add_argument("--inside", metavar="ADDRESS", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        print(json.dumps(in_cluster(args)))
        return
    why = machines.missing()
    if why is not None:
        raise UsageError(f"no machines can be made here: {why}")
    result = provenance(args)
    found = {way: summary(runs) for way, runs in measured(args).items()}
    one_copy_s = args.matrices * ROWS * ROWS * 4 * 8 / (args.mbit * 1e6)
    for way, own in found.items():
        seconds = own["seconds"]
        print(
            f"{4 * args.matrices} MB to {args.machines} machines, {way}: median "
            f"{seconds['median']:.2f} s, {seconds['min']:.2f}-{seconds['max']:.2f} s, "
            f"{seconds['median'] / one_copy_s:.2f} x the {one_copy_s:.2f} s of one copy; the "
            f"learner sent {own['sent_by_learner_share']:.0%} of all bytes and was busy for "
            f"{own['learner_busy_s']:.2f} s"
        )
    workload = {"megabytes": 4 * args.matrices, "machines": args.machines, "mbit": args.mbit}
    write(args.out, {**result, "workload": workload, "one_copy_s": one_copy_s, "results": found})


if __name__ == "__main__":
    run_benchmark(main)
