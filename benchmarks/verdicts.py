"""Are verdicts with a margin wrong as rarely as promised, and how many seeds do they need?

    python benchmarks/verdicts.py --part levels    print NOMINAL of reports/margin_tests.py

levels       Simulates Student's t-test after every seed, with arms exactly at the margin. For each
             maximum number of seeds, it prints the nominal levels at which at most `ALPHA` /
             divisor of the experiments ever reject. A t-test does not depend on the variance, so
             one table serves every margin and every noise.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator

import numpy as np
from measure import parser_of, run_benchmark

from reports.margin_tests import ALPHA, FIRST_LOOK, MAXIMA

DIVISORS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)  # numbers of arms, for Holm's correction
CHUNK = 100_000  # experiments that are simulated at the same time


def main() -> None:
    parser = parser_of(
        __doc__,
        seed="seed of the simulation",
        counts={"simulations": (4_000_000, "number of simulated experiments")},
    )
    parser.add_argument("--part", choices=("levels",), default="levels")
    args = parser.parse_args()
    print_levels(args)


# ---- Student's t after every seed ------------------------------------------------------------


def upper_tail(freedom: int) -> Callable[[np.ndarray], np.ndarray]:
    """Return P(T > t) as a function of an array.

    With t = sqrt(freedom) tan(angle), the density is proportional to cos(angle)^(freedom - 1).
    """
    angles = np.linspace(-np.pi / 2, np.pi / 2, 20_001)
    heights = np.cos(angles).clip(0.0) ** (freedom - 1)
    below = np.concatenate([[0.0], np.cumsum((heights[1:] + heights[:-1]) / 2)])
    above = below[::-1] / below[-1]
    return lambda t: np.interp(np.arctan(t / math.sqrt(freedom)), angles, above)


def p_values(differences: np.ndarray, most: int) -> Iterator[tuple[int, np.ndarray]]:
    """Yield each look and the one-sided p-values at it.

    Args:
        differences: One row per experiment, one column per seed; the tested mean is 0.
        most: The last look, in seeds.
    """
    sums, squares = differences.cumsum(1), (differences**2).cumsum(1)
    for seeds in range(FIRST_LOOK, most + 1):
        mean = sums[:, seeds - 1] / seeds
        variance = (squares[:, seeds - 1] - seeds * mean**2) / (seeds - 1)
        error = np.sqrt(np.maximum(variance, 1e-30) / seeds)
        yield seeds, upper_tail(seeds - 1)(mean / error)


def print_levels(args: argparse.Namespace) -> None:
    """Print the table of nominal levels, rounded down, as Python."""
    rng = np.random.default_rng(args.seed)
    least: dict[int, list[np.ndarray]] = {most: [] for most in MAXIMA}
    simulated = 0
    while simulated < args.simulations:
        lowest = np.ones(CHUNK)
        for seeds, found in p_values(rng.standard_normal((CHUNK, max(MAXIMA))), max(MAXIMA)):
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
