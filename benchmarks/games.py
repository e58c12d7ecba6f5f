"""Does GRPO teach a policy that plays at random to use what its environment tells it?

Runs both shipped games with several seeds and plays their held-out episodes before training and
after it, at the sampling temperature. A trial is within the bounds when it wins as few episodes at
first and as many at the end as they say: of the guesses no way to play wins more than 0.7, and of
the products one wins few without the calculator.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from measure import parser_of, provenance, run_benchmark, write
from trial_runs import finished_trial, overhead, rows_of

ARM = "async_k1"
EPISODES = {"prompts": 128, "samples": 4}  # size of an evaluation
ROUNDS = {"calculator": 96, "guess": 192}
BOUNDS = {"calculator": (0.2, 0.9), "guess": (0.35, 0.5)}  # most before training, least after it
EXAMPLES = 5  # episodes that the result keeps, before and after


def main() -> None:
    parser = parser_of(
        __doc__, "games.json", seed="the first", counts={"seeds": (3, "of every game")}
    )
    args = parser.parse_args()
    trials = []
    for game, rounds in ROUNDS.items():
        settings = [f"task.name={game}", f"rounds={rounds}", f"eval.every={rounds // 8}"]
        settings += [f"eval.{name}={value}" for name, value in EPISODES.items()]
        options = [word for setting in settings for word in ("--set", setting)]
        for seed in range(args.seed, args.seed + args.seeds):
            with finished_trial(ARM, seed=seed, options=options) as directory:
                trials.append({"game": game, "seed": seed, **summarise(game, directory)})
            print(show(trials[-1]), flush=True)
    within = sum(trial["within"] for trial in trials)
    print(f"{within} of {len(trials)} trials within {BOUNDS}")
    workload = {"arm": ARM, "rounds": ROUNDS, "evaluation": EPISODES}
    write(args.out, {**provenance(args), "workload": workload, "bounds": BOUNDS, "trials": trials})


def summarise(game: str, directory: Path) -> dict[str, Any]:
    """What is to be said of a trial."""
    rows = rows_of(directory)
    episodes = pq.read_table(directory / "evaluations").to_pylist()
    by_round: dict[int, list[dict[str, Any]]] = {}
    for episode in episodes:
        by_round.setdefault(episode["round"], []).append(episode)
    won = {r: statistics.mean(e["reward"] for e in found) for r, found in by_round.items()}
    first, last = by_round[min(won)], by_round[max(won)]
    most, least = BOUNDS[game]
    return {
        "won": won,
        "turns": [mean_turns(found) for found in (first, last)],
        "samples": rows[-1]["env_runners/num_episodes_lifetime"],
        "failed": rows[-1]["count/reward_errors"],
        "seconds": rows[-1]["time_total_s"],
        **overhead(rows),
        "examples": [
            [json.loads(episode["turns"]) for episode in found[:EXAMPLES]]
            for found in (first, last)
        ],
        "within": won[min(won)] <= most and won[max(won)] >= least,
    }


def mean_turns(episodes: list[dict[str, Any]]) -> float:
    """Actions of an episode."""
    return statistics.mean(len(json.loads(episode["turns"])) for episode in episodes)


def show(trial: dict[str, Any]) -> str:
    won, turns = trial["won"], trial["turns"]
    return (
        f"{trial['game']:<10} seed {trial['seed']}: won {won[min(won)]:.3f} -> "
        f"{won[max(won)]:.3f}, turns {turns[0]:.2f} -> {turns[1]:.2f}, {trial['samples']:.0f} "
        f"episodes, {trial['seconds']:.0f} s, within bounds: {trial['within']}"
    )


if __name__ == "__main__":
    run_benchmark(main)
