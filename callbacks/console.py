"""Show the trials while they run: a live table, or plain lines if there is no terminal."""

from __future__ import annotations

import atexit
import contextlib
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ray.tune.experiment import Trial
from ray.tune.result import DONE
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from callbacks import save_on_interrupt
from callbacks.fail_safe import FailSafeCallback
from callbacks.trial_files import config_of, continued_file, error_line, label, read_rows
from grpo_trainable.config import GRPOConfig
from grpo_trainable.protocol.round_records import details_of
from grpo_trainable.storage.ray_private import EXPR_RESULT_FILE
from grpo_trainable.telemetry.machine_load import DISTURBED_ABOVE, enough_undisturbed
from grpo_trainable.telemetry.metrics import SE
from grpo_trainable.telemetry.stages import STAGES, shares_of_work
from grpo_trainable.text import plural, rate, written

BAR_WIDTH = 20
SHOWN_TRIALS = 16
STATE_STYLES = {"done": "green", "failed": "bold red", "interrupted": "yellow"}
LEFT = "left_s"  # key added to a shown row: seconds until the trial ends

_live: Live | None = None  # the only live table, because a process has only one terminal


def stop_live_table() -> None:
    """End the live table, if any, so that its last state stays visible and the cursor returns."""
    global _live
    live, _live = _live, None
    # The command must be able to end even if its terminal has closed.
    with contextlib.suppress(OSError, ValueError):
        if live is not None:
            live.stop()


class ConsoleCallback(FailSafeCallback):
    """Shows a compact table of all trials on a terminal.

    Without a terminal, the callback prints a line when a trial starts, is evaluated, fails or ends.
    """

    def __init__(self) -> None:
        self._started: dict[str, float] = {}
        self._evaluated: dict[str, float] = {}
        # Trial id -> the numbers in its newest row, plus the entry LEFT.
        self._latest: dict[str, dict[str, Any]] = {}
        # Trial id -> duration of its last evaluation, in seconds.
        self._evaluation_s: dict[str, float] = {}
        self._total = 0

    def setup(self, *, total_num_samples: int = 0, **info: Any) -> None:
        """Start the live table, if there is a terminal.

        Args:
            total_num_samples: Number of all trials, including those that Tune will create later.
            info: Other arguments that Tune passes; not used.
        """
        global _live
        self._total = total_num_samples
        console = Console()
        if console.is_terminal and not console.is_dumb_terminal:
            stop_live_table()
            _live = Live(Text("starting the first trials …"), console=console, refresh_per_second=1)
            _live.start()
            atexit.register(stop_live_table)  # the experiment may end without `on_experiment_end`

    def on_trial_start(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        """Show that a trial has started, for the first time or again."""
        self._started[trial.trial_id] = time.time()
        place = [other.trial_id for other in trials].index(trial.trial_id) + 1
        # After a restore, Tune may not know the rows of `result.json`.
        begun = _has_reported(trial) or continued_file(trial, EXPR_RESULT_FILE).exists()
        how = "started again" if begun else "started"
        self._show(trials, trial, f"{how} (trial {place} of {self._count(trials)})")

    def on_trial_result(
        self, iteration: int, trials: list, trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        """Show the new row, and print the notes that came with it."""
        shown = {k: v for k, v in result.items() if type(v) in (int, float)}
        config = config_of(trial)
        if result["time/eval_s"] > 0:
            self._evaluation_s[trial.trial_id] = result["time/eval_s"]
        left_s = seconds_left(result, config, self._evaluation_s.get(trial.trial_id, 0.0))
        self._latest[trial.trial_id] = {**shown, LEFT: left_s}
        details = details_of(result)
        if details is not None:
            for note in details.notes:
                print(f"{label(trial)}, round {details.round}: {note}", flush=True)
        line = None
        if self._evaluated.get(trial.trial_id) != result["eval/round"]:
            self._evaluated[trial.trial_id] = result["eval/round"]
            line = progress_line(result, config.rounds, left_s)
        self._show(trials, trial, line)

    def on_trial_complete(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        """Show that a trial has ended, and how long it has run since its last start."""
        now = time.time()
        started = self._started.get(trial.trial_id, now)
        ended = sum(other.is_finished() or other is trial for other in trials)
        rows = list(read_rows(continued_file(trial, EXPR_RESULT_FILE)))
        rounds = config_of(trial).rounds
        # After a restore, Tune may not know the newest rows of `result.json`. But after an
        # interrupt, `result.json` may have rows of rounds that the trial would have repeated.
        whole = bool(rows) and rows[-1]["training_iteration"] == rounds
        if whole and not save_on_interrupt.requested.is_set():
            shown = {k: v for k, v in rows[-1].items() if type(v) in (int, float)}
            self._latest[trial.trial_id] = shown
        reached = _reached(trial, self._latest)
        how = "done" if reached == rounds else f"stopped after round {reached} of {rounds},"
        # Tune's timestamps are whole seconds.
        continued = bool(rows) and rows[0].get("timestamp", now) < int(started)
        since = " since the trial continued" if continued else ""
        of = plural(self._count(trials), "trial")
        self._show(
            trials,
            trial,
            f"{how} in {now - started:.0f} s{since} ({ended} of {of})"
            f"{_disturbed_rounds(trial, rows)}",
        )

    def on_trial_recover(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        """Print why a trial failed, and say that it will start again."""
        left = trial.max_failures - trial.num_failures
        # If `max_failures` is negative, Tune retries without limit.
        retries = f" (retries left after this one: {left})" if trial.max_failures >= 0 else ""
        print(_line(trial, f"failed, starts again{retries}: {error_line(trial)}"), flush=True)

    def on_trial_error(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        """Print why a trial failed. This trial will not start again."""
        self._started.setdefault(trial.trial_id, time.time())  # a trial may fail while it starts
        print(_line(trial, f"failed: {error_line(trial)}"), flush=True)
        self._show(trials, trial, None)

    def on_experiment_end(self, trials: list, **info: Any) -> None:
        """Show the last state of all trials, and end the live table."""
        self._show(trials, None, None)
        stop_live_table()
        ended = [trial for trial in trials if trial.is_finished()]
        if ended and not self._started and not save_on_interrupt.requested.is_set():
            if any(_has_reported(trial) or trial.status == Trial.ERROR for trial in ended):
                told = f"nothing to run: {plural(len(ended), 'trial')} had already ended"
            else:
                told = "nothing ran: the experiment ended before the actors of a trial were ready"
            print(told, flush=True)

    def _show(self, trials: Sequence[Any], trial: Any, line: str | None) -> None:
        if _live is not None:
            _live.update(live_table(trials, self._latest, self._count(trials)))
        elif line is not None:
            print(_line(trial, line), flush=True)

    def _count(self, trials: Sequence[Any]) -> int:
        return max(self._total, len(trials))

    def __getstate__(self) -> dict[str, Any]:
        # Tune pickles callbacks with the experiment. After a resume, nothing has been shown yet.
        fresh = ("_started", "_evaluated", "_latest", "_evaluation_s")
        return {**{name: {} for name in fresh}, "_total": 0}


def _line(trial: Any, text: str) -> str:
    """Return `text` as a line that begins with the current time and the trial's name."""
    return f"{time.strftime('%H:%M:%S')}  {label(trial):<18} {text}"


def _disturbed_rounds(trial: Any, rows: Sequence[Mapping[str, Any]]) -> str:
    """Return text about the rounds that other processes disturbed, or "" if there are none."""
    disturbed = sum(row.get("time/disturbed_fraction", 0.0) > DISTURBED_ABOVE for row in rows)
    if not disturbed:
        return ""
    if not config_of(trial).callbacks.leave_out_disturbed:
        effect = "the trial's speed includes disturbed rounds"
    elif enough_undisturbed(len(rows), disturbed):
        effect = "the trial's speed excludes disturbed rounds"
    else:
        effect = "the trial's speed is not comparable"
    return f" · other work disturbed {disturbed} of {plural(len(rows), 'round')}: {effect}"


def progress_line(result: Mapping[str, Any], rounds: int, left_s: float) -> str:
    """Return one row as text: `round 16/64 · held-out 0.52 · …`.

    Args:
        result: The row.
        rounds: Number of rounds of the trial.
        left_s: Seconds until the trial ends.
    """
    shares = " ".join(
        f"{stage} {share:.0%}"
        for stage, share in shares_of_work(result, without="eval").items()
        # Hide optional stages that the trial does not use: their time is exactly 0.
        if share or not STAGES[stage].optional
    )
    kl = f"KL {_kl(result)} · " if "kl/reference_nats" in result else ""
    return (
        f"round {result['training_iteration']}/{rounds} · "
        f"held-out {_held_out(result)} · "
        f"train {_cell(result, 'reward/train_mean', '.3f')} · "
        f"{_cell(result, 'response/length_mean', '.0f')} tokens per response · "
        f"{rate(result['throughput/samples_per_s'])} samples/s · "
        f"lag {_cell(result, 'lag/max', '.0f')} · {kl}"
        f"{shares} · {left_s:.0f} s left"
    )


def _kl(row: Mapping[str, Any]) -> str:
    """Return the KL to the reference, with its standard error if the KL is only estimated."""
    name = "kl/reference_nats"
    se = row.get(f"{name}{SE}", 0.0)
    return f"{_cell(row, name, '.2f')}{f' ± {se:.2f}' if se else ''}"


def _held_out(result: Mapping[str, Any]) -> str:
    """Return the latest held-out reward, with its round if the evaluation was in an earlier round.

    The first row may contain the reward that was measured before training.
    """
    reward, measured = f"{result['reward/eval_mean']:.3f}", int(result["eval/round"])
    return reward if measured == result["training_iteration"] else f"{reward} (round {measured})"


def _reward_after(row: Mapping[str, Any]) -> str:
    """Return the latest held-out reward, or a dash if it was measured before training."""
    return f"{row['reward/eval_mean']:.3f}" if row["eval/round"] else "-"


def _cell(row: Mapping[str, Any], name: str, form: str) -> str:
    """Return a formatted figure, or a dash if the row lacks it, for example in a skipped round."""
    return written(row[name], f"{{:{form}}}") if name in row else "-"


def seconds_left(row: Mapping[str, Any], config: GRPOConfig, evaluation_s: float) -> float:
    """Estimate the seconds that the remaining rounds and evaluations will take.

    Each remaining round is assumed to take the mean time of the rounds so far. The warm-up and the
    evaluation before round 1 happen only once, so they are not included.

    Args:
        row: The newest row of the trial.
        config: Config of the trial.
        evaluation_s: Seconds that the latest evaluation took.
    """
    round_, rounds, every = row["training_iteration"], config.rounds, config.eval.every
    evaluations = rounds // every - round_ // every + (round_ < rounds and rounds % every > 0)
    return row["time/wall_clock_s"] / round_ * (rounds - round_) + evaluations * evaluation_s


def _has_reported(trial: Any) -> bool:
    """Return True if a trial has completed a round.

    Tune's own `has_reported_at_least_once` is True after any access to `last_result`.
    """
    return bool(trial.last_result.get("training_iteration"))


def _held_back(trial: Any) -> bool:
    """Return True if the limit on concurrent trials has kept the trial from starting."""
    return trial.status == "PAUSED" and not _has_reported(trial)


def _state(trial: Any, latest: Mapping[str, Mapping[str, Any]]) -> str:
    """Return how a trial ended, or an empty string if it has not ended."""
    if trial.status == "ERROR":
        return "failed"
    if trial.status != "TERMINATED":
        return ""
    if _reached(trial, latest) == config_of(trial).rounds:
        return "done"
    # If there was no interrupt, a scheduler or a stopper has stopped the trial.
    interrupted = save_on_interrupt.requested.is_set() and not trial.last_result.get(DONE)
    return "interrupted" if interrupted else "stopped"


def _reached(trial: Any, latest: Mapping[str, Mapping[str, Any]]) -> int:
    """Return the number of rounds that a trial has finished."""
    rows = trial.last_result, latest.get(trial.trial_id, {})
    return max(row.get("training_iteration", 0) for row in rows)


def live_table(trials: Sequence[Any], latest: Mapping[str, Mapping[str, Any]], count: int) -> Table:
    """Return a table with one line per trial that has started.

    Args:
        trials: All trials that Tune has created.
        latest: Trial id -> newest row.
        count: Total number of trials, including those that Tune has not created yet.
    """
    table = Table(box=None, pad_edge=False, caption_justify="left")
    rows: list[Mapping[str, Any]] = []
    table.add_column("arm/seed", no_wrap=True)
    table.add_column("", no_wrap=True)
    for name in ("round", "held-out", "tokens", "samples/s", "lag", "KL"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("shares of a round", no_wrap=True, width=BAR_WIDTH)
    table.add_column("left", justify="right", no_wrap=True)
    begun = [trial for trial in trials if trial.status != "PENDING" and not _held_back(trial)]
    # If there are too many trials for the table, finished trials are hidden first.
    hidden = max(0, len(begun) - SHOWN_TRIALS)
    for trial in sorted(begun, key=lambda trial: not trial.is_finished())[hidden:]:
        row = latest.get(trial.trial_id) or trial.last_result or {}
        if "reward/eval_mean" not in row:
            table.add_row(label(trial), _styled(_state(trial, latest) or "starting"))
            continue
        rows.append(row)
        rounds = config_of(trial).rounds
        state = _state(trial, latest)
        left = "" if state or LEFT not in row else f"{row[LEFT]:.0f} s"
        table.add_row(
            label(trial),
            _styled(state),
            f"{row['training_iteration']}/{rounds}",
            f"{row['reward/eval_first']:.3f} → {_reward_after(row)}",
            _cell(row, "response/length_mean", ".0f"),
            rate(row["throughput/samples_per_s"]),
            _cell(row, "lag/max", ".0f"),
            _kl(row),
            _bar(row),
            left,
        )
    states = Counter(_state(trial, latest) for trial in trials)
    table.title = f"{states['done']} of {plural(count, 'trial')} done"
    for state in ("stopped", "failed"):
        if states[state]:
            table.title += f", {states[state]} {state}"
    table.title += f", {count - len(begun)} waiting"
    if hidden:
        table.title += f", {hidden} not shown"
    table.title_justify = "left"
    table.caption = _legend(rows)
    return table


def _styled(state: str) -> Text:
    return Text(state, style=STATE_STYLES.get(state, ""))


def _bar(row: Mapping[str, Any]) -> Text:
    """Return the shares of the stages as a coloured bar of `BAR_WIDTH` characters."""
    shares = shares_of_work(row)
    bar, end, reached = Text(), 0.0, 0
    for stage, shown in STAGES.items():
        end += shares[stage]
        width = round(end * BAR_WIDTH) - reached
        reached += width
        bar.append("█" * width, style=shown.terminal)
    return bar


def _legend(rows: Iterable[Mapping[str, Any]]) -> Text:
    """Return a legend with the colours of `eval` and of all stages that took time in any row."""
    occurring = {stage for row in rows for stage in STAGES if row[f"time/{stage}_s"]} | {"eval"}
    legend = Text()
    for stage, shown in STAGES.items():
        if stage in occurring:
            legend.append("█", style=shown.terminal).append(f" {stage}  ")
    return legend
