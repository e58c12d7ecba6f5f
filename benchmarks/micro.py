"""Test small claims of the docs by measurement, each in one to five minutes on two idle cores.

    python benchmarks/micro.py                     every claim
    python benchmarks/micro.py packing learners    only these two claims

Each claim has a separate entry in the JSON, with its commit and date. Testing a claim again
replaces its entry.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import measure
from measure import GROUP_SIZE, MICROBATCH, NEW_TOKENS, PRESET, PROMPTS, THREADS

from reports.evaluations.files import DATA

if TYPE_CHECKING:
    from torch import Tensor

    from grpo_trainable.learner.learner import Learner
    from grpo_trainable.protocol.rollout import RolloutGroup

SMALL = {
    "preset": PRESET,
    "prompts": PROMPTS,
    "responses_per_prompt": GROUP_SIZE,
    "new_tokens": NEW_TOKENS,
}


def inside(work: Callable[..., Any], threads: int = 1, **options: Any) -> Any:
    """Run a function of this file in a fresh process, and return its result."""
    call = json.dumps({"work": work.__name__, "options": options})
    return measure.printed_by([sys.executable, __file__, "--inside", call], threads)


def turns(found: dict[str, Any]) -> str:
    """Return a line with the speed-up of the last function over the others."""
    ratios = (
        f"{ratio['median']:.2f} x as fast as {name} ({ratio['min']:.2f}-{ratio['max']:.2f})"
        for name, ratio in found["speed_up"].items()
    )
    return f"{list(found['seconds'])[-1]}: {', '.join(ratios)}"


# ---- packing: a gradient step on padded and on packed rows ------------------------------------

# Name -> prompt tokens, mean response tokens, standard deviation of the log of response tokens.
LENGTHS = {"equal": (12, 48, 0.0), "long tail": (12, 32, 1.0), "long prompt": (96, 32, 1.0)}
LONGEST = 4  # longest response, as a multiple of the mean length
KINDS = ("padded", "packed")
PRODUCT_SIZE = 2048  # rows and columns of the matrices whose product measures machine speed
PRODUCT_FLOP = 2 * PRODUCT_SIZE**3


def packing(args: argparse.Namespace) -> dict[str, Any]:
    rows = []
    for workload in LENGTHS:
        for threads in THREADS:
            options = {"workload": workload, "num_threads": threads, "seed": args.seed}
            row = {"workload": workload, "threads": threads}
            row |= inside(packed_and_padded, threads, repeats=args.repeats, **options)
            row["peak_resident_mb"] = {
                kind: inside(memory_of_steps, threads, kind=kind, **options) for kind in KINDS
            }
            rows.append(row)
            print(f"  {workload}, {threads} threads: {turns(row)}; {row['peak_resident_mb']} MB")
            print(f"  difference: {row['difference']}")
            print(f"  packed: {row['packed_over_floor']:.2f} x the time of its matrix products")
    return {
        "workload": {**SMALL, "longest": LONGEST, "prompt_mean_sigma": LENGTHS},
        "results": rows,
    }


def packed_and_padded(workload: str, num_threads: int, seed: int, repeats: int) -> dict[str, Any]:
    pairs = {kind: learner_and_groups(workload, kind, num_threads, seed) for kind in KINDS}
    difference = difference_of(**pairs)  # before the first step, so weights are equal
    works = {"product": matrix_product(), **{kind: gradient_step(*pairs[kind]) for kind in KINDS}}
    found = measure.in_turns(works, repeats=repeats)
    speed_up = found["speed_up"].pop("product")["median"]
    floor = flop_of_packed(pairs["packed"][1]) / PRODUCT_FLOP
    return {
        **found,
        "floor_s": floor * found["seconds_medians"]["product"],
        "packed_over_floor": 1 / floor / speed_up,
        "difference": difference,
    }


def matrix_product() -> Callable[[], object]:
    """Return a function that multiplies two large matrices with `PRODUCT_FLOP` operations."""
    import torch

    left, right, out = (torch.randn(PRODUCT_SIZE, PRODUCT_SIZE) for _ in range(3))
    return lambda: torch.mm(left, right, out=out)


def flop_of_packed(groups: Sequence[RolloutGroup]) -> int:
    """Return the number of operations that a packed step spends on products with weight matrices.

    A backward pass takes twice as many operations as a forward pass. The body processes a prompt
    once, and the last token of a response is never an input. The head processes one position for
    each response token.
    """
    from grpo_trainable.models.model_config import PRESETS

    model = PRESETS[PRESET]
    head = sum(int(group.response_mask.sum()) for group in groups)
    body = head + sum(len(group.prompt_ids) - len(group.response_mask) for group in groups)
    return 6 * (model.matmul_parameters * body + model.vocab_size * model.d_model * head)


def difference_of(
    padded: tuple[Learner, list[RolloutGroup]], packed: tuple[Learner, list[RolloutGroup]]
) -> dict[str, float]:
    """Return the differences in log-probs and in the gradient of their sum."""
    (log_probs, gradient), (packed_log_probs, packed_gradient) = map(scored, (padded, packed))
    return {
        "log_prob_max_nats": float((packed_log_probs - log_probs).abs().max()),
        "gradient_relative": float((packed_gradient - gradient).norm() / gradient.norm()),
    }


def scored(pair: tuple[Learner, list[RolloutGroup]]) -> tuple[Tensor, Tensor]:
    """Return the log-probs (B, S) of all responses, and the flat gradient of their sum."""
    import torch

    from grpo_trainable.models.policy import Policy
    from grpo_trainable.models.scoring import response_log_probs
    from grpo_trainable.protocol.rollout import collate

    learner, groups = pair
    policy = learner.policy
    assert isinstance(policy, Policy)
    batch = collate(groups, [torch.ones(GROUP_SIZE)] * len(groups), 0)
    log_probs, _ = response_log_probs(
        *(policy, batch.input_ids, batch.target_ids, batch.response_mask),
        temperature=1.0,
        min_new_tokens=1,
        end_ids=[],
    )
    gradients = torch.autograd.grad(log_probs.sum(), list(policy.trained().values()))
    return log_probs.detach(), torch.cat([gradient.flatten() for gradient in gradients])


def memory_of_steps(workload: str, kind: str, num_threads: int, seed: int) -> float:
    step = gradient_step(*learner_and_groups(workload, kind, num_threads, seed))
    for _ in range(3):
        step()
    return measure.peak_resident_mb()


def gradient_step(learner: Learner, groups: list[RolloutGroup]) -> Callable[[], object]:
    return lambda: learner.update([groups])


def learner_and_groups(
    workload: str, kind: str, num_threads: int, seed: int
) -> tuple[Learner, list[RolloutGroup]]:
    import numpy as np

    from grpo_trainable.learner.learner import Learner
    from grpo_trainable.transports.in_process import InProcess

    prompt, mean, sigma = LENGTHS[workload]
    drawn = np.random.default_rng(seed).lognormal(-sigma * sigma / 2, sigma, (PROMPTS, GROUP_SIZE))
    lengths = (drawn * mean).round().clip(1, LONGEST * mean).astype(int).tolist()
    config = learner_config(
        seed,
        model={"preset": PRESET, "packing": kind == "packed"},
        resources={"worker_cpus": float(num_threads)},
        # This loss has no ratio, so it clips no token of these random responses.
        loss={"type": "reinforce_with_baseline", "kl_monitor": False},
    )
    return Learner(config, InProcess()), random_groups([prompt] * PROMPTS, lengths, seed)


def learner_config(seed: int, **changes: Any) -> Any:
    from grpo_trainable.config import GRPOConfig

    return GRPOConfig.from_dict(
        {
            "seed": seed,
            "model": {"preset": PRESET},
            "rollout": {"prompts": PROMPTS, "group_size": GROUP_SIZE, "max_new_tokens": 192},
            # The learning rate is small, so the batch stays on-policy over all repeats.
            "optim": {"microbatch": MICROBATCH, "lr": 1e-6},
            "loss": {"kl_monitor": False},
            **changes,
        }
    )


def random_groups(
    prompts: Sequence[int], lengths: Sequence[Sequence[int]], seed: int
) -> list[RolloutGroup]:
    """Return groups of random tokens with the given prompt and response lengths."""
    import torch

    from grpo_trainable.models.model_config import PRESETS
    from grpo_trainable.protocol.rollout import RolloutGroup

    draws, vocab = torch.Generator().manual_seed(seed), PRESETS[PRESET].vocab_size
    groups = []
    for index, (prompt, own) in enumerate(zip(prompts, lengths, strict=True)):
        mask = torch.arange(max(own)) < torch.tensor(own)[:, None]
        groups.append(
            RolloutGroup(
                prompt_index=index,
                prompt_ids=torch.randint(5, vocab, (prompt,), generator=draws),
                response_ids=torch.randint(5, vocab, mask.shape, generator=draws),
                response_mask=mask,
                behaviour_log_probs=torch.full(mask.shape, -math.log(vocab)),
                rewards=torch.rand(GROUP_SIZE, generator=draws),
                finished=torch.ones(GROUP_SIZE, dtype=torch.bool),
                token_versions=torch.zeros(mask.shape, dtype=torch.int32),
                token_rounds=torch.zeros(mask.shape, dtype=torch.int32),
            )
        )
    return groups


# ---- sampler_dtype: sampling in float32 and in bfloat16 ---------------------------------------


def sampler_dtype(args: argparse.Namespace) -> dict[str, Any]:
    rows, common = [], {"seed": args.seed, "repeats": args.repeats}
    for threads in THREADS:
        rows.append({"threads": threads, **inside(both_dtypes, threads, **common)})
        print(f"  {threads} threads: {turns(rows[-1])}; nats {rows[-1]['nats_from_learner']}")
    return {"workload": SMALL, "results": rows}


def both_dtypes(seed: int, repeats: int) -> dict[str, Any]:
    from grpo_trainable.engines.agreement import mean_difference
    from grpo_trainable.models.narrow import narrow
    from grpo_trainable.models.transformer import TransformerLM

    engines = {name: measure.engine_of_random_weights(seed) for name in ("float32", "bfloat16")}
    narrow(engines["bfloat16"].model)
    learner = TransformerLM(engines["float32"].model.config, seed)
    requests = measure.sample_requests(seed)
    nats = {name: mean_difference(own, learner, requests, 0) for name, own in engines.items()}
    works = {
        name: lambda own=own: own.generate(requests, lambda: None) for name, own in engines.items()
    }
    return {**measure.in_turns(works, repeats=repeats), "nats_from_learner": nats}


# ---- checkpoint_cost: the share of wall-clock that checkpoints take ---------------------------


def checkpoint_cost(args: argparse.Namespace) -> dict[str, Any]:
    """Run the default workload with a checkpoint every round, and with one every ten rounds."""
    runs = {}
    for arm in ("sync", "colocated_k1"):
        for every in (1, 10):
            found = checkpoints_of(arm, every, args.seed)
            runs[f"{arm}, every {every}"] = found
            print(f"  {arm}, every {every}: {found['share']:.1%} of wall-clock")
    return {"workload": {"space": "async_vs_sync", "rounds": CHECKPOINTED}, "runs": runs}


CHECKPOINTED = 31  # rounds


def checkpoints_of(arm: str, every: int, seed: int) -> dict[str, float]:
    options = ["--iterations", str(CHECKPOINTED), "--checkpoint-every", str(every)]
    options += measure.assignments({"eval.every": CHECKPOINTED, "eval.prompts": 16})
    with measure.finished_trial(arm, seed=seed, options=options) as directory:
        trace = json.loads((directory / "trace.json").read_text())
    spans = {"round": [], "checkpoint": []}
    for event in trace:
        if event["ph"] == "X" and event["cat"] == "trial" and event["name"] in spans:
            spans[event["name"]].append((event["ts"] / 1e6, event["dur"] / 1e6))
    rounds = sorted(spans["round"])[2:]  # the first rounds are slower
    begin, end = rounds[0][0], sum(rounds[-1])
    seconds = [length for start, length in spans["checkpoint"] if begin <= start < end]
    return {
        "share": sum(seconds) / (end - begin),
        "checkpoint_s": statistics.median(seconds),
        "round_s": (end - begin) / len(rounds),
    }


# ---- sync_share: the share of a round that the transfer of weights takes ----------------------


def sync_share(args: argparse.Namespace) -> dict[str, Any]:
    from asynchrony import options

    shares = {}
    for workload in ("default", "small"):
        for arm in ("sync", "async_k1"):
            for transport in ("auto", "object_store"):
                words = options(workload, [f"transport={transport}"])
                rows = measure.run_trial(arm, seed=args.seed, options=words)
                found = measure.spread(
                    [
                        row["time/sync_s"]
                        / (row["time/wall_clock_s"] - before["time/wall_clock_s"])
                        for before, row in pairwise(rows)
                    ]
                )
                name = f"{workload}, {arm}, {transport}"
                shares[name] = found
                print(f"  {name}: {found['median']:.2%} of a round")
    return {"share": shares}


# ---- learners: two learners compared with one -------------------------------------------------

DEADLINE_S = 600.0


def learners(args: argparse.Namespace) -> dict[str, Any]:
    rows = [ranks("replicated", 1, args)]
    rows += [ranks(strategy, 2, args) for strategy in ("replicated", "fsdp2")]
    alone = rows[0]
    for row in rows:
        row["speed_up"] = alone["seconds"]["median"] / row["seconds"]["median"]
        row["held_share"] = max(row["held_mb"]) / max(alone["held_mb"])
        print(
            f"  {row['learners']} {row['strategy']}: {row['speed_up']:.2f} x as fast as one "
            f"learner; each holds at most {row['held_share']:.2f} of all parameters and moments"
        )
    return {"workload": SMALL, "microbatch": MICROBATCH, "results": rows}


def ranks(strategy: str, size: int, args: argparse.Namespace) -> dict[str, Any]:
    """Run `size` learners in separate processes, with one thread each."""
    from grpo_trainable.learner.process_group import Rendezvous

    store = Rendezvous("127.0.0.1", DEADLINE_S)
    options = {"strategy": strategy, "size": size, "port": store.place[1]}
    options |= {"seed": args.seed, "repeats": args.repeats}
    calls = [
        json.dumps({"work": in_rank.__name__, "options": {**options, "rank": rank}})
        for rank in range(size)
    ]
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, "--inside", call],
            env=measure.environment_of(1),
            stdout=subprocess.PIPE,
            text=True,
        )
        for call in calls
    ]
    outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        sys.exit(f"{strategy}, {size} learners: a rank failed; see the error above")
    found = [json.loads(output.splitlines()[-1]) for output in outputs]
    return {
        "strategy": strategy,
        "learners": size,
        "seconds": measure.spread(found[0]["seconds"]),
        "held_mb": [rank["held_mb"] for rank in found],
        "grad_norm": [rank["grad_norm"] for rank in found],
    }


def in_rank(
    strategy: str, rank: int, size: int, port: int, seed: int, repeats: int
) -> dict[str, Any]:
    import torch

    from grpo_trainable.learner.learner import Learner
    from grpo_trainable.learner.process_group import ProcessGroup
    from grpo_trainable.learner.ranks import Replicas
    from grpo_trainable.learner.shards import Shards
    from grpo_trainable.transports.in_process import InProcess

    group = ProcessGroup(torch.device("cpu"), DEADLINE_S)
    group.join(rank, size, ("127.0.0.1", port))
    held = {"replicated": Replicas, "fsdp2": Shards}[strategy](group)
    config = learner_config(seed, placement="disaggregated")
    learner = Learner(config, None if rank else InProcess(), ranks=held)
    groups = random_groups(
        measure.prompt_lengths(seed), [[NEW_TOKENS] * GROUP_SIZE] * PROMPTS, seed
    )
    seconds = []
    for repeat in range(3 + repeats):
        torch.distributed.barrier()
        began = time.perf_counter()
        (step,) = learner.update([groups]).steps
        assert not step.skipped
        if repeat >= 3:
            seconds.append(time.perf_counter() - began)
    tensors = [*learner.policy.parameters(), *learner.optimizer.tensors().values()]
    local = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]
    held_mb = sum(tensor.nbytes for tensor in local) / 1e6
    group.leave()
    return {"seconds": seconds, "held_mb": held_mb, "grad_norm": step.grad_norm}


# ---- greedy: the shipped arithmetic policy is better than its samples show --------------------

PROBLEMS = 512
HOW = {
    "greedy": ["--temperature", "0", "--samples", "1"],
    "sampled": ["--temperature", "1", "--samples", "8"],
}


def greedy(args: argparse.Namespace) -> dict[str, Any]:
    found = {}
    for how, options in HOW.items():
        with tempfile.TemporaryDirectory() as place:
            out = Path(place) / how
            command = [sys.executable, str(measure.ROOT / "launch" / "evaluate.py")]
            command += ["--task", "math", "--prompts", str(PROBLEMS), "--seed", str(args.seed)]
            command += [*options, "--out", str(out)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            found[how] = json.loads((out / DATA).read_text())["figures"]
            print(f"  {how}: pass@1 {found[how]['pass@1']['value']:.3f}")
    workload = {"policy": "arithmetic", "task": "math", "problems": PROBLEMS, "how": HOW}
    return {"workload": workload, **found}


# ---- monitor: the KL measured on some of the responses, and on all ----------------------------

ROUNDING = 1e-5  # nats by which two passes over equal rows may differ


def monitor(args: argparse.Namespace) -> dict[str, Any]:
    """For each seed, compare two trials with equal weights.

    One trial measures the KL on 16 responses of each round, and the other on all responses. The
    result of each finished seed is kept, so an interrupted comparison continues with the next seed.
    """
    kept = measure.read(args.out).get("monitor", {})
    origin = {**measure.provenance(args), "claim": CLAIMS["monitor"], "rounds": args.rounds}
    by_seed = kept.get("by_seed", {}) if measure.same_run(kept, origin, "rounds", "seed") else {}
    for seed in range(args.seed, args.seed + args.seeds):
        if str(seed) not in by_seed:
            by_seed[str(seed)] = compared_monitors(args.rounds, seed)
            entry = {**origin, "by_seed": by_seed}
            measure.write(args.out, {**measure.read(args.out), "monitor": entry}, quiet=True)
    seeds = [by_seed[str(seed)] for seed in range(args.seed, args.seed + args.seeds)]
    agreement = {
        name: {key: statistics.mean(one["agreement"][name][key] for one in seeds) for key in first}
        for name, first in seeds[0]["agreement"].items()
    }
    for name, found in agreement.items():
        # Different rounds have independent draws, and the expected error is 0.
        found["mean_error_se"] = math.sqrt(
            found.pop("mean_squared_error") / (args.rounds * len(seeds))
        )
        print(
            "  {name}: {within_two_se:.1%} within two standard errors; mean error "
            "{mean_error:.2g} ± {mean_error_se:.2g}".format(name=name, **found)
        )
    share = {
        responses: measure.spread([x for one in seeds for x in one["reference_share"][responses]])
        for responses in seeds[0]["reference_share"]
    }
    for responses, found in share.items():
        print(f"  {responses} responses: reference takes {found['median']:.1%} of a round")
    return {
        "rounds": args.rounds,
        "agreement": agreement,
        "reference_share": share,
        "by_seed": by_seed,
    }


def compared_monitors(rounds: int, seed: int) -> dict[str, Any]:
    """Compare metrics from a sample of the responses with metrics from all responses.

    The trials have equal seeds. Also return the share of each round's time that the reference
    takes.
    """
    from grpo_trainable.telemetry.metrics import SAMPLED, SE

    rows = {}
    for responses in ("16", "all"):
        changes = {"eval.every": rounds, "eval.prompts": 16}
        changes["loss.kl_monitor_responses"] = responses
        options = ["--iterations", str(rounds), *measure.assignments(changes)]
        rows[responses] = measure.run_trial("colocated_k1", seed=seed, options=options)
    agreement = {}
    for name in SAMPLED:
        pairs = zip(rows["16"], rows["all"], strict=True)
        found = [(own[name] - full[name], own[f"{name}{SE}"]) for own, full in pairs]
        agreement[name] = {
            "within_two_se": statistics.mean(abs(e) <= 2 * se + ROUNDING for e, se in found),
            "mean_error": statistics.mean(error for error, _ in found),
            "mean_squared_error": statistics.mean(error**2 for error, _ in found),
            "mean_se": statistics.mean(se for _, se in found),
        }
    share = {
        responses: [row["time/reference_s"] / row["time/step_s"] for row in own]
        for responses, own in rows.items()
    }
    return {"agreement": agreement, "reference_share": share}


# ---- scale: the work of the trial's process with more generators -----------------------------

CHUNKS = 512  # number of one-prompt chunks in a repeat: four per generator and round
WARM_UP = 2  # rounds before the measured ones
SPARE = 4  # planned rounds after the measured ones, so that no measured round requests fewer chunks
GENERATORS = (1, 2, 4, 8, 16, 32, 64)


def scale(args: argparse.Namespace) -> dict[str, Any]:
    """Measure the CPU time of a trial's process per chunk.

    Actors are virtual and use no CPU time, so this time is the work of the pipeline, without Ray's
    calls. It limits the number of generators that one trial can use.
    """
    rows = []
    for count in GENERATORS:
        found = [seconds_a_chunk(count, args.seed + repeat) for repeat in range(3)]
        rows.append({"generators": count, "thread_s_a_chunk": found})
        print(
            f"  {count} generators: {1e3 * statistics.median(found):.2f} ms of CPU time per chunk"
        )
    return {"workload": {"chunks": CHUNKS, "responses": GROUP_SIZE}, "rows": rows}


def seconds_a_chunk(generators: int, seed: int) -> float:
    """Return the CPU seconds of this thread per chunk."""
    from grpo_trainable.simulation.trial import virtual_trial

    rounds, prompts = max(2, CHUNKS // (4 * generators)), 4 * generators
    config = learner_config(
        seed,
        placement="disaggregated",
        rounds=WARM_UP + rounds + SPARE,
        lag=1,
        rollout={"prompts": prompts, "unit_prompts": 1, "group_size": GROUP_SIZE},
        eval={"every": 10**6, "prompts": 1, "samples": 1},
        resources={"num_generators": generators},
    )
    trial = virtual_trial(config, seed=seed, max_waits=10**9)
    trial.pipeline.send_first_weights()
    for _ in range(WARM_UP):
        trial.pipeline.run_round()
    began = time.thread_time()
    for _ in range(rounds):
        trial.pipeline.run_round()
    return (time.thread_time() - began) / (rounds * prompts)


# ---- The table --------------------------------------------------------------------------------


# name of a function -> the claim that it tests
CLAIMS = {
    "packing": "packed rows make a gradient step faster and use less memory",
    "sampler_dtype": "bfloat16 makes sampling faster",
    "checkpoint_cost": "checkpoints take one or two percent of wall-clock",
    "sync_share": "sending weights takes less than a hundredth of a round",
    "learners": "two learners take a step nearly twice as fast as one",
    "monitor": "the KL of 16 responses agrees with the KL of all, and takes less time",
    "scale": "the work of a trial's process does not grow with the number of generators",
    "greedy": "the arithmetic policy solves more problems greedily than with one sample",
}


def main() -> None:
    table = "\n".join(f"  {name:<21}{claim}" for name, claim in CLAIMS.items())
    parser = measure.parser_of(
        f"{__doc__}\n{table}",
        "micro.json",
        seed="seed of weights and random draws",
        counts={
            "repeats": (7, "number of timed repeats"),
            "rounds": (12, "number of rounds of each trial for the claim `monitor`"),
            "seeds": (1, "number of seeds for the claim `monitor`"),
        },
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="claims to test (all)")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside is not None:
        print(json.dumps(measured_here(**json.loads(args.inside))))
        return
    for name in args.names:
        if name not in CLAIMS:
            parser.error(f"{name}: unknown claim; valid: {', '.join(CLAIMS)}")
    for name in args.names or CLAIMS:
        print(f"{name}: {CLAIMS[name]}", flush=True)
        entry = {**measure.provenance(args), "claim": CLAIMS[name]}
        entry |= globals()[name](args)
        entry = measure.checked(entry)
        measure.write(args.out, {**measure.read(args.out), name: entry}, quiet=True)


def measured_here(work: str, options: dict[str, Any]) -> Any:
    from grpo_trainable.telemetry.actor_process import keep_freed_memory

    keep_freed_memory()
    return globals()[work](**options)


if __name__ == "__main__":
    measure.run_benchmark(main)
