"""Is a verdict that uses a margin wrong as rarely as promised, and how many seeds does it need?

    python benchmarks/verdicts.py                  errors and seeds, in a minute
    python benchmarks/verdicts.py --part levels    print NOMINAL of reports/margin_tests.py

errors       Simulates experiments whose differences are tested after every seed up to 20. There are
             four tests. `anytime` is the group-sequential t-test of reports/margin_tests.py.
             `fixed` is a test for a fixed number of seeds, wrongly repeated after every
             seed. `fixed_once` is the same test, done once after that number of seeds. `e_process`
             is the t-test of Wang and Ramdas (arXiv 2310.03722), which needs no maximum number of
             seeds. In `edge`, the arm is worse by exactly the margin, so each verdict "no worse" is
             wrong. In `equal`, the arm equals the baseline, and the standard deviation of the
             differences equals the margin. There are three kinds of noise. `gaussian` is Gaussian.
             `fitted` is the difference of two draws from the residuals of committed trials
             (off_policy_lag.json). `skewed` is drawn from the differences between these trials and
             one baseline, with the sign that causes more errors. These differences share three
             trials of the baseline, so their skew is mostly chance.
levels       Simulates Student's t-test after every seed, with arms exactly at the margin. For each
             maximum number of seeds and each divisor of `ALPHA`, prints a nominal level. At this
             level, the share of experiments in which the test ever rejects is at most `ALPHA` /
             divisor. A t-test does not depend on the variance, so one table serves any margin and
             any level of noise.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from measure import RESULTS, parser_of, provenance, run_benchmark, write

from grpo_trainable.command_line import number
from reports.intervals import student_above
from reports.margin_tests import ALPHA, FIRST_LOOK, MAXIMA, Design, nominal_level, seeds_for_power

DIVISORS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)  # numbers of arms, for Holm's correction
CHUNK = 100_000  # experiments that are simulated at the same time
MOST = 20  # seeds of a simulated experiment
ARMS = 7  # arms of a simulated experiment with several arms
FITTED_TO = RESULTS / "off_policy_lag.json"
SIMULATIONS = {"errors": 40_000, "levels": 4_000_000}

Test = Mapping[int, float]  # number of seeds -> one-sided level of the test after that many seeds


def main() -> None:
    parser = parser_of(__doc__, "verdicts.json", seed="seed of the simulation")
    parser.add_argument("--part", choices=tuple(SIMULATIONS), default="errors")
    parser.add_argument(
        "--simulations",
        type=number(int, 1),
        help="simulated experiments (errors: 40,000; levels: 4,000,000)",
    )
    args = parser.parse_args()
    args.simulations = args.simulations or SIMULATIONS[args.part]
    if args.part == "levels":
        print_levels(args)
        return
    found = errors(args)
    print(json.dumps(found, indent=1))
    write(args.out, {**provenance(args), "simulations": args.simulations, **found})


# ---- Errors and seeds ------------------------------------------------------------------------


def errors(args: argparse.Namespace) -> dict[str, Any]:
    rng = np.random.default_rng(args.seed)
    shape = (args.simulations, MOST)
    runs, differences = residuals(FITTED_TO)
    noises = {
        "gaussian": rng.standard_normal(shape),
        "fitted": (rng.choice(runs, shape) - rng.choice(runs, shape)) / (runs.std() * 2**0.5),
        "skewed": -rng.choice(differences, shape) / differences.std(),
    }
    fixed_seeds = seeds_for_power(1.0, ALPHA, Design(seeds=1))
    assert fixed_seeds is not None, "some finite number of seeds suffices"
    tests: dict[str, Test] = {
        "anytime": dict.fromkeys(range(FIRST_LOOK, MOST + 1), nominal_level(ALPHA, MOST)),
        "fixed": dict.fromkeys(range(2, MOST + 1), ALPHA),
        "fixed_once": {fixed_seeds: ALPHA},
        "e_process": e_process(),
    }
    return {
        "most_seeds": MOST,
        "noise": {
            "fitted_to": FITTED_TO.name,
            "runs": len(runs),
            "sd_of_runs": float(runs.std()),
            "sd_of_differences": float(differences.std()),
        },
        "fixed_seeds": fixed_seeds,
        "edge": {
            noise: {name: false_share(own, test) for name, test in tests.items()}
            for noise, own in noises.items()
        },
        "edge_of_several_arms": {"arms": ARMS, "anytime": false_share_of_arms(rng, shape)},
        "equal": {
            noise: {name: seeds_to_decide(1.0 + own, test) for name, test in tests.items()}
            for noise, own in noises.items()
        },
    }


def residuals(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return the residuals of the final held-out rewards, and of their differences.

    A difference is an arm's reward minus the first arm's reward with the same seed. A residual is a
    value minus the mean over the seeds of its arm.
    """
    arms = json.loads(path.read_text())["arms"].values()
    rewards = np.array([arm["reward"] for arm in arms])  # (arms, seeds)
    seeds = rewards.shape[1]
    scale = math.sqrt(seeds / (seeds - 1))  # corrects for taking the mean over the same seeds
    runs, differences = (
        scale * (own - own.mean(1, keepdims=True)) for own in (rewards, rewards[1:] - rewards[0])
    )
    return runs.ravel(), differences.ravel()


def looks(differences: np.ndarray, test: Test) -> tuple[np.ndarray, np.ndarray]:
    """Mark the looks that find the mean above 0, and the looks that find it below 0."""
    found = list(p_values(differences, min(test), max(test)))
    above = np.array([p < test[seeds] for seeds, p in found])
    below = np.array([1.0 - p < test[seeds] for seeds, p in found])
    return above, below


def false_share(differences: np.ndarray, test: Test) -> float:
    """Return the share of experiments in which any look claims a mean above 0."""
    return float(looks(differences, test)[0].any(0).mean())


def false_share_of_arms(rng: np.random.Generator, shape: tuple[int, int]) -> float:
    """Return the share of experiments in which any look makes a claim about any of `ARMS` arms.

    Half the variance of each arm's differences comes from the baseline that all arms share. As long
    as there is no claim, Holm's procedure tests every arm at the level `ALPHA` / `ARMS`.
    """
    level = nominal_level(ALPHA / ARMS, MOST)
    test = dict.fromkeys(range(FIRST_LOOK, MOST + 1), level)
    base = rng.standard_normal(shape)
    wrong = np.zeros(shape[0], dtype=bool)
    for _ in range(ARMS):
        wrong |= looks(rng.standard_normal(shape) - base, test)[0].any(0)
    return float(wrong.mean())


def seeds_to_decide(differences: np.ndarray, test: Test) -> dict[str, float]:
    """Return how many seeds a verdict on the mean takes. The tests compare the mean with 0."""
    above, below = looks(differences, test)
    decided = above | below
    never = ~decided.any(0)
    seeds = np.where(never, MOST + 1, decided.argmax(0) + min(test))
    first_below = np.where(below.any(0), below.argmax(0), len(below))
    first_above = np.where(above.any(0), above.argmax(0), len(above))
    return {
        "median": float(np.median(seeds)),
        "four_fifths": float(np.quantile(seeds, 0.8)),
        "undecided": float(never.mean()),
        "wrong": float((first_below < first_above).mean()),
    }


def e_process() -> dict[int, float]:
    """For each look, return the one-sided level at which the e-process reaches 1 / `ALPHA`.

    The e-process is the likelihood ratio of the t statistic, averaged over effect sizes that follow
    a half-normal distribution with scale 1 (Wang and Ramdas, arXiv 2310.03722, section 4).
    """
    levels = {}
    for seeds in range(2, MOST + 1):
        low, high = 0.0, 1.0  # bounds on r = t / sqrt(t^2 + seeds - 1)
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (low, middle) if e_value(seeds, middle) >= 1 / ALPHA else (middle, high)
        t = high * math.sqrt((seeds - 1) / max(1 - high**2, 1e-300))
        levels[seeds] = student_above(t, seeds - 1) if high < 1 else 0.0
    return levels


def e_value(seeds: int, r: float) -> float:
    """Return the e-value of one look, by numerical integration."""
    effects = np.linspace(0.0, 5.0, 101)
    weights = np.exp(-(effects**2) / 2)
    # y is the root of the sum of squares, in units of the true standard deviation.
    y = np.linspace(0.0, 6.0 * math.sqrt(seeds) + 8.0, 801)[1:]
    log_base = (seeds - 1) * np.log(y) - y**2 / 2
    base = np.exp(log_base - log_base.max()).sum()
    shift = effects[:, None] * math.sqrt(seeds) * r * y - seeds * effects[:, None] ** 2 / 2
    ratios = np.exp(log_base - log_base.max() + shift).sum(1) / base
    return float((weights * ratios).sum() / weights.sum())


# ---- Student's t after every seed ------------------------------------------------------------


def upper_tail(freedom: int) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function that computes P(T > t) for an array of values t.

    With t = sqrt(freedom) tan(angle), the density is proportional to cos(angle)^(freedom - 1).
    """
    angles = np.linspace(-np.pi / 2, np.pi / 2, 20_001)
    heights = np.cos(angles).clip(0.0) ** (freedom - 1)
    below = np.concatenate([[0.0], np.cumsum((heights[1:] + heights[:-1]) / 2)])
    above = below[::-1] / below[-1]
    return lambda t: np.interp(np.arctan(t / math.sqrt(freedom)), angles, above)


def p_values(differences: np.ndarray, first: int, most: int) -> Iterator[tuple[int, np.ndarray]]:
    """Yield each look with its one-sided p-values.

    Args:
        differences: One row per experiment, one column per seed. The tested mean is 0.
        first: Number of seeds at the first look.
        most: Number of seeds at the last look.
    """
    sums, squares = differences.cumsum(1), (differences**2).cumsum(1)
    for seeds in range(first, most + 1):
        mean = sums[:, seeds - 1] / seeds
        variance = (squares[:, seeds - 1] - seeds * mean**2) / (seeds - 1)
        error = np.sqrt(np.maximum(variance, 1e-30) / seeds)
        yield seeds, upper_tail(seeds - 1)(mean / error)


def print_levels(args: argparse.Namespace) -> None:
    """Print the table of nominal levels, rounded down, as Python code."""
    rng = np.random.default_rng(args.seed)
    least: dict[int, list[np.ndarray]] = {most: [] for most in MAXIMA}
    simulated = 0
    while simulated < args.simulations:
        lowest = np.ones(CHUNK)
        drawn = rng.standard_normal((CHUNK, max(MAXIMA)))
        for seeds, found in p_values(drawn, FIRST_LOOK, max(MAXIMA)):
            np.minimum(lowest, found, out=lowest)
            if seeds in least:
                least[seeds].append(lowest[lowest < 2 * ALPHA])
        simulated += CHUNK
    ordered = {most: np.sort(np.concatenate(found)) for most, found in least.items()}
    print("NOMINAL: Mapping[int, Sequence[float]] = {")
    for divisor in DIVISORS:
        place = int(ALPHA / divisor * simulated)
        levels = ", ".join(f"{floor(float(found[place - 1])):.3g}" for found in ordered.values())
        print(f"    {divisor}: ({levels}),")
    print("}")


def floor(level: float) -> float:
    """Round down to three digits."""
    unit = 10.0 ** (math.floor(math.log10(level)) - 2)
    return math.floor(level / unit) * unit


if __name__ == "__main__":
    run_benchmark(main)
