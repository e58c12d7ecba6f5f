"""Fill the figures of the pages from benchmarks/results/*.json.

    python docs/tables.py      or `make tables`

A page keeps each figure between two comments, and this script replaces the text between them:

- `<!-- table: peers -->` … `<!-- end -->` holds the table that the function `peers` returns. Words
  after the name are arguments of the function.
- `<!-- {startup[starts][here][median]:.1f} s -->14.2 s<!-- end -->` holds the text of a template.
  The template is a format string of Python. Its fields are paths into the JSON files, with three
  additions: a key after a list selects that key in every element, `[key=value]` selects elements,
  and `.min`, `.max`, `.median`, `.last` and `.count` summarise a list.

Two names stand for figures that combine several files. `judged` has the verdicts on the arms of the
off-policy results, with the margin `MARGIN`. `faults` has the totals over all faults. A comment at
the start of a line would end the paragraph, so put a word before a comment.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from grpo_trainable.command_line import align
from reports.intervals import over_seeds
from reports.margin_tests import BETTER, NO_WORSE, UNDECIDED, Design, Pairs, judge
from reports.menu_text import HEADER, PARETO
from reports.summary import show
from search_spaces.spaces import OBJECTIVE_LAGS

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

from evidence import ITEMS
from measure import measurements

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
MARK = re.compile(r"<!-- (table: [\w .-]+|[^<>]*\{[^<>]*) -->(.*?)<!-- end -->", re.DOTALL)
MARGIN = 0.03  # the largest acceptable loss of held-out reward

Row = Sequence[str]


class FigureError(ValueError):
    """A figure cannot be filled in. The message names the page and the comment."""


# ---- Values in the JSON files ----------------------------------------------------------------


class Value:
    """A value in a JSON file, with the operators that templates use to select and format it."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __getitem__(self, key: str | int) -> Value:
        value, name = self.value, str(key)
        if isinstance(value, dict):
            return Value(value[name])
        if isinstance(key, int):
            return Value(value[key])
        wanted, equals, text = name.partition("=")
        if equals:
            return Value([own for own in value if str(own[wanted]) == text])
        return Value([own[wanted] for own in value])

    def _all(self) -> list[Any]:
        return self.value if isinstance(self.value, list) else [self.value]

    @property
    def min(self) -> Value:
        """The smallest element."""
        return Value(min(self._all()))

    @property
    def max(self) -> Value:
        """The largest element."""
        return Value(max(self._all()))

    @property
    def median(self) -> Value:
        """The median of the elements."""
        return Value(statistics.median(self._all()))

    @property
    def last(self) -> Value:
        """The last element."""
        return Value(self._all()[-1])

    @property
    def count(self) -> Value:
        """The number of elements."""
        return Value(len(self._all()))

    def __format__(self, form: str) -> str:
        if self.value is None:
            return "-"
        if isinstance(self.value, (dict, list)):
            raise TypeError("the field selects several values instead of one")
        return format(self.value, form).replace("%", " %")


class Files(Mapping[str, Value]):
    """The contents of the JSON files by name, and the combined figures `judged` and `faults`."""

    def __getitem__(self, name: str) -> Value:
        if name == "judged":
            return Value(all_judged())
        if name == "faults":
            return Value(totals_of_faults())
        return Value(read(name))

    def __iter__(self):
        return (path.stem for path in sorted(RESULTS.glob("*.json")))

    def __len__(self) -> int:
        return len(list(iter(self)))


def exists(name: str) -> bool:
    """Return True if a result has been measured."""
    return (RESULTS / f"{name}.json").exists()


@cache
def read(name: str) -> dict[str, Any]:
    """Return the content of a result's JSON file."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def judged(space: str) -> dict[str, dict[str, Any]]:
    """Return the verdict about each arm of an off-policy result, except the baseline."""
    result = read(f"off_policy_{space}")
    if "menu" in result:
        arms = result["menu"]["arms"].items()
        return {arm: own for arm, own in arms if own["difference"] is not None}
    _, *others = result["arms"].items()
    pairs = {
        arm: Pairs(np.array(own["against"]), np.full(len(own["against"]), MARGIN))
        for arm, own in others
    }
    seeds = max(own.seeds for own in pairs.values())
    found = judge(pairs, Design(seeds=seeds, arms=len(pairs)))
    return {arm: vars(own) for arm, own in found.items()}


@cache
def all_judged() -> dict[str, dict[str, dict[str, Any]]]:
    """Return the verdicts of all off-policy results: space -> arm -> field -> value."""
    spaces = (path.stem.removeprefix("off_policy_") for path in RESULTS.glob("off_policy_*.json"))
    return {space: judged(space) for space in spaces}


# ---- Pages -----------------------------------------------------------------------------------


def filled(text: str, page: str) -> str:
    """Return the text of a page with all figures filled in again."""

    def fill(found: re.Match[str]) -> str:
        opening = found[1]
        try:
            figure = table_of(opening) if opening.startswith("table:") else template_of(opening)
        except (KeyError, IndexError, TypeError, ValueError, OSError) as error:
            raise FigureError(f"{page}: <!-- {opening} -->: {error!r}") from error
        return f"<!-- {opening} -->{figure}<!-- end -->"

    return MARK.sub(fill, text)


def template_of(template: str) -> str:
    """Return a template with all its fields filled in."""
    return template.format_map(Files())


def table_of(opening: str) -> str:
    """Return the lines of a table, given the words of its comment."""
    _, name, *words = opening.split()
    return "\n" + "\n".join(TABLES[name](*words)) + "\n"


def markdown(header: Row, rows: Iterable[Row]) -> list[str]:
    """Return the lines of a table in Markdown."""
    return [f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows)]


def main() -> None:
    """Fill all pages."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        if (new := filled(text, str(page.relative_to(ROOT)))) != text:
            page.write_text(new, encoding="utf-8")
            print(f"updated {page.relative_to(ROOT)}")


# ---- Origins ---------------------------------------------------------------------------------


def sources(*names: str) -> list[str]:
    """Tabulate how and when results were measured.

    A name such as `micro.packing` selects the part `packing` of the result `micro`, and
    `campaign_atlas.` selects all parts.
    """
    rows = []
    for name in [part for own in names for part in parts_of(own)]:
        file, _, part = name.partition(".")
        own = read(file)[part] if part else read(file)
        link = linked(file).replace(file, name, 1)
        command = own.get("again", own["command"])
        rows.append(
            [link, f"`{command}`", own["commit"][:8], own["at"][:10], own["hardware"]["cpu"]]
        )
    return markdown(["result", "command", "commit", "date", "processor"], rows)


def parts_of(name: str) -> list[str]:
    """Return the names of all parts if a result's name ends with a dot, else only that name."""
    return [name + part for part in measurements(read(name[:-1]))] if name[-1] == "." else [name]


def evidence() -> list[str]:
    """Show the planned and the measured time of the items of `make evidence`."""
    measured = read("evidence") if exists("evidence") else {"items": {}, "wall_clock_s": None}
    rows = []
    for item in ITEMS:
        link = linked(item.result.removesuffix(".json"))
        seconds = measured["items"].get(item.name, {}).get("wall_clock_s")
        rows.append([item.name, link, f"{item.minutes:g}", minutes(seconds)])
    planned = sum(item.minutes for item in ITEMS)
    rows.append(["all", linked("evidence"), f"{planned:g}", minutes(measured["wall_clock_s"])])
    return markdown(["item", "result", "minutes, planned", "minutes, measured"], rows)


def linked(name: str) -> str:
    """Return the name of a result, as a link if the result has been measured."""
    return f"[{name}](../../benchmarks/results/{name}.json)" if exists(name) else name


def minutes(seconds: float | None) -> str:
    """Return a time in minutes as text, or "not yet" if nothing was measured."""
    return "not yet" if seconds is None else f"{seconds / 60:.1f}"


# ---- README and quickstart -------------------------------------------------------------------

README_COLUMNS = (
    *("arm", "rounds", "samples", "samples/s", "speed-up", "at equal cost"),
    *("held-out reward", "largest lag"),
)


def arms_of_log(log: str) -> list[dict[str, str]]:
    """Return the final table of a log as one dictionary per arm: column title -> cell."""
    _, found, after = log.rpartition("\narm ")
    assert found, "the log has no table of arms"
    header, *lines = f"arm {after}".splitlines()
    # All columns except the first are aligned to the right, and a cell may be empty.
    titles = [(found[0], found.end()) for found in re.finditer(r"\S+(?: \S+)*", header)]
    rows = []
    for line in lines:
        if "  " not in line:
            break
        arm, rest = re.split(r"\s{2,}", line.ljust(len(header)), maxsplit=1)
        begins = [len(header) - len(rest), *(end for _, end in titles[1:])]
        cells = [line[begin:end].strip() for begin, end in pairwise(begins)]
        rows.append(dict(zip((title for title, _ in titles), [arm, *cells], strict=True)))
    return rows


def quickstart(columns: str) -> list[str]:
    """Return the final table of the recorded run, with all columns or only those of the README."""
    rows = arms_of_log((ROOT / "docs" / "quickstart" / "log.txt").read_text(encoding="utf-8"))
    titles = README_COLUMNS if columns == "readme" else tuple(rows[0])
    text = align([titles, *([row[title] for title in titles] for row in rows)])
    return ["```text", text, "```"]


# ---- Off-policy ------------------------------------------------------------------------------

# Columns of each table, by their names in reports/answers.py.
DRIFT = ("kl_sampler_nats", "clip_fraction", "kl_reference_nats", "reference_nll_nats")
COLUMNS = {
    "gradient_steps": ("early_reward", "gradient_steps", *DRIFT, "optimize_share"),
    "lag": ("early_reward", "lag", "lag_of_bound", *DRIFT),
    "lag_exact": ("early_reward", "lag", *DRIFT),
    "replay": ("early_reward", "uses", "age", "never_trained", *DRIFT),
}


def off_policy(space: str) -> list[str]:
    """Compare the arms of a space with its first arm."""
    if not exists(f"off_policy_{space}"):
        return ["", "*Not measured yet.*", ""]
    result, judgements = read(f"off_policy_{space}"), judged(space)
    columns = [name for name in COLUMNS[space.removesuffix("_short")] if name in result["columns"]]
    titles = [result["columns"][name]["title"] for name in columns]
    rows = []
    for arm, values in result["arms"].items():
        own = judgements.get(arm)
        cells = [show(values[name], result["columns"][name]["form"]) for name in columns]
        reward = show(values["reward"], result["columns"]["reward"]["form"])
        rows.append([arm, reward, *(verdict(own) if own else ("", "")), *cells])
    return markdown(["arm", "held-out reward", "difference", "verdict", *titles], rows)


def verdict(own: Mapping[str, Any]) -> tuple[str, str]:
    """Return a difference, its bounds and its verdict, or the faults if there is no difference."""
    if own["difference"] is None:
        return "-", "; ".join(own["faults"])
    bounds = "" if own["low"] is None else f" ({own['low']:+.3f} to {own['high']:+.3f})"
    return f"{own['difference']:+.3f}{bounds}", own["verdict"]


def menu(space: str) -> list[str]:
    """Show the menu of a space: the speed, the cost and the verdict of each arm."""
    own = read(f"off_policy_{space}")["menu"]
    rows = [[own["baseline"], "1.00x", "1.00x", "", "baseline", ""]]
    for arm, values in own["arms"].items():
        if arm != own["baseline"]:
            ratios = [ratio(values["speed_up"]), ratio(values["equal_cost"])]
            rows.append([arm, *ratios, *verdict(values), str(values["seeds"])])
    return markdown(["arm", "speed-up", "at equal cost", "difference", "verdict", "seeds"], rows)


def printed_menu(space: str) -> list[str]:
    """Show the recorded answer and menu of a space as text, without the notes below the menu."""
    own = read(f"off_policy_{space}")["menu"]
    rows: list[Row] = [HEADER]
    for arm, values in own["arms"].items():
        name = f"{arm} {PARETO}" if values["pareto"] else arm
        if arm == own["baseline"]:
            rows.append((name, "1.00x", "1.00x", "-", "baseline", "-", "-", "-"))
            continue
        ratios = (ratio(values["speed_up"]), ratio(values["equal_cost"]))
        is_open = values["verdict"] == UNDECIDED
        power = f"{values['power']:.0%}" if is_open else "-"
        row = (name, *ratios, *verdict(values), str(values["seeds"]), power, to_decide(own, arm))
        rows.append(row)
    answer = textwrap.wrap(" ".join(own["answer"]), 100, break_on_hyphens=False)
    return ["```text", *answer, "", align(rows), "```"]


def to_decide(own: Mapping[str, Any], arm: str) -> str:
    """Return the seeds and the time that a verdict on an arm still needs."""
    seeds, price = own["arms"][arm]["seeds_missing"], own["arms"][arm]["price"]
    if seeds is None:
        return f"more than {own['most_seeds']} seeds"
    return f"{seeds} seeds, {price['minutes']:.0f} min" if seeds else "-"


def atlas() -> list[str]:
    """Compare each objective at each exact lag with the same objective at lag 0."""
    lags = OBJECTIVE_LAGS[1:]
    header = ["objective", "reward at lag 0", "up to which lag no worse"]
    header += [f"change at lag {lag}" for lag in lags]
    header += [f"ESS at lag {lag}" for lag in lags]
    rows = []
    for objective, own in measurements(read("campaign_atlas")).items():
        arms = [f"{objective}_lag{lag}" for lag in lags]
        found = [verdict(own["menu"]["arms"][arm]) for arm in arms]
        sizes = [own["menu"]["audit"][arm]["ess_fraction"] for arm in arms]
        reward = statistics.median(own["arms"][f"{objective}_lag{OBJECTIVE_LAGS[0]}"]["reward"])
        rows.append(
            [
                *(f"`{objective}`", f"{reward:.3f}", tolerated([says for _, says in found])),
                *(f"{difference}: {says}" for difference, says in found),
                *(f"{size:.2f}" for size in sizes),
            ]
        )
    return markdown(header, rows)


def advantages(arm: str) -> list[str]:
    """Show the errors of advantages at the last checkpoint of an arm, as means over the seeds."""
    last = [rounds[-1] for rounds in advantage_errors(arm)]
    rows = []
    for estimate in last[0]["errors"]:
        errors = [own["errors"][estimate] for own in last]
        parts = [[own[part] for own in errors] for part in ("variance", "squared_bias")]
        tokens = [own["tokens_per_response"].get(estimate) for own in last]
        cost = "" if None in tokens else f"{statistics.fmean(tokens):.0f}"
        squared = mean_and_range([own["squared_error"] for own in errors])
        rows.append([f"`{estimate}`", squared, *map(mean_and_range, parts), cost])
    header = ["estimate", "squared error", "variance", "squared bias", "tokens per response"]
    return markdown(header, rows)


def critic_errors() -> list[str]:
    """Show the squared errors of the estimates that use a critic, checkpoint by checkpoint."""
    rounds = [own["round"] for own in advantage_errors("ppo")[0]]
    header = ["arm", "explained variance", "estimate", *(f"round {own}" for own in rounds)]
    rows = []
    for arm in ("ppo", "ppo_fast_critic"):
        slices = measurements(read("campaign_advantages")).values()
        explained = [value for own in slices for value in own["arms"][arm]["explained_variance"]]
        for estimate in ("gae", "critic"):
            by_seed = [
                [own["errors"][estimate]["squared_error"] for own in seed]
                for seed in advantage_errors(arm)
            ]
            by_round = map(mean_and_range, zip(*by_seed, strict=True))
            rows.append([f"`{arm}`", mean_and_range(explained), f"`{estimate}`", *by_round])
    return markdown(header, rows)


def advantage_errors(arm: str) -> list[list[dict[str, Any]]]:
    """Return the errors of advantages at each checkpoint of each seed's trial."""
    slices = measurements(read("campaign_advantages")).values()
    return [own["advantage_errors"][arm] for own in slices]


def mean_and_range(values: Iterable[float]) -> str:
    """Return the mean of some values, and their range in brackets if there are several."""
    values = list(values)
    largest = max(map(abs, values))
    form = ".3f" if largest < 10 else ".1f" if largest < 100 else ".0f"
    low, mean, high = (
        f"{own:{form}}" for own in (min(values), statistics.fmean(values), max(values))
    )
    to = " to " if min(values) < 0 else "-"
    return mean if len(values) == 1 else f"{mean} ({low}{to}{high})"


def slices(campaign: str, *columns: str) -> list[str]:
    """Compare the arms of each slice of a campaign with the first arm of the slice.

    Args:
        campaign: The name of the campaign.
        columns: Names of further columns of the search space. A cell is empty if the arm has no
            such figure.
    """
    rows, titles = [], list(columns)
    for name, own in measurements(read(f"campaign_{campaign}")).items():
        titles = [own["columns"][column]["title"] for column in columns]
        for arm, values in own["arms"].items():
            is_base = arm == own["menu"]["baseline"]
            differs = ("", "baseline") if is_base else verdict(own["menu"]["arms"][arm])
            known = ([v for v in values[c] if v is not None] for c in ("reward", *columns))
            figures = (mean_and_range(own) if own else "" for own in known)
            rows.append([name, f"`{arm}`", *differs, *figures])
    header = ["slice", "arm", "difference in reward", "verdict", "held-out reward", *titles]
    return markdown(header, rows)


# Shares of the training at which `curves` reads a curve.
SHARES = (0.25, 0.5, 0.75, 1.0)


def curves(campaign: str, prefix: str = "seed") -> list[str]:
    """Compare the learning curves of algorithms, as means and ranges over the seeds.

    Args:
        campaign: The name of the campaign.
        prefix: The start of the names of the slices to show, which differ only in their seed.
    """
    found: dict[str, list[Sequence[Sequence[float]]]] = {}
    for name, own in measurements(read(f"campaign_{campaign}")).items():
        if name.startswith(prefix):
            for algorithm, curve in own["curves"].items():
                found.setdefault(algorithm, []).append(curve)
    rows = []
    for algorithm, seeds in found.items():
        columns = zip(*map(at_shares, seeds), strict=True)
        samples = f"{statistics.fmean(curve[-1][0] for curve in seeds):,.0f}"
        rows.append([f"`{algorithm}`", *map(mean_and_range, columns), samples, str(len(seeds))])
    shares = [f"after {share:.0%}" for share in SHARES]
    return markdown(["algorithm", *shares, "samples", "seeds"], rows)


def at_shares(curve: Sequence[Sequence[float]]) -> list[float]:
    """Return the values of a curve after each of `SHARES` of its samples, by interpolation."""
    samples, values = zip(*curve, strict=True)
    return [float(np.interp(share * samples[-1], samples, values)) for share in SHARES]


def tolerated(verdicts: Sequence[str]) -> str:
    """Return the largest lag up to which an objective is no worse, and the next lag's verdict."""
    largest = "none shown"
    for lag, found in zip(OBJECTIVE_LAGS[1:], verdicts, strict=True):
        if found not in (NO_WORSE, BETTER):
            return f"{largest} ({found} at {lag})"
        largest = str(lag)
    return largest


def ratio(own: Mapping[str, float | None]) -> str:
    """Return a ratio with its interval."""
    bounds = "" if own["low"] is None else f" ({own['low']:.2f}-{own['high']:.2f})"
    return f"{own['value']:.2f}x{bounds}"


# ---- Asynchrony ------------------------------------------------------------------------------

WORKLOADS = {
    "default": "the default settings, limited by the learner",
    "tiny": "`tiny`, balanced: 40 prompts in chunks of 4",
    "small": "`small`, balanced: 16 prompts in chunks of 2, 48 tokens, no KL monitor",
    "one_prompt": "one prompt per round, limited by the generator",
}


def repeats(mean: float, values: Sequence[float], form: str = "{:.2f} x") -> str:
    """Return a mean, with the values of the repeats in brackets."""
    return f"{form.format(mean)} ({', '.join(format(value, '.2f') for value in values)})"


def asynchrony() -> list[str]:
    """Compare lag 1 with the same actors at lag 0 and with colocated workers."""
    rows = []
    for name, own in read("asynchrony")["workload"].items():
        means = {arm: mean["value"] for arm, mean in own["speed_up_means"].items()}
        best = own["best_colocated"]
        threads = best.removeprefix("colocated ")
        single = means["colocated 1+1"]
        rows.append(
            [
                WORKLOADS[name],
                f"{statistics.mean(own['share_of_bound']):.0%}".replace("%", " %"),
                *(repeats(means[arm], own["speed_ups"][arm]) for arm in ("sync", "colocated 1+1")),
                f"{repeats(means[best], own['speed_ups'][best])}, {threads}",
                f"{single / 2:.2f} x",
            ]
        )
    header = ["workload", "share of perfect overlap", "over lag 0", "over one core"]
    header += ["over the best colocated worker, threads", "samples per core-hour over one core"]
    return markdown(header, rows)


def schedule() -> list[str]:
    """Compare simulated and measured rounds."""
    rows = []
    for own in read("schedule_sim")["medians"]:
        error = {how: f"{value:+.1%}".replace("%", " %") for how, value in own["error"].items()}
        predicted = "-" if own["run"] == "sync" else error["predicted"]
        rows.append([own["run"], f"{own['measured_s']:.3f}", error["own"], predicted])
    header = ["run", "measured, s per round", "error, simulated from its own calls"]
    return markdown([*header, "error, predicted from `sync`"], rows)


# ---- Speed -----------------------------------------------------------------------------------

CONTESTS = {
    "sample": "sampling",
    "step": "a step",
    "k4": "a step, k=4",
    "kl": "a step, KL 0.04 in the loss",
}


def peers() -> list[str]:
    """Compare the steps of this package with those of TRL."""
    rows = []
    for own in read("peers")["results"]:
        if own["contest"] not in CONTESTS:
            continue
        low, high = own["interval"]
        rows.append(
            [
                *(CONTESTS[own["contest"]], str(own["threads"])),
                *(f"{own['ours_s']:.2f} s", f"{own['trl_s']:.2f} s"),
                f"{own['ratio']:.2f} x ({low:.2f}-{high:.2f})",
                # In this contest, our process also holds a learner, but TRL's process does not.
                "-" if own["contest"] == "sample" else f"{own['memory_ratio']:.2f}",
            ]
        )
    header = ["work", "threads", "here", "TRL", "time, TRL / here", "memory, here / TRL"]
    return markdown(header, rows)


RESPONSES = {
    "equal": "48 tokens, after a prompt of 12",
    "long tail": "32 tokens on average, log-normal (σ = 1, at most 128), after a prompt of 12",
    "long prompt": "32 tokens on average, with the same distribution, after a prompt of 96",
}


def packing() -> list[str]:
    """Compare a gradient step on padded and on packed rows."""
    rows = []
    for own in read("micro")["packing"]["results"]:
        ratio, memory = own["speed_up"]["padded"], own["peak_resident_mb"]
        rows.append(
            [
                *(RESPONSES[own["workload"]], str(own["threads"])),
                *(f"{own['seconds_medians'][kind]:.2f} s" for kind in ("padded", "packed")),
                f"{ratio['median']:.2f} x ({ratio['min']:.2f}-{ratio['max']:.2f})",
                f"{memory['packed'] / memory['padded']:.2f}",
                f"{own['packed_over_floor']:.2f} x",
            ]
        )
    header = ["responses", "threads", "padded", "packed", "time, padded / packed"]
    return markdown([*header, "memory, packed / padded", "packed / floor"], rows)


def scale() -> list[str]:
    """Show the Trainable's work per chunk for each number of generators."""
    rows = read("micro")["scale"]["rows"]
    ms = [[1e3 * seconds for seconds in row["thread_s_a_chunk"]] for row in rows]
    medians = [f"{statistics.median(own):.2f}" for own in ms]
    ranges = [f"{min(own):.2f}-{max(own):.2f}" for own in ms]
    header = ["generators", *(str(row["generators"]) for row in rows)]
    shown = [["ms per chunk, median", *medians], ["lowest and highest", *ranges]]
    return markdown(header, shown)


# ---- Transports ------------------------------------------------------------------------------


def transports() -> list[str]:
    """Show the time of a sync for each size, transport and condition."""
    result = read("weight_transport")
    names = list(next(iter(result["sizes"].values())))
    rows = []
    for size, found in result["sizes"].items():
        for condition, said in (("free", ""), ("busy", ", one core busy")):
            ms = {name: found[name][condition]["ms"] for name in names}
            limits = [f"{ms['shm'][part]:.1f} ms" for part in ("memcpy", "empty_calls")]
            times = [f"{ms[name]['total']:.1f} ms" for name in names]
            rows.append([f"{size}{said}", *times, *limits])
    largest = list(result["sizes"])[-1]
    found = result["sizes"][largest]
    first = [f"{found[name]['first_ms']:.0f} ms" for name in names]
    idle = [f"{found[name]['idle_cores']:.2f}" for name in names]
    rows.append([f"first sync, {largest}", *first, "", ""])
    rows.append(["cores that an idle process keeps busy", *idle, "", ""])
    columns = [f"`{name}`" for name in names]
    return markdown(["bytes", *columns, "memcpy", "two empty calls"], rows)


PARTS = {
    "memcpy": "memcpy",
    "summed_copy": "the same copy, with sums computed during the copy",
    "publish": "the learner's part of a sync",
    "checksum": "a pass over the weights that only computes sums",
    "load": "the generator's part of a sync",
    "empty_calls": "two empty calls",
}


def parts_of_a_sync() -> list[str]:
    """Show how the time of the largest sync by `shm` is spent."""
    ms = list(read("weight_transport")["sizes"].values())[-1]["shm"]["free"]["ms"]
    rows = [
        [said, f"{ms[part]:.1f}", f"{ms[part] / ms['memcpy']:.2f} x"]
        for part, said in PARTS.items()
    ]
    return markdown(["part", "ms", "relative to memcpy"], rows)


def broadcast() -> list[str]:
    """Show the time of a sync of 64 MB to several generators."""
    found = read("weight_transport")["broadcast_64_mb"]
    rows = [
        [count, *(f"{own[count]['free']['ms']['total']:.1f} ms" for own in found.values())]
        for count in next(iter(found.values()))
    ]
    return markdown(["generators", *(f"`{name}`" for name in found)], rows)


def sync_share() -> list[str]:
    """Show the share of a round's time that the transfer of weights takes."""
    found = read("micro")["sync_share"]["share"]
    rows: dict[tuple[str, str], list[str]] = {}
    for name, own in found.items():
        workload, arm, _ = name.split(", ")
        rows.setdefault((workload, arm), []).append(f"{own['median']:.2%}".replace("%", " %"))
    columns = list(dict.fromkeys(f"`{name.split(', ')[2]}`" for name in found))
    return markdown(["workload", "arm", *columns], [[*key, *own] for key, own in rows.items()])


# ---- Learning --------------------------------------------------------------------------------


LEARNED = {
    "learning": "stories with a keyword",
    "arithmetic": "word problems",
    "learning_short": "stories with a keyword, short",
    "arithmetic_short": "word problems, short",
}


def learning() -> list[str]:
    """Show the held-out rewards before and after training."""
    rows = []
    for name, task in LEARNED.items():
        if not exists(name):
            continue
        trials = read(name)["trials"]
        for arm in dict.fromkeys(trial["arm"] for trial in trials):
            own = [trial for trial in trials if trial["arm"] == arm]
            curves = [list(trial["held_out"].values()) for trial in own]
            rewards = [between([curve[end] for curve in curves], ".2f") for end in (0, -1)]
            tokens = [between([t[e]["tokens"] for t in own], ".0f") for e in ("before", "after")]
            rise = [curve[-1] - curve[0] for curve in curves]
            rows.append(
                [
                    *(task, arm, str(own[0]["rounds"]), str(len(own))),
                    *(" → ".join(rewards), between(rise, ".2f"), " → ".join(tokens)),
                ]
            )
    header = ["task", "arm", "rounds", "seeds", "held-out reward", "rise"]
    return markdown([*header, "tokens per response"], rows)


def between(values: Sequence[float], form: str) -> str:
    """Return the smallest and the largest value as text, or one value if both look the same."""
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low} to {high}" if "-" in low else f"{low}-{high}"


def real_model() -> list[str]:
    """Compare training runs of a public model here and in TRL."""
    result = read("real_model")
    rows = [["before", *answers_of(result["before"], interval=True), "", "", "", "", ""]]
    for own in result["trainings"]:
        after, rise = own["after"], own["differences"]["answer_reward"]
        right, *others = answers_of(after, interval=False)
        seconds = [own["wall_clock_s"], own["stages_s"]["rollout"], own["stages_s"]["optimize"]]
        rows.append(
            [
                *(f"`{own['name']}`", right, *others),
                f"{rise['value']:+.3f} ({rise['low']:.3f}-{rise['high']:.3f})",
                *(f"{value:.0f} s" for value in seconds),
                f"{own['memory_mb']['all'] / 1e3:.1f} GB",
            ]
        )
    header = ["training", "right", "in a box", "right among those in a box", "tokens"]
    header += ["rise, paired by problem", "wall-clock time", "rollout", "optimize", "memory"]
    return markdown(header, rows)


def smollm2() -> list[str]:
    """Compare training runs of a public model with several seeds here and in TRL."""
    found: dict[str, list[dict[str, Any]]] = {}
    for own in measurements(read("campaign_smollm2")).values():
        found.setdefault(own["training"]["name"], []).append(own)
    rows = [
        [
            *(f"`{name}`", str(len(runs))),
            mean_and_range(run["before"]["answer_reward"]["value"] for run in runs),
            mean_and_range(run["training"]["after"]["answer_reward"]["value"] for run in runs),
            ", ".join(
                f"{rise['value']:+.3f} ({rise['low']:.3f}-{rise['high']:.3f})"
                for rise in (run["training"]["differences"]["answer_reward"] for run in runs)
            ),
        ]
        for name, runs in found.items()
    ]
    header = ["training", "seeds", "right before", "right after", "rise of each seed"]
    return markdown(header, rows)


def answers_of(figures: Mapping[str, Any], *, interval: bool) -> list[str]:
    right = figures["answer_reward"]
    between_ = f" ({right['low']:.3f}-{right['high']:.3f})" if interval else ""
    return [
        f"{right['value']:.3f}{between_}",
        f"{figures['format_reward']['value']:.2f}",
        f"{figures['right_of_boxed']:.2f}",
        f"{figures['response_tokens']['value']:.1f}",
    ]


def tool_use() -> list[str]:
    """Show the evaluations of the training with a calculator."""
    rows = [
        [
            *(str(own["round"]), f"{own['seconds'] / 60:.0f}"),
            f"{own['success']:.3f} ± {own['standard_error']:.3f}",
            *(f"{own[name]:.2f}" for name in ("calls", "refused_calls", "no_call", "cut_off")),
        ]
        for own in read("tool_use")["held_out"]
    ]
    header = ["round", "minutes of training", "right answers", "calls per episode"]
    header += ["invalid calls per episode", "episodes without a call", "episodes cut off"]
    return markdown(header, rows)


def rlhf() -> list[str]:
    """Compare the policies that the walk through docs/howto/rlhf.md trains."""
    walks = read("rlhf")["walks"]
    rows = []
    for name in walks[0]["policies"]:
        own = [walk["policies"][name] for walk in walks]
        gains = [policy["gain"] for policy in own if "gain" in policy]
        gain = verdicts = ""
        if gains:
            mean, _ = over_seeds([one["value"] for one in gains])
            gain = f"{mean.value:+.2f} ({mean.low:+.2f} to {mean.high:+.2f})"
            verdicts = "; ".join(
                f"{verdict}: {count} of {len(own)} seeds"
                for verdict, count in Counter(policy["verdict"] for policy in own).items()
            )
        figures = [
            between([policy[key] for policy in own], form)
            for key, form in (("preference", ".2f"), ("learned", ".2f"), ("kl_nats", ".1f"))
        ]
        tokens = between([policy["tokens"] for policy in own], ".0f")
        rows.append([f"`{name}`", figures[0], gain, *figures[1:], tokens, verdicts])
    header = ["policy", "true preference", "gain over `sft`", "learned reward", "KL, nats"]
    return markdown([*header, "tokens", "verdict"], rows)


# ---- Faults ----------------------------------------------------------------------------------

FAULTS = (
    *("faults_processes", "faults_everything_else", "faults_rewards", "faults_object_store"),
    "faults_cluster",
)


def totals_of_faults() -> dict[str, int]:
    """Count faults, survived faults, exact recoveries, and recoveries that should be exact."""
    found = [own for name in FAULTS for all_ in read(name)["faults"].values() for own in all_]
    exact = [own["exact"] for own in found if own["exact"] is not None]
    survived = sum(own["survived"] for own in found)
    return {
        "faults": len(found),
        "survived": survived,
        "exact": sum(exact),
        "promised": len(exact),
    }


def cluster_faults() -> list[str]:
    """Show how often each fault of a cluster was survived, and what the recovery cost."""
    rows = []
    for name, outcomes in read("faults_cluster")["faults"].items():
        exact = [own["exact"] for own in outcomes if own["exact"] is not None]
        seconds = [own["recovered_s"] for own in outcomes]
        rows.append(
            [
                name.removeprefix("cluster: "),
                f"{sum(own['survived'] for own in outcomes)} of {len(outcomes)}",
                f"{sum(exact)} of {len(exact)}",
                f"{statistics.median(seconds):.0f} s ({max(seconds):.0f} s)",
                f"{max(own['rounds_repeated'] for own in outcomes)} rounds",
            ]
        )
    header = ["fault", "survived", "bit-exact", "recovery, median (max)", "repeated work, at most"]
    return markdown(header, rows)


TABLES: dict[str, Callable[..., list[str]]] = {
    table.__name__: table
    for table in (
        *(
            sources,
            evidence,
            quickstart,
            off_policy,
            menu,
            printed_menu,
            atlas,
            advantages,
            critic_errors,
            slices,
            curves,
            smollm2,
            asynchrony,
            schedule,
            peers,
            packing,
        ),
        *(scale, transports, parts_of_a_sync, broadcast, sync_share, learning, real_model),
        *(rlhf, tool_use, cluster_faults),
    )
}


if __name__ == "__main__":
    try:
        main()
    except FigureError as error:
        sys.exit(str(error))
