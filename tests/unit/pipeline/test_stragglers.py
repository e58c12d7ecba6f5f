"""Prompts that take much longer than others: `rollout.stragglers`."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from virtual_time import long_tailed_durations, of_stream, used_after_release

from grpo_trainable.config import GRPOConfig, schedule
from grpo_trainable.pipeline import collector as collector_module
from grpo_trainable.pipeline.by_task import ByTask
from grpo_trainable.pipeline.collector import Collector
from grpo_trainable.pipeline.ledger import BatchRule, Ledger
from grpo_trainable.pipeline.report import Recorder, RoundReport
from grpo_trainable.pipeline.requeued_prompts import RequeuedPrompts
from grpo_trainable.protocol.versions import StalenessGate
from grpo_trainable.simulation.runtime import TICK, Durations, constant_durations
from grpo_trainable.simulation.trial import SCORED_APART, VirtualTrial, virtual_trial

STRAGGLERS = ("wait", "drop", "requeue")


def config_of(stragglers: str, lag: int, **rollout: Any) -> GRPOConfig:
    """Return a config with chunks of one prompt. `stragglers` is set only if it has an effect."""
    reads = lag > 0 and stragglers != "wait"
    return GRPOConfig.from_dict(
        {
            "placement": "disaggregated",
            "lag": lag,
            "rounds": rollout.pop("rounds", 4),
            "weight_update": rollout.pop("weight_update", "between_batches"),
            "task": {"reward": rollout.pop("reward", "virtual:reward"), "reward_deadline_s": 0.1},
            "eval": {"every": 99, "prompts": 1, "samples": 1},
            "resources": {"num_generators": rollout.pop("generators", 2), "deadline_s": 1e6},
            "rollout": {
                "prompts": 2,
                "unit_prompts": 1,
                "group_size": 2,
                **({"stragglers": stragglers} if reads else {}),
                **rollout,
            },
        }
    )


def slow(*examples: int, factor: float = 100.0) -> Callable[[int], float]:
    return lambda example: factor if example in examples else 1.0


def a_tenth_is_slow(example: int) -> float:
    """Return 10 or 100 for a random tenth of the examples, and 1 for the others."""
    draw = random.Random(example).random()
    return 1.0 if draw > 0.1 else 10.0 if draw > 0.03 else 100.0


def trained_examples(w: VirtualTrial) -> list[list[int]]:
    """Return the examples that each round trained on."""
    return [list(call.examples) for call in w.trained]


def named_examples(report: RoundReport) -> list[int]:
    """Return the examples that the notes of a round name as dropped."""
    notes = [note for note in report.notes if note.startswith("dropped")]
    return [int(n) for note in notes for n in note.split("(")[1][:-1].split(" ", 1)[1].split(", ")]


def assert_within_lag(w: VirtualTrial) -> None:
    for call in w.trained:
        ages = [call.round - round_ for batch in call.group_rounds for round_ in batch]
        assert max(ages) <= w.config.lag
    assert not used_after_release(w)


# ---- By hand -----------------------------------------------------------------------------------


def test_a_batch_passes_over_prompts_that_were_given_up() -> None:
    rule = BatchRule(size=3, most=5, redraws=2)
    assert rule.end(0, []) == 3
    assert rule.end(0, [], [1]) == 4  # the batch takes prompts 0, 2 and 3
    assert rule.end(0, [], [2, 3, 5]) == 5  # takes 0, 1 and 4
    assert rule.end(0, [], [3]) == 3  # takes 0, 1 and 2; prompt 3 belongs to the next batch
    assert rule.end(3, [], [3]) == 7  # takes 4, 5 and 6
    # The batch takes prompts 0, 2 and 3. Prompt 2 is left out. Prompt 5 replaces it, because prompt
    # 4 was given up.
    assert rule.end(0, [2], [1, 4]) == 6


def test_a_requeued_example_gets_the_next_new_prompt() -> None:
    requeued = RequeuedPrompts()
    assert requeued.pick([0, 1, 2, 3]) == [0, 1, 2, 3]
    requeued.requeue([1])
    assert requeued.waiting == 1
    again = RequeuedPrompts()
    again.load_state(json.loads(json.dumps(requeued.state())))
    for record in (requeued, again):
        assert record.pick([4, 5]) == [1, 4]
        assert record.pick([4, 5]) == [1, 4]
        assert record.waiting == 0
        assert not record.are_new([3, 4])
        assert record.are_new([3, 5])
        assert record.settle([0, 2, 3, 4]) == [0, 2, 3, 1]
        assert record.state() == {
            "next_example": 5, "waiting": [], "examples": [[5, 4]], "second": [],
        }  # fmt: skip


def test_later_prompts_take_the_place_of_a_chunk_that_was_given_up() -> None:
    ledger = Ledger(config_of("drop", lag=1))
    chunks = [ledger.take() for _ in range(4)]
    for chunk in chunks[1:]:
        ledger.settle(chunk, chunk.prompt_indices)
    assert not ledger.complete(0)
    assert ledger.due_round == 2
    ledger.give_up(chunks[0])
    first, second = ledger.batches_of(0)[0], ledger.batches_of(1)[0]
    assert ledger.batch(first).accepted == [1, 2]
    assert ledger.batch(first).came_back == [1, 2]
    assert ledger.batch(first).given_up == [0]
    assert ledger.due_round == 1  # round 1 lacks a prompt
    again = Ledger(config_of("drop", lag=1))
    again.load_state(json.loads(json.dumps(ledger.state())))
    for own in (ledger, again):
        chunk = own.take()
        assert chunk.prompt_indices == (4,)
        own.settle(chunk, [4])
        assert own.batch(second).accepted == [3, 4]
        assert own.in_flight == 0


def test_a_replacement_has_the_size_of_the_chunk_that_was_given_up() -> None:
    """A round has chunks of 2, 2 and 1 prompts. Chunks of both sizes are given up."""
    config = config_of("drop", lag=1, prompts=5, unit_prompts=2)
    for given_up, replacements in [
        ([(4,)], [(10,)]),
        ([(0, 1)], [(10, 11)]),
        ([(4,), (9,)], [(10,), (11,)]),
        ([(0, 1), (2, 3)], [(10, 11), (12, 13)]),
    ]:
        ledger = Ledger(config)
        chunks = [ledger.take() for _ in range(6)]
        for chunk in chunks:
            if chunk.prompt_indices in given_up:
                ledger.give_up(chunk)
        for indices in replacements:
            assert ledger.due_round < 2
            assert ledger.take().prompt_indices == indices
        assert ledger.due_round == 2


def test_each_choice_by_hand() -> None:
    """Generator 0 samples prompt 0 for 100 ticks. Meanwhile, generator 1 runs out of work."""
    trained = {
        "wait": [[0, 1], [2, 3], [4, 5], [6, 7]],
        "drop": [[1, 2], [3, 4], [5, 6], [7, 8]],
        # Example 0 is sampled again as prompt 4.
        "requeue": [[1, 2], [3, 0], [4, 5], [6, 7]],
    }
    for stragglers, expected in trained.items():
        w = virtual_trial(
            config_of(stragglers, lag=1), durations=constant_durations(), slowness=slow(0)
        )
        reports = w.run(4)
        assert trained_examples(w) == expected
        assert_within_lag(w)
        assert len(of_stream(w, "cancelled")) == (stragglers != "wait")
        last = reports[-1].metrics
        assert last["count/requested"] == (9 if stragglers == "drop" else 8)
        assert last["count/trained"] == 8
        assert last["count/dropped"] == (stragglers == "drop")
        assert last["count/dropped_straggler"] == (stragglers == "drop")
        assert last["count/requeued"] == (stragglers == "requeue")
        assert last["count/in_flight"] == last["count/waiting"] == 0
        told = [note for report in reports for note in report.notes]
        assert told == {
            "wait": [],
            "drop": ["dropped 1 straggler (example 0)"],
            "requeue": ["requeued 1 straggler (example 0)"],
        }[stragglers]  # fmt: skip
        share = 2 / 3 if stragglers == "drop" else 1.0
        assert [r.metrics["group/accepted_fraction"] for r in reports] == [share, 1, 1, 1]


def test_cancelling_ends_the_call_and_lets_the_next_begin() -> None:
    w = virtual_trial(config_of("drop", lag=1), durations=constant_durations(), slowness=slow(0))
    w.run(4)
    (cancelled,) = of_stream(w, "cancelled")
    (behind,) = [call for call in of_stream(w, "train") if call.prompt_indices == (2,)]
    assert cancelled.prompt_indices == (0,)
    assert cancelled.actor == behind.actor
    assert cancelled.end == behind.start


def test_nobody_is_given_up_while_a_generator_has_work_or_in_the_last_rounds() -> None:
    """At lag 8, the work of seven more rounds hides a prompt that takes as long as ten others."""
    w = virtual_trial(
        config_of("drop", lag=8, rounds=12),
        durations=constant_durations(),
        slowness=slow(0, factor=10),
    )
    reports = w.run(12)
    assert reports[-1].metrics["count/dropped"] == 0
    late = virtual_trial(config_of("drop", lag=1), durations=constant_durations(), slowness=slow(6))
    assert late.run(4)[-1].metrics["count/dropped"] == 0


def test_a_chunk_is_given_up_only_if_two_later_chunks_of_a_generator_have_passed_it() -> None:
    """Generator 1 samples chunks 1 and 3, then chunk 0 is given up. Chunk 2 begins after it.

    Generator 1 next samples chunk 4, in half a tick, and then has no work. No further chunk may be
    sampled before round 0 is complete, so round 0 waits for chunk 2, even if chunk 2 is slow.
    """
    for seconds_of_2 in (1.0, 100.0):
        slowness = {0: 100.0, 2: seconds_of_2, 4: 0.5}
        w = virtual_trial(
            config_of("drop", lag=1),
            durations=constant_durations(),
            slowness=lambda example, slowness=slowness: slowness.get(example, 1.0),
        )
        w.run(4)
        assert [call.prompt_indices for call in of_stream(w, "cancelled")] == [(0,)]
        assert trained_examples(w) == [[1, 2], [3, 4], [5, 6], [7, 8]]


def test_a_chunk_does_not_begin_before_its_generator_has_loaded_the_weights() -> None:
    """Generator 0 takes 100 ticks to load the weights of round 1."""
    config = config_of("drop", lag=3, rounds=8, prompts=4)
    w = virtual_trial(
        config,
        durations=lambda actor, stage: (
            (100 if (actor, stage) == ("generator-0", "sync") else 1) * TICK
        ),
    )
    w.run(8)
    assert not of_stream(w, "cancelled")


def test_requeued_prompts_are_lost_under_other_settings_and_the_accounts_close() -> None:
    """One of four prompts waits to be requested again when the settings change."""
    first, second = (new_collector(config_of(s, lag=1)) for s in ("requeue", "drop"))
    chunks = [first.take() for _ in range(4)]
    first.give_up(chunks[0])
    assert first.metrics()["count/in_flight"] == 4
    assert first.counts.requested == 4
    state = json.loads(json.dumps({**first.state(), "learner_round": 0}))
    second.load_state(state, [], same_sampling=False)
    assert second.counts.dropped_lost == 4
    assert second.counts.requeued == 0
    assert second.take().prompt_indices == (4,)
    assert second.counts.requested == 5
    assert second.metrics()["count/in_flight"] == 1


def new_collector(config: GRPOConfig) -> Collector:
    gate = StalenessGate(lag=config.lag, max_age=config.lag)
    return Collector(config, gate, Recorder(), ByTask(config))


# ---- Any timing, and kills -----------------------------------------------------------------------


class Killed(Exception):
    """Stands for a SIGKILL of all processes of a trial."""


def run_with_kills(
    config: GRPOConfig, seed: int, kills: int, new_trial: Callable[[int], VirtualTrial]
) -> tuple[dict[int, tuple[list[int], list[int]]], RoundReport]:
    """Run a trial that is killed at random moments, and resumed from its last checkpoint.

    The checkpoint is at most two rounds old. Return, for each round as it was last run, the
    examples that it trained on and those that its notes name as dropped. Also return the last
    report.
    """
    rng = random.Random(seed)
    rounds: dict[int, tuple[list[int], list[int]]] = {}
    saved: tuple[str, list, Any] | None = None
    for life in range(kills + 1):
        w = new_trial(seed * 1000 + life)
        if saved is not None:
            state, groups, learner = saved
            w.learners.load_state(learner)
            w.pipeline.load_state(json.loads(state), groups)
        if life < kills:
            kill_after(w, rng.randint(1, 32))
        try:
            w.pipeline.send_first_weights()
            while True:
                report = w.pipeline.run_round()
                rounds[report.round] = (trained_examples(w)[-1], named_examples(report))
                assert_within_lag(w)
                if report.round % 2 == 0 or report.last:
                    groups = w.pipeline.buffer.groups()
                    saved = json.dumps(w.pipeline.state()), groups, w.learners.state()
                if report.last:
                    assert life == kills, f"the trial ended after {life} kills"
                    return rounds, report
        except Killed:
            pass
    raise AssertionError("the last life is not killed")


def kill_after(w: VirtualTrial, waits: int) -> None:
    wait = w.runtime.wait

    def wait_or_die(calls: Any, timeout_s: float) -> Any:
        nonlocal waits
        waits -= 1
        if waits < 0:
            raise Killed
        return wait(calls, timeout_s)

    w.runtime.wait = wait_or_die


def assert_nothing_lost(
    config: GRPOConfig, rounds: dict[int, tuple[list[int], list[int]]], last: RoundReport
) -> None:
    """Check that every drawn example was either trained on or named as dropped, exactly once."""
    assert sorted(rounds) == list(range(1, config.rounds + 1))
    trained = [example for examples, _ in rounds.values() for example in examples]
    named = [example for _, examples in rounds.values() for example in examples]
    counts = {name[6:]: value for name, value in last.metrics.items() if name[:6] == "count/"}
    # The stream is drawn in order and without a gap.
    drawn = range(int(counts["requested"]))
    assert sorted(trained + named) == list(drawn), "trained plus named differs from drawn"
    assert len(trained) == counts["trained"] == config.rounds * schedule.prompts_per_round(config)
    assert len(named) == counts["dropped"] == counts["dropped_straggler"]
    assert counts["in_flight"] == counts["waiting"] == counts["dropped_stale"] == 0
    if config.rollout.stragglers != "drop":
        assert not named


def killed_run(stragglers: str, lag: int, kills: int, **rollout: Any) -> tuple:
    config = config_of(stragglers, lag, **{"rounds": 16, "prompts": 4, "generators": 3} | rollout)

    def new_trial(seed: int) -> VirtualTrial:
        return virtual_trial(
            config,
            durations=long_tailed_durations(seed, {"rollout": 8, "optimize": 4}),
            seed=seed,
            slowness=a_tenth_is_slow,
        )

    return config, *run_with_kills(config, 7 + lag, kills, new_trial)


@pytest.mark.parametrize("stragglers", STRAGGLERS)
def test_every_prompt_is_trained_once_or_named_after_kills(stragglers: str) -> None:
    config, rounds, last = killed_run(stragglers, lag=1, kills=8)
    assert_nothing_lost(config, rounds, last)
    if stragglers == "drop":
        assert last.metrics["count/dropped_straggler"] > 0
    if stragglers == "requeue":
        assert last.metrics["count/requeued"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("lag", range(9))
@pytest.mark.parametrize("stragglers", STRAGGLERS)
def test_every_prompt_is_trained_once_or_named_after_50_kills(stragglers: str, lag: int) -> None:
    config, rounds, last = killed_run(stragglers, lag, kills=50, rounds=64)
    assert_nothing_lost(config, rounds, last)
    given_up = last.metrics["count/dropped_straggler"] + last.metrics["count/requeued"]
    assert (given_up > 0) == (stragglers != "wait" and lag > 0)


class RequeuedLast(RequeuedPrompts):
    """Samples requeued examples only once the stream has ended, as other trainers do."""

    def _pick(self, prompt_index: int) -> int:
        self._next_example += 1
        return self._next_example - 1


class NeverAgain(RequeuedPrompts):
    """Forgets the examples that were given up."""

    def requeue(self, prompt_indices: Iterable[int]) -> None:
        for index in prompt_indices:
            del self._examples[index]


@pytest.mark.parametrize("control", [RequeuedLast, NeverAgain])
def test_the_accounts_show_requeued_prompts_that_are_not_trained_on(
    control: type[RequeuedPrompts], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collector_module, "RequeuedPrompts", control)
    config, rounds, last = killed_run("requeue", lag=1, kills=8)
    assert last.metrics["count/requeued"] > 0
    with pytest.raises(AssertionError, match="trained plus named differs from drawn"):
        assert_nothing_lost(config, rounds, last)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("stragglers", ["drop", "requeue"])
def test_any_timing_and_lost_generators_keep_the_bound_and_the_accounts(
    stragglers: str, seed: int
) -> None:
    rng = random.Random(seed)
    generators, prompts = rng.randint(2, 4), rng.randint(4, 7)
    config = config_of(
        stragglers,
        lag=rng.randint(1, 4),
        rounds=8,
        generators=generators,
        prompts=prompts,
        unit_prompts=rng.randint(1, prompts // generators),
        weight_update=rng.choice(["between_batches", "in_flight", "interrupt_recompute"]),
        reward=rng.choice(["virtual:reward", SCORED_APART]),
    )
    w = virtual_trial(
        config,
        durations=long_tailed_durations(seed, {"rollout": 8, "optimize": 2}),
        seed=seed,
        latency=rng.choice([0.0, 1 / 64]),
        slowness=a_tenth_is_slow,
        dies=lambda actor, stage, n: stage == "rollout" and actor != "learner" and n % 11 == 10,
    )
    w.pipeline.send_first_weights()
    rounds = {}
    for _ in range(config.rounds):
        report = w.pipeline.run_round()
        rounds[report.round] = trained_examples(w)[-1], named_examples(report)
        counts = report.metrics
        assert counts["count/requested"] == sum(
            counts[f"count/{part}"] for part in ("trained", "dropped", "waiting", "in_flight")
        )
    assert_within_lag(w)
    assert_nothing_lost(config, rounds, report)
    assert not w.runtime.uncollected


# ---- Time ----------------------------------------------------------------------------------------


def a_tenth_is_tenfold(example: int) -> float:
    """Return 10 for a random tenth of the examples, and 1 for the others."""
    return 10.0 if random.Random(example).random() < 0.1 else 1.0


def varied_durations(seed: int, sync: float) -> Durations:
    """Return durations that vary by 25 % in either direction."""
    rng = random.Random(seed)
    scale = {"rollout": 64, "optimize": 64, "sync": sync}
    return lambda actor, stage: round(scale.get(stage, 4) * rng.uniform(0.75, 1.25)) * TICK


def seconds_of_trials(stragglers: str, lag: int, slowness: Callable[[int], float]) -> float:
    """Run trials with 2 to 4 generators. Check that only slow prompts are given up."""
    seconds = 0.0
    for seed in range(9):
        config = config_of(stragglers, lag, rounds=30, generators=2 + seed % 3, prompts=4)
        w = virtual_trial(
            config,
            durations=varied_durations(seed, sync=256 if seed >= 6 else 4),
            seed=seed,
            slowness=slowness,
        )
        w.run(config.rounds)
        seconds += w.runtime.now()
        for call in of_stream(w, "cancelled"):
            (index,) = call.prompt_indices
            assert slowness(w.requests.examples.get(index, index)) >= 10
    return seconds


@pytest.mark.slow
@pytest.mark.parametrize("lag", range(1, 9))
def test_only_slow_prompts_are_given_up_and_dropping_them_gains_time(lag: int) -> None:
    # A lag of 4 or more rounds hides a chunk that takes as long as ten others.
    tenfold = 1.02 if lag <= 3 else 0.99
    for slowness, gain in [(a_tenth_is_tenfold, tenfold), (a_tenth_is_slow, 1.2)]:
        wait, drop, _ = (seconds_of_trials(choice, lag, slowness) for choice in STRAGGLERS)
        assert wait / drop >= gain
