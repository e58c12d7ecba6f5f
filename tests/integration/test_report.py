"""The report shows the measurements, names what is missing, and executes no text that it reads."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from experiments import (
    SPACE,
    change,
    config,
    evaluation,
    gradient_step,
    rollout,
    row,
    write_experiment,
    write_full,
    write_part,
    write_trial,
)
from matplotlib.figure import Figure
from matplotlib.image import imread

from grpo_trainable.config import schedule
from launch import report
from launch.tune import use_of_model
from reports import canvas, changes, series
from reports.experiment import read_experiment
from reports.page import _arms_run, _warnings
from reports.parquet_reader import read_files
from reports.plots import sections
from reports.report import write_report
from reports.summary import NONE_BY_KL, OLDER_RESPONSES, compare

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, str(ROOT / "launch" / "report.py")]
PNG = b"\x89PNG\r\n\x1a\n"


class Page(HTMLParser):
    """The tags of a page with their attributes, and the text between them."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.words += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture(autouse=True)
def small_pictures(monkeypatch):
    monkeypatch.setattr(canvas, "DPI", 30)


@pytest.fixture
def experiment(tmp_path):
    return write_experiment(tmp_path / "three_seeds")


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    """Write an experiment of three arms with two seeds, and its report; return the directory."""
    directory = tmp_path_factory.mktemp("storage") / "full"
    write_full(directory, ("colocated_k1", "colocated_k8", "async_k4"))
    heard: list[str] = []
    assert write_report(directory, heard.append) == directory / "report.html"
    assert heard == []
    return directory


def write(directory: Path) -> tuple[Page, list[str]]:
    """Write the report. Return the page and the warnings that the command would print."""
    heard: list[str] = []
    return Page(write_report(directory, heard.append)), heard


# ---- A complete experiment -------------------------------------------------------------------


def test_the_page_asks_for_nothing_from_outside_and_runs_no_script(full):
    page = Page(full / "report.html")
    sources = [image["src"] for image in page.all("img")]
    sources += [source["srcset"] for source in page.all("source")]

    assert len(sources) == 2 * len(page.all("img")) > 0
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    assert not {"script", "link", "iframe", "object"} & {tag for tag, _ in page.tags}
    # All links lead to the trials' own files.
    assert all("://" not in link["href"] for link in page.all("a"))
    assert not re.search(r"url\(|@import", (full / "report.html").read_text())
    assert all(image["alt"] for image in page.all("img"))


def test_a_complete_experiment_has_every_plot_and_misses_nothing(full):
    page = Page(full / "report.html")
    names = [figure["id"] for figure in page.all("figure")]

    assert len(page.all("img")) == len(names) == len(set(names)) == 21
    assert {f"{name}.png" for name in [*names, "legend"]} == set(os.listdir(full / "plots"))
    for path in (full / "plots").iterdir():
        assert path.read_bytes().startswith(PNG)
    assert "Not drawn" not in page.words
    assert "Missing or incomplete" not in page.words
    assert "3 arms × 2 seeds: 6 trials, 6 finished" in page.words
    assert not re.search(r"<ul[^>]*></ul>", (full / "report.html").read_text())


def test_without_a_margin_the_page_says_how_to_get_verdicts(full):
    page = Page(full / "report.html")

    assert f"launch/verdict.py {full} --margin 0.03" in page.words
    assert "menu" not in [section.get("id") for section in page.all("section")]


def test_with_a_margin_the_page_opens_with_a_paragraph_the_menu_and_its_plot(tmp_path):
    directory = write_full(tmp_path / "menu", ("colocated_k1", "colocated_k8", "async_k4"))
    path = directory / "experiment.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "margin": 0.03}))
    page, heard = write(directory)

    assert heard == []
    assert page.words.index("Can another arm replace colocated_k1") < page.words.index("Menu")
    sections = [section.get("id") for section in page.all("section")]
    assert sections[0] == "menu"
    assert next(figure["id"] for figure in page.all("figure")) == "menu"
    assert (directory / "plots" / "menu.png").read_bytes().startswith(PNG)
    (image, *_) = page.all("img")
    assert "colocated_k8 -0.0" in image["alt"]
    data = json.loads((directory / "report.json").read_text())
    assert data["menu"]["arms"]["async_k4"]["verdict"] == "undecided"


def plot_of(directory: Path, name: str) -> canvas.Plot:
    """Return the plot with this name from the report of an experiment."""
    experiment = read_experiment(directory)
    files = {trial.name: read_files(trial) for trial in experiment.trials}
    shown = sections(experiment, compare(experiment.trials), files)
    (plot,) = (plot for section in shown for plot in section.plots if plot.name == name)
    return plot


def figure_of(plot: canvas.Plot) -> Figure:
    """Return the figure of a plot as the page shows it."""
    figures = []

    def draw(figure: Figure, theme: canvas.Theme) -> None:
        plot.draw(figure, theme)
        figures.append(figure)

    canvas.render_all([replace(plot, draw=draw)])
    return figures[0]


def drawn(directory: Path, name: str) -> list[str]:
    """Return the entries of the legends of the plot with this name."""
    legends = figure_of(plot_of(directory, name)).legends
    return [text.get_text() for legend in legends for text in legend.get_texts()]


@pytest.mark.parametrize("name", ["stages", "stages_over_rounds"])
def test_the_legend_of_stages_has_those_that_occur(full, name):
    words = drawn(full, name)
    assert {"rollout", "reward", "optimize", "reference", "sync", "eval", "other"} <= set(words)
    assert "vine" not in words


@pytest.mark.parametrize(
    ("name", "words"),
    [("kl_reference", ["KL estimator k1", "KL estimator k3"]), ("lag", ["largest", "mean"])],
)
def test_a_plot_says_what_its_dotted_lines_are(full, name, words):
    assert drawn(full, name) == words


def test_a_plot_has_its_title_as_a_file_and_not_on_the_page_which_says_it():
    plot = canvas.Plot(name="a", title="What it costs", look="", draw=lambda figure, theme: None)
    images = canvas.render_all([plot], files=True)
    light, dark, file = (
        imread(io.BytesIO(images[f"a-{use}"])) for use in ("light", "dark", "file")
    )
    above = len(file) - len(light)
    assert light.shape == dark.shape
    assert (file[above:] == light).all()
    assert np.ptp(light) == 0  # the page's picture has no text
    assert np.ptp(file[:above]) > 0.5  # dark letters on a light ground


def test_steps_and_reuse_are_shown_where_there_are_any(full, tmp_path):
    ids = {figure["id"] for figure in Page(full / "report.html").all("figure")}
    assert {"step_kl", "step_clip"} <= ids
    assert not {"uses", "age"} & ids
    one_step = tmp_path / "one_step"
    write_full(one_step, ("colocated_k1", "async_k1"))
    for path in one_step.glob("colocated_k1*/params.json"):
        params = json.loads(path.read_text())
        settings = {"buffer_capacity": 2, "buffer": {"sample_batches": 2}}
        path.write_text(json.dumps({**params, **settings}))
    page, heard = write(one_step)
    ids = {figure["id"] for figure in page.all("figure")}
    assert heard == []
    assert {"uses", "age"} <= ids
    assert not {"step_kl", "step_clip"} & ids


def test_a_page_says_how_many_arms_of_the_space_it_has_unless_it_has_all(full):
    record = read_experiment(full)
    assert record.question is not None
    every = replace(record.question, arms=tuple(record.arms))
    assert "has 3 of the" in _arms_run(record)
    assert _arms_run(replace(record, question=every)) == ""
    assert _arms_run(replace(record, question=None)) == ""
    # A planned arm counts although it has not begun.
    waiting = next(arm for arm in record.question.arms if arm not in record.arms)
    assert "has 4 of the" in _arms_run(replace(record, not_begun=[(waiting, 0)]))


def test_the_page_has_the_rows_of_the_commands_table(full):
    comparison = compare(read_experiment(full).trials)
    words = Page(full / "report.html").words

    for cells in comparison.rows():
        for cell in cells:
            numbers = re.findall(r"[\d.]+x?", cell.partition("(")[0]) if "k" not in cell else [cell]
            assert all(number in words for number in numbers)
    assert SPACE.question[1:] in words
    assert f"This experiment has 3 of the {len(SPACE.arms)} arms of its search space." in words
    assert "relative to colocated_k1" in words
    assert "Speed-ups are geometric means over the seeds, with their 95% intervals." in words


def test_settings_machine_and_commands_stand_on_the_page(full):
    words = Page(full / "report.html").words

    assert "Settings that differ between arms" in words
    assert "Shared settings that differ from the defaults: k_mode=fresh_batches." in words
    assert "Seeds: 0, 1." in words
    for text in ("2.13.0", "Linux-6.1-x86_64", "2026-11-20 15:00 UTC", "https://ui.perfetto.dev"):
        assert text in words
    assert f"tensorboard --logdir {full}" in words
    assert f"python launch/report.py {full}" in words
    assert "async_k4-0-abc_00000/trace.json" in words
    trained = full / "colocated_k1-0-abc_00000"
    assert f"python launch/export.py {trained} my_model" in words
    assert f"python launch/evaluate.py --checkpoint {trained}" in words
    assert use_of_model(full, read_experiment(full)) == [
        f"evaluate a trained model: python launch/evaluate.py --checkpoint {trained}",
        f"export it: python launch/export.py {trained} my_model",
    ]


def test_the_offered_evaluation_names_the_users_own_reward(experiment):
    params = config(**{"rounds": 1, "eval.every": 1, "task.reward": "/mine.py:score"})
    write_trial(experiment, params, [{**row(1), "done": True}])
    evaluate, _ = use_of_model(experiment, read_experiment(experiment))
    assert evaluate.endswith(" --set task.reward=/mine.py:score")


def test_no_model_is_offered_before_a_trial_is_complete(experiment):
    write_trial(experiment, config("sync", 0), [row(1)])
    assert use_of_model(experiment, read_experiment(experiment)) == []
    assert "launch/export.py" not in write(experiment)[0].words


def test_only_an_unfinished_experiment_can_be_continued(full, experiment):
    write_trial(experiment, config(), [row(1)])
    page, _ = write(experiment)

    assert (
        f"python launch/tune.py --space async_vs_sync --resume must --name {experiment.name} "
        f"--storage {experiment.parent}" in page.words
    )
    assert "--resume" not in Page(full / "report.html").words


def test_a_report_written_again_leaves_no_other_file(experiment):
    write_trial(experiment, config(), [row(1)])
    write(experiment)
    before = {path for path in experiment.rglob("*") if path.is_file()}
    write(experiment)

    assert {path for path in experiment.rglob("*") if path.is_file()} == before


# ---- Contents of plots -----------------------------------------------------------------------


def test_a_curve_is_the_median_with_least_and_most_over_seeds(experiment):
    for seed, reward in enumerate((0.2, 0.5, 0.6)):
        rows = [row(1, reward__train_mean=reward), row(2, reward__train_mean=reward + 0.1)]
        write_trial(experiment, config(seed=seed), rows[: 2 if seed < 2 else 1])
    arm = read_experiment(experiment).arms["colocated_k1"]
    points = series.curve(arm, series.metric("reward/train_mean"))

    assert points == [
        series.Point(1, 0.5, 0.2, 0.6),
        # The third seed has not reached this round.
        series.Point(2, pytest.approx(0.45), pytest.approx(0.3), pytest.approx(0.6)),
    ]


def test_the_frontier_begins_at_the_reference_and_has_a_point_an_evaluation(experiment):
    rows = [
        row(1, kl__reference_nats=1.0),
        row(2, kl__reference_nats=2.5, eval__round=2, reward__eval_mean=0.7),
        row(3, kl__reference_nats=4.0, eval__round=2, reward__eval_mean=0.7),
    ]
    write_trial(experiment, config(), rows)
    (trial,) = read_experiment(experiment).trials

    assert list(series.frontier(trial)) == [(0, 0.0, 0.3), (2, 2.5, 0.7)]


def test_stage_seconds_are_medians_over_rounds_and_of_eval_the_mean(experiment):
    rows = [
        row(n, time__rollout_s=s, time__eval_s=e) for n, s, e in ((1, 9, 6), (2, 1, 0), (3, 2, 0))
    ]
    write_trial(experiment, config(seed=0), rows)
    rows = [row(n, time__rollout_s=4.0) for n in (1, 2, 3)]
    write_trial(experiment, config(seed=1), rows)
    trials = read_experiment(experiment).trials
    a_round = schedule.prompts_per_round(trials[0].config) * trials[0].config.rollout.group_size
    seconds = series.stage_seconds(trials, responses=a_round)

    assert seconds["rollout"] == 3.0  # median of 2 and 4
    assert seconds["eval"] == 1.0  # median of 2 and 0
    assert seconds["optimize"] == 0.0
    assert series.stage_seconds(trials, responses=2 * a_round)["rollout"] == 6.0


def test_without_a_usable_baseline_the_plot_of_speed_ups_names_what_was_disturbed(experiment):
    for arm, share in (("colocated_k1", 0.5), ("sync", 0.0)):
        rows = [
            row(n, time__wall_clock_s=2.0 * n, time__disturbed_fraction=share) for n in range(1, 9)
        ]
        write_trial(experiment, config(arm, rounds=8), rows)

    why = "Other processes on the machine disturbed colocated_k1."
    assert plot_of(experiment, "speed_up").missing == why
    assert plot_of(experiment, "device_hours").missing is None


def test_the_seconds_of_a_step_leave_the_evaluation_out(experiment):
    rows = [row(n, time__step_s=5.0 + 3 * n, time__eval_s=3.0 * n) for n in (1, 2)]
    write_trial(experiment, config(), rows)
    trials = read_experiment(experiment).trials
    a_round = schedule.responses_per_round(trials[0].config)

    assert series.stage_seconds(trials, responses=a_round)["step"] == 5.0


@pytest.mark.parametrize("name", ["previous", "behaviour"])
def test_kl_from_an_older_policy_is_positive_and_names_its_direction(experiment, name):
    rows = [{**row(n), f"kl/{name}_nats": kl} for n, kl in ((1, -0.25), (2, 0.01))]
    write_trial(experiment, config(), rows)
    plot = plot_of(experiment, f"kl_{name}")

    (axes,) = figure_of(plot).axes
    lines = [
        line.get_ydata()
        for line in axes.lines
        if len(line.get_xdata()) and line.get_marker() != "None"
    ]
    assert [list(map(float, ys)) for ys in lines] == [[0.25, -0.01]]
    assert plot.title.startswith("KL from the ")
    assert f"kl/{name}_nats with its sign reversed" in plot.look


def test_a_jump_of_k3_does_not_squeeze_the_lines_of_k1(experiment):
    kl = {"kl/reference_nats": 2.0, "kl/reference_k3_nats": 1.0}
    write_trial(
        experiment, config(), [{**row(1), **kl}, {**row(2), **kl, "kl/reference_k3_nats": 1e5}]
    )
    plot = plot_of(experiment, "kl_reference")

    (axes,) = figure_of(plot).axes
    assert axes.get_ylim()[1] < 10
    assert "so dotted lines can leave the plot" in plot.look


def test_every_kl_to_the_reference_is_said_to_be_of_an_older_policy(experiment):
    write_trial(experiment, config(), [{**row(n), "kl/reference_nats": 2.0} for n in (1, 2)])
    assert OLDER_RESPONSES in plot_of(experiment, "kl_reference").look


def test_only_arms_that_agree_in_lag_k_and_replay_are_compared_by_kl(experiment):
    def write_arms(*arms: str) -> None:
        for arm in arms:
            write_trial(experiment, config(arm), [{**row(1), "kl/reference_nats": 2.0}])

    write_arms("colocated_k1", "sync")
    for name in ("kl_reference", "frontier"):
        assert "Compare this KL" not in plot_of(experiment, name).look
    write_arms("async_k1")
    for name in ("kl_reference", "frontier"):
        look = plot_of(experiment, name).look
        assert "Compare this KL only between colocated_k1 and sync, which agree" in look
    for trial in experiment.glob("sync-*"):
        shutil.rmtree(trial)
    for name in ("kl_reference", "frontier"):
        assert NONE_BY_KL in plot_of(experiment, name).look
    assert "better" not in plot_of(experiment, "frontier").look


def test_wide_tick_labels_push_no_label_out_of_the_plot(experiment):
    rows = [row(n, kl__reference_nats=kl) for n, kl in ((1, -1e5), (2, 1e5))]
    write_trial(experiment, config(), rows)
    figure = figure_of(plot_of(experiment, "kl_reference"))

    (axes,) = figure.axes
    assert "100000" in [label.get_text() for label in axes.get_yticklabels()]
    assert axes.yaxis.label.get_window_extent().x0 >= 0


def test_small_kl_has_numbers_on_its_axis(experiment):
    write_trial(experiment, config(), [{**row(n), "kl/previous_nats": -0.01 * n} for n in (1, 2)])
    (axes,) = figure_of(plot_of(experiment, "kl_previous")).axes

    low, high = axes.get_ylim()
    assert sum(low <= tick <= high for tick in axes.get_yticks()) >= 3


def test_versions_begin_at_the_start_and_end_with_a_visible_step(experiment):
    trial = write_trial(experiment, config(), [row(1), row(2)])
    changes = [change(1.0, "generator", 0)]
    for n in (1, 2):
        changes += [change(1.0 + 10 * n, "learner", n), change(1.5 + 10 * n, "generator", n)]
    write_part(trial, "versions", 1, changes)
    plot = plot_of(experiment, "versions")

    learner, generator = (
        list(zip(line.get_xdata(), line.get_ydata(), strict=True))
        for line in sorted(figure_of(plot).axes[0].lines, key=lambda line: line.get_linestyle())
    )
    assert learner[0] == generator[0] == (0.0, 0.0)
    assert learner[-2][1] == learner[-1][1] == 2.0
    assert learner[-2][0] < learner[-1][0]
    assert "Lines that coincide do not mean that rollouts are fresh" in plot.look


def test_the_axis_of_kl_by_step_fits_its_data(experiment):
    trial = write_trial(experiment, config("colocated_k2"), [row(1)])
    write_part(trial, "steps", 1, [gradient_step(1, n, -0.1 * n) for n in (1, 2)])
    (axes,) = figure_of(plot_of(experiment, "step_kl")).axes

    assert axes.get_ylim()[1] < 0.3
    assert all(tick == round(tick) for tick in axes.get_xticks())


def test_lag_shares_are_over_the_groups_of_all_seeds(experiment):
    for seed in (0, 1):
        trial = write_trial(experiment, config("async_k1", seed), [row(1)])
        groups = [rollout(1, 0), rollout(1, 0), rollout(1, 1, lag=1), rollout(1, 2, lag=1)]
        write_part(trial, "rollouts", 1, groups[: 4 if seed else 2])
    trials = read_experiment(experiment).trials

    assert series.lag_shares(read_files(trial).lags for trial in trials) == {0: 0.5, 1: 0.5}


def test_no_two_arms_look_alike():
    looks = {(canvas.colour(i), canvas.marker(i)) for i in range(64)}
    assert len(looks) == 64


# ---- Changes that the reward did not ask for -------------------------------------------------


def write_lengths(directory: Path, arm: str, after: int, *, cut: int = 0) -> None:
    """Write a trial whose held-out responses have 39 tokens before training.

    Args:
        directory: The directory of the experiment.
        arm: The arm of the trial.
        after: Number of tokens per response after round 2.
        cut: Number of responses, out of 10, that are cut off after round 2.
    """
    metrics = {"policy/entropy_nats": 1.1, "response/reference_nll_nats": 0.9}
    rows = [{**row(n, eval__round=2.0 * (n > 1)), **metrics} for n in (1, 2)]
    trial = write_trial(directory, config(arm, rounds=2), rows)
    for part, round_, tokens in ((1, 0, 39), (2, 2, after)):
        text = "The dog saw a lamp. It was very happy in the park."
        responses = [
            evaluation(
                round_, i, f"{text} {i}", 0.5, tokens=tokens, finished=i >= cut or not round_
            )
            for i in range(10)
        ]
        write_part(trial, "evaluations", part, responses)


def test_shorter_responses_are_named_on_the_first_screen_and_arm_by_arm(experiment, monkeypatch):
    monkeypatch.setattr(changes, "ENOUGH", 1)  # the trials have ten responses
    write_lengths(experiment, "colocated_k1", 12)
    write_lengths(experiment, "sync", 36)
    write_lengths(experiment, "async_k1", 39, cut=2)
    page, heard = write(experiment)

    assert heard == []
    first, _, rest = page.words.partition("Comparison of the arms")
    moved = [
        "colocated_k1: responses became shorter, -69%.",
        "async_k1: the token limit cuts off more held-out responses, +20.0 points.",
    ]
    assert first.index(moved[0]) < first.index(moved[1])
    section = rest.partition("Side effects of training")[2]
    assert (
        "colocated_k1: responses became shorter, 39.0 → 12.0 tokens (-69%, threshold 25%)."
        in section
    )
    assert "sync: no quantity moved by more than its threshold." in section
    assert (
        "async_k1: the token limit cuts off more held-out responses, 0% → 20% (+20.0 points, "
        "threshold 10)."
    ) in section
    for text in ("39.0 → 36.0", "± 25%", "± 0.3 nats per token", "distinct 3-grams"):
        assert text in section
    assert "#changes" in [link["href"] for link in page.all("a")]


def test_a_warning_says_that_the_baseline_changed_too(experiment, monkeypatch):
    monkeypatch.setattr(changes, "ENOUGH", 1)
    write_lengths(experiment, "colocated_k1", 12)
    write_lengths(experiment, "async_k1", 14)
    record = read_experiment(experiment)
    compared = replace(compare(record.trials), baseline="colocated_k1")
    shared = "A change that the baseline colocated_k1 shows too may not come from the settings in"
    assert shared in _warnings(compared, record)
    own = {"colocated_k1": [], "async_k1": compared.changes["async_k1"]}
    assert shared not in _warnings(replace(compared, changes=own), record)


def test_nothing_is_warned_of_where_nothing_moved(experiment):
    write_lengths(experiment, "sync", 36)
    page, _ = write(experiment)

    assert "sync: no quantity moved by more than its threshold." in page.words
    assert "other quantities that changed" not in page.words


# ---- Missing data ----------------------------------------------------------------------------


def test_a_bare_experiment_is_reported_on_and_says_what_it_lacks(tmp_path):
    directory = write_experiment(tmp_path / "old", packages=None, machine=None, started=None)
    params = config(rounds=4, **{"loss.kl_monitor": False})
    write_trial(directory, params, [row(1, cost__device_hours=0.0)])
    page, heard = write(directory)

    for text in (
        "colocated_k1/0: still running or interrupted: round 1 of 4",
        "KL was not monitored (loss.kl_monitor=false): all trials",
        "the load from other processes was not measured, so speeds may be wrong: all trials",
        "no rollouts were kept: all trials",
        "no version changes were recorded: all trials",
        "no held-out responses after round 0 were kept: all trials",
        "colocated_k1: not measured in every trial: tokens per response, cut off, entropy",
        "packages not recorded",
        "machine not recorded",
        "started not recorded",
        "Not drawn. KL was not monitored (loss.kl_monitor=false).",
        "Not drawn. No wall-clock time was recorded.",
        "Not drawn. No rollouts were kept",
        "Not drawn. No version changes were recorded",
        "Nothing to compare: no evaluation after round 0 was kept.",
        "No trace.json was written.",
    ):
        assert text in page.words
    assert heard == []


def test_an_experiment_of_a_users_tuner_lacks_nothing_that_only_our_command_records(tmp_path):
    directory = tmp_path / "mine"
    directory.mkdir()
    for seed in (0, 1):
        write_trial(directory, config("sync", seed), [row(1)])
    page, heard = write(directory)

    assert heard == []
    assert "run by your own Tuner" in page.words
    for text in ("not recorded: an older", "space not recorded", "experiment.json"):
        assert text not in page.words


def test_kl_that_should_be_there_and_is_not_is_told_from_kl_not_asked_for(experiment):
    write_trial(experiment, config(), [row(1)])
    write_trial(experiment, config("sync", **{"loss.kl_monitor": False}), [row(1)])
    page, _ = write(experiment)

    assert "KL was not monitored (loss.kl_monitor=false): sync/0" in page.words
    assert "the KL was monitored, but no round recorded it: colocated_k1/0" in page.words


def test_failed_trials_and_damaged_files_are_named_on_the_page_and_to_the_caller(experiment):
    last = {**row(4), "done": True}
    rows = [row(n) for n in (1, 2, 3)]
    write_trial(experiment, config("sync", rounds=4), rows, error="Traceback\nActorFailed: <gone>")
    trial = write_trial(experiment, config(rounds=4), [*rows, last], error="OSError: first time")
    with open(trial / "result.json", "a") as file:
        file.write('{"trai')
    part = write_part(trial, "rollouts", 1, [rollout(1, 1)])
    part.write_bytes(b"PAR1 nonsense PAR1")
    (experiment / "broken").mkdir()
    (experiment / "broken" / "params.json").write_text("{")
    page, heard = write(experiment)

    named = (
        "broken: left out, because its config cannot be used (broken/params.json cannot be read",
        "result.json: line 5 of 5 is half-written and was skipped",
        "rollouts/part-00000001.parquet is damaged and was skipped (",
    )
    for text, warning in zip(named, heard, strict=True):
        assert text in page.words
        assert text in warning
        assert "\n" not in warning
    assert "sync/0: failed after round 3 of 4: ActorFailed: <gone>" in page.words
    assert "finished after a retry; earlier error: OSError: first time" in page.words
    assert "2 arms × 1 seed: 2 trials, 1 finished, 1 failed" in page.words


def test_trials_that_a_scheduler_stopped_are_counted_apart(experiment):
    rows = [row(n, done=n in (2, 4)) for n in range(1, 5)]
    write_trial(experiment, config("colocated_k1", rounds=4), rows)
    write_trial(experiment, config("sync", rounds=4), rows[:2])
    page, _ = write(experiment)

    assert (
        "2 arms × 1 seed: 2 trials, 1 finished, 1 stopped by a scheduler or stopper" in page.words
    )
    assert "sync/0: stopped by a scheduler or stopper after round 2 of 4" in page.words
    assert "Stopped by a scheduler or stopper: sync, seed 0 (after round 2 of 4)." in page.words


def test_a_population_is_one_arm_with_its_lineage(tmp_path):
    directory = write_experiment(tmp_path / "pbt", scheduler="pbt")
    for seed in (0, 1):
        before = config("sync", seed, rounds=4)
        rows = [{**row(n), "config": before} for n in range(1, 5)]
        if seed == 0:
            clone = config("sync", 1, rounds=4, **{"optim.lr": 1e-4})
            rows[2]["copied_from"] = "sync-1-abc_00001"
            rows[2:] = [{**later, "config": clone} for later in rows[2:]]
        write_trial(directory, before, rows)
    page, heard = write(directory)

    assert heard == []
    assert "a population of 2 members" in page.words
    section = page.words.partition("The population")[2].partition("Side effects")[0]
    for text in ("sync/0", "3-4", "optim.lr=0.0001", "sync/1 after round 2"):
        assert text in section
    assert 'id="told"' not in (directory / "report.html").read_text()


def test_responses_that_are_cut_off_are_named_on_the_first_screen(experiment):
    write_trial(experiment, config(rounds=1), [row(1, response__truncated_fraction=1.0)])
    page, _ = write(experiment)
    first = page.words.partition("The arm")[0]
    assert "cut off 100% of the training responses in the last rounds" in first


def test_trials_that_have_not_begun_are_counted_and_named(tmp_path):
    planned = [["colocated_k1", 0], ["sync", 0], ["async_k1", 0], ["async_k1", 1]]
    directory = write_experiment(tmp_path / "cut", planned=planned)
    write_trial(directory, config("sync", rounds=4), [row(1)])
    page, _ = write(directory)

    counts = "4 trials, 0 finished, 1 still running or interrupted, 3 not started"
    assert f"3 arms × up to 2 seeds: {counts}" in page.words
    assert "not started: colocated_k1/0, async_k1/0, async_k1/1" in page.words
    assert json.loads((directory / "report.json").read_text())["not_begun"] == [
        {"arm": "colocated_k1", "seed": 0},
        {"arm": "async_k1", "seed": 0},
        {"arm": "async_k1", "seed": 1},
    ]


def test_an_unknown_space_and_odd_descriptions_do_not_stop_the_report(tmp_path):
    directory = write_experiment(
        tmp_path / "odd", space="of_the_future", packages=["torch"], machine="m", started=[1]
    )
    write_trial(directory, config(), [row(1)])
    page, _ = write(directory)

    assert "Experiment odd" in page.words
    assert "Packages not recorded." in page.words


def test_extreme_values_do_not_stop_the_report(experiment):
    rows = [row(n, kl__reference_nats=s * 1e300, lag__max=1e18) for n, s in ((1, -1), (2, 1))]
    write_trial(experiment, config(), [*rows, row(3, time__rollout_s=-1.0)])
    page, _ = write(experiment)

    assert "kl_reference" in [figure["id"] for figure in page.all("figure")]


# ---- Untrusted text --------------------------------------------------------------------------


def test_responses_are_text_and_never_markup(experiment):
    evil = "<script>alert('x')</script><img src=x onerror=\"alert(1)\">&amp;\x1b[31m\x00\u202eabc"
    trial = write_trial(experiment, config(), [row(1, eval__round=1)])
    rows = [
        evaluation(0, 0, evil, 0.0, prompt=f"say {evil}"),
        evaluation(1, 0, "</pre></section>" + "long " * 2000, 1.0, prompt=f"say {evil}"),
    ]
    write_part(trial, "evaluations", 1, rows)
    page, _ = write(experiment)

    assert page.all("script") == []
    assert all(image["src"].startswith("data:") for image in page.all("img"))
    visible = "<script>alert('x')</script><img src=x onerror=\"alert(1)\">&amp;␛[31m␀[U+202E]abc"
    assert visible in page.words
    assert f"say {visible}" in page.words
    assert "</pre></section>long long" in page.words
    assert "more characters" in page.words
    raw = (experiment / "report.html").read_text(encoding="utf-8")
    assert not re.search("[\x00-\x08\x0b-\x1f\u202a-\u202e]", raw)


def test_names_of_arms_and_directories_are_text_too(tmp_path):
    directory = write_experiment(tmp_path / "a <b> & $c$")
    for arm in ("<i>x", "$\\frac{$", 'quote"s', "漢字"):
        params = {**config(), "arm": arm}
        rows = [row(n) for n in (1, 2, 3)]
        trial = write_trial(directory, params, rows)
        (trial / "trace.json").write_text("[]")
        write_part(trial, "rollouts", 1, [rollout(1, 1)])
        write_part(trial, "versions", 1, [change(1.0, "learner", 0), change(2.0, "generator", 0)])
    page, _ = write(directory)

    assert page.all("i") == []
    assert "<i>x" in page.words
    assert "a <b> & $c$" in page.words
    links = [link["href"] for link in page.all("a")]
    assert "%3Ci%3Ex-0-abc_00000/trace.json" in links


# ---- Links and special files -----------------------------------------------------------------

SECRET = "kingfisher"


def test_links_are_named_on_the_page_and_what_they_lead_to_is_not(experiment, tmp_path):
    """Links that lead out of the experiment replace files that the report reads."""
    outside = write_experiment(tmp_path / "outside", space=SECRET)
    trial = write_trial(outside, {**config("sync"), "arm": SECRET}, [row(1, eval__round=1)])
    (trial / "error.txt").write_text(SECRET)
    (trial / "trace.json").write_text(SECRET)
    for round_ in (0, 1):
        write_part(trial, "evaluations", 1 + round_, [evaluation(round_, 0, SECRET, 1.0)])

    inside = write_trial(experiment, config(), [row(1, eval__round=1)])
    parts = write_part(inside, "evaluations", 1, [evaluation(0, 0, "own", 1.0)])
    links = {
        experiment / "experiment.json": outside / "experiment.json",
        experiment / "whole-trial": trial,
        inside / "error.txt": trial / "error.txt",
        inside / "trace.json": trial / "trace.json",
        inside / "rollouts": trial / "evaluations",
        parts: trial / "evaluations" / "part-00000001.parquet",
    }
    for arm, name in (("async_k1", "params.json"), ("async_k4", "result.json")):
        other = write_trial(experiment, config(arm), [row(1)])
        links[other / name] = trial / name
    for path, target in links.items():
        path.unlink(missing_ok=True)
        path.symlink_to(target)
    page, heard = write(experiment)

    assert SECRET not in (experiment / "report.html").read_text()
    assert len(heard) == len(links)
    for path in links:
        assert any(f"{path.name} is a link" in warning for warning in heard), path
    for warning in heard:
        assert warning in page.words
    assert "trace.json" not in [link["href"] for link in page.all("a")]


def test_nothing_outside_the_experiment_is_written(experiment, tmp_path, capsys):
    write_trial(experiment, config(), [row(1)])
    write(experiment)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "reward_train.png").write_text("a picture of somebody else")
    (outside / "page").write_text("a page of somebody else")
    for place, target, named in (
        (experiment / "plots" / "reward_train.png", outside / "reward_train.png", "reward_train"),
        (experiment / "report.html", outside / "page", "report.html is a link"),
        (experiment / "plots", outside, "plots is a link"),
    ):
        place.rename(tmp_path / "aside")
        place.symlink_to(target)
        assert named in refused(capsys, str(experiment))
        place.unlink()
        (tmp_path / "aside").rename(place)

    assert {path.name: path.read_text() for path in outside.iterdir()} == {
        "reward_train.png": "a picture of somebody else",
        "page": "a page of somebody else",
    }


def test_an_experiment_that_is_itself_reached_through_a_link_is_reported_on(experiment, tmp_path):
    write_trial(experiment, config(), [row(1)])
    (tmp_path / "results").symlink_to(tmp_path)
    _, heard = write(tmp_path / "results" / "three_seeds")

    assert heard == []
    assert (experiment / "report.html").is_file()


def test_special_files_neither_stop_the_report_nor_keep_it_waiting(experiment, tmp_path):
    write_trial(experiment, config(), [row(1)])
    trial = write_trial(experiment, config("sync"), [])
    os.mkfifo(trial / "result.json")
    os.mkfifo(trial / "rollouts")
    (trial / "error.txt").mkdir()
    done = run(experiment, cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    for text in (
        "result.json cannot be read (result.json is not a regular file)",
        "rollouts cannot be read (rollouts is not a directory)",
        "error.txt cannot be read (error.txt is not a regular file)",
    ):
        assert text in done.stderr


# ---- The command -----------------------------------------------------------------------------


def run(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *map(str, arguments)], capture_output=True, text=True, cwd=cwd, timeout=120
    )


def test_the_command_prints_the_path_and_warns_of_damage(experiment, tmp_path):
    trial = write_trial(experiment, config(), [row(1)])
    write_part(trial, "rollouts", 1, [rollout(1, 1)]).write_bytes(b"")
    done = run("three_seeds", cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{experiment / 'report.html'}\n"
    assert done.stderr.startswith("report.py: warning: colocated_k1-0-abc_00000/rollouts/part-")
    assert done.stderr.count("\n") == 1
    assert (experiment / "report.html").is_file()


def test_the_command_teaches(tmp_path):
    done = run("--help", cwd=tmp_path)

    assert done.returncode == 0
    for text in (
        "EXPERIMENT_DIR/report.html",
        "EXPERIMENT_DIR/report.json",
        "examples:",
        "exit status",
    ):
        assert text in done.stdout


def refused(capsys, *argv: str) -> str:
    assert report.main([*argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("report.py: ")
    assert captured.err.count("\n") == 1
    return captured.err


def test_what_cannot_be_reported_on_ends_with_status_2_and_one_line(experiment, tmp_path, capsys):
    empty = tmp_path / "empty"
    empty.mkdir()
    other = tmp_path / "other"
    (other / "inner").mkdir(parents=True)

    assert "does not exist" in refused(capsys, str(tmp_path / "nowhere"))
    assert "is empty" in refused(capsys, str(empty))
    assert "is not an experiment" in refused(capsys, str(other))
    assert "no trial has finished a round yet" in refused(capsys, str(experiment))
    assert "EXPERIMENT_DIR" in refused(capsys)
    assert "--bogus" in refused(capsys, str(experiment), "--bogus")

    write_trial(experiment, config(), [])
    assert "no trial has finished a round yet" in refused(capsys, str(experiment))
    assert not (experiment / "report.html").exists()


def test_a_place_that_cannot_be_written_to_is_named(experiment, capsys):
    write_trial(experiment, config(), [row(1)])
    (experiment / "plots").write_text("in the way")

    assert "cannot write the report" in refused(capsys, str(experiment))


def test_without_matplotlib_the_command_says_how_to_install_it(experiment, tmp_path):
    write_trial(experiment, config(), [row(1)])
    program = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from launch import report\n"
        f"sys.exit(report.main([{str(experiment)!r}]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=60
    )

    assert done.returncode == 2
    assert done.stderr == (
        "report.py: matplotlib is missing; install it with: pip install -e '.[report]'\n"
    )


def test_importing_the_report_loads_neither_matplotlib_nor_torch_nor_ray():
    program = "import json, sys, launch.report; print(json.dumps(list(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=60
    )

    assert {"matplotlib", "torch", "ray"}.isdisjoint(json.loads(done.stdout))
