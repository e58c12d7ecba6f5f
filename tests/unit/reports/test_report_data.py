"""The content of report.json; docs/report.md explains every key and column of a report."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import experiments
import pytest

from callbacks.console import live_table
from grpo_trainable.config import CHECKS, GRPOConfig
from grpo_trainable.protocol.round_records import SCHEMAS
from reports import records
from reports.answers import answer
from reports.audit import audit_arms
from reports.changes import QUANTITIES
from reports.every_pair import every_pair
from reports.experiment import read_experiment
from reports.markup import moment
from reports.menu_text import menu_or_reason
from reports.pace import pace_of
from reports.page import _arms_run, _trained
from reports.parquet_reader import read_files
from reports.report_data import report_data
from reports.settings import NO_EFFECT, run_section, settings_section
from reports.summary import HEADER, compare, table
from reports.verdicts import quantities, short_answer, verdicts
from search_spaces import SPACES, Column, columns
from search_spaces.search_space import Question

ROUNDS = 5
NORM = Column(name="norm", title="gradient norm", metric="optim/grad_norm", factor=10.0)
RATE = Column(name="rate", title="rate", metric="throughput/samples_per_s", over="mean")


def data_of(directory: Path) -> dict[str, Any]:
    experiment = read_experiment(directory)
    files = {trial.name: read_files(trial) for trial in experiment.trials}
    comparison = compare(experiment.trials)
    found = quantities(experiment, comparison, files)
    asked = answer(experiment, comparison, files)
    pairs = every_pair(experiment, comparison, files)
    short, told = short_answer(found, comparison), verdicts(found, comparison)
    menu = menu_or_reason(experiment, comparison, files, directory)
    audits = audit_arms(experiment, files, comparison.baseline)
    return report_data(experiment, comparison, asked, found, pairs, short, told, [], audits, *menu)


def write_arm(directory: Path, arm: str, norm: float, *, others: float = 0.0) -> Path:
    config = GRPOConfig.from_dict({"arm": arm, "rounds": ROUNDS}).to_dict()
    rows = [
        experiments.row(
            n,
            time__wall_clock_s=2.0 * n,
            time__disturbed_fraction=others,
            optim__grad_norm=norm,
            throughput__samples_per_s=32.0,
        )
        for n in range(1, ROUNDS + 1)
    ]
    trial = experiments.write_trial(directory, config, rows)
    ends = [experiments.evaluation(r, cursor, "x", 0.5) for r in (0, ROUNDS) for cursor in (1, 2)]
    experiments.write_part(trial, "evaluations", ROUNDS, ends)
    return trial


def test_arms_without_a_seed_in_common_get_a_reason_instead_of_an_answer(tmp_path):
    directory = experiments.write_experiment(tmp_path / "own")
    for seed, arm in enumerate(("sync", "async_k1")):
        experiments.write_trial(directory, experiments.config(arm, seed), [experiments.row(96)])
    (said,) = data_of(directory)["answer"]
    assert said == (
        "No other arm has results with a seed of sync, so nothing can be compared. Every arm needs "
        "the same seeds."
    )


@pytest.fixture
def own(tmp_path):
    """Write an experiment that has two extra columns, and whose search space no longer exists."""
    question = Question(text="whose?", arms=("a", "b"), columns=(NORM, RATE)).to_dict()
    inputs = {"task.reward": "ab" * 32, "model.path/config.json": "cd" * 32, "space": "ef" * 32}
    return experiments.write_experiment(
        tmp_path / "own",
        space="of_theirs",
        question=question,
        planned=[["a", 0], ["b", 0], ["c", 0]],
        extensions=[{"started": "2026-11-21T15:00:00+00:00", "planned": [["a", 1]]}],
        inputs=inputs,
        own_files={"task.reward": "/home/me/my_rewards.py", "space": "/home/me/s.py:MINE"},
    )


def test_the_data_says_which_trials_were_added_when(own):
    write_arm(own, "a", 0.5)
    data = data_of(own)
    added = {"arm": "a", "seed": 1}
    assert data["extensions"] == [{"started": "2026-11-21T15:00:00+00:00", "trials": [added]}]
    assert added in data["not_begun"]


def test_the_columns_of_a_space_are_in_the_data_arm_by_arm(own):
    write_arm(own, "a", 0.5)
    write_arm(own, "b", 0.25)
    data = data_of(own)

    assert data["columns"]["norm"] == {
        **{"title": "gradient norm", "metric": "optim/grad_norm"},
        **{"how": "the value in the last round", "factor": 10.0},
    }
    assert data["arms"]["a"]["columns"]["norm"] == {"median": 5.0, "least": 5.0, "most": 5.0}
    assert data["arms"]["b"]["columns"]["norm"]["median"] == 2.5
    assert data["arms"]["b"]["columns"]["rate"]["median"] == 32.0
    assert data["columns"].keys() == data["arms"]["a"]["columns"].keys()


def test_a_disturbed_speed_of_any_column_is_marked_and_left_out_of_the_data(own):
    write_arm(own, "a", 0.5)
    write_arm(own, "b", 0.25, others=0.9)
    experiment = read_experiment(own)
    files = {trial.name: read_files(trial) for trial in experiment.trials}
    asked = answer(experiment, compare(experiment.trials), files)

    assert asked is not None
    place = asked.header.index("rate")
    assert [row[place] for row in asked.rows()] == ["32.00", "?"]
    assert asked.note.endswith("?: not comparable, because other processes used the machine.")
    data = data_of(own)
    assert data["arms"]["b"]["columns"]["rate"] is None
    assert data["arms"]["b"]["columns"]["norm"]["median"] == 2.5


def test_an_interrupted_trial_has_no_reward_after_an_evaluation_that_did_not_come(own):
    config = GRPOConfig.from_dict({"arm": "a", "rounds": 2 * ROUNDS}).to_dict()
    held_out = {"reward__eval_first": 0.531, "reward__eval_mean": 0.531}
    rows = [experiments.row(n, **held_out, eval__round=0.0) for n in range(1, ROUNDS)]
    experiments.write_trial(own, config, rows)
    data = data_of(own)["arms"]["a"]
    comparison = compare(read_experiment(own).trials)

    assert data["reward_before"]["median"] == 0.531
    assert data["reward_after"] is None
    ((_, cell),) = (
        pair
        for pair in zip(comparison.header, comparison.rows()[0], strict=True)
        if pair[0] == "held-out reward"
    )
    assert cell == "0.531 -> -"


def test_one_arm_alone_answers_no_question(own):
    write_arm(own, "a", 0.5)
    data = data_of(own)

    assert data["columns"] == data["arms"]["a"]["columns"] == data["pairs"] == {}


def test_the_pace_of_a_trial_is_worked_out_once(own, monkeypatch):
    asked = []
    monkeypatch.setattr(records, "pace_of", lambda *a: asked.append(a) or pace_of(*a))
    for arm in ("a", "b"):
        write_arm(own, arm, 0.5)
    data_of(own)

    assert len(asked) == 2


# ---- User files and settings -----------------------------------------------------------------


def test_files_of_the_users_are_named_with_their_digests(own):
    write_arm(own, "a", 0.5)

    assert data_of(own)["own_files"] == {
        "task.reward": {"name": "my_rewards.py", "sha256": "ab" * 32},
        "space": {"name": "s.py:MINE", "sha256": "ef" * 32},
    }
    section = settings_section(read_experiment(own))
    table = section.partition("Your own files at the start of the experiment")[2]
    assert "<td>my_rewards.py</td><td>abababababab</td>" in table.partition("</table>")[0]
    assert "config.json" not in table.partition("</table>")[0]  # this file ships with the package


@pytest.mark.parametrize(
    ("changed", "at"), [(["ab" * 32], "last resume"), ([], "start"), (3, "start"), (None, "start")]
)
def test_code_that_changed_between_two_commands_is_said(tmp_path, changed, at):
    files = {"task.reward": "/home/me/my_rewards.py"}
    directory = experiments.write_experiment(
        tmp_path / "own", inputs={"task.reward": "cd" * 32}, own_files=files, replaced=changed
    )
    write_arm(directory, "a", 0.5)
    section = settings_section(read_experiment(directory))
    assert f"Your own files at the {at}" in section
    assert ("Your code has changed since the start" in section) == (at == "last resume")


@pytest.mark.parametrize("own_files", [3, ["x"], {"task.reward": 1}, {"unknown": "/x"}, None])
def test_damaged_notes_about_files_name_none(tmp_path, own_files):
    directory = experiments.write_experiment(tmp_path / "odd", own_files=own_files)
    write_arm(directory, "a", 0.5)
    assert data_of(directory)["own_files"] == {}


def test_that_no_file_of_the_users_was_read_is_said_where_it_is_known(tmp_path):
    for name, noted in (("new", {}), ("old", None)):
        directory = experiments.write_experiment(tmp_path / name, own_files=noted)
        write_arm(directory, "a", 0.5)
        said = "The experiment used none of your own files" in settings_section(
            read_experiment(directory)
        )
        assert said == (name == "new")


TASK = "/home/me/my_task.py:Sums"


def changed_settings(directory: Path, **described: Any) -> str:
    """Return the page's sentence on settings for a trial of a user's task.

    The task declares `largest` and `match`, which the keyword task has as well. Both are set to the
    task's defaults.
    """
    experiments.write_experiment(directory, **described)
    own = {"name": TASK, "largest": 9, "match": "exactly", "signs": ["+", "-"]}
    config = GRPOConfig.from_dict({"arm": "a", "rounds": 1, "task": own}).to_dict()
    experiments.write_trial(directory, config, [experiments.row(1)])
    section = run_section(read_experiment(directory))
    return section.partition("<p>")[2].partition("</p>")[0]


def test_arms_that_differ_only_in_lag_are_named_and_a_setting_without_effect_has_no_value(tmp_path):
    def page_parts(*arms: str, scheduler: str = "fifo") -> tuple[str, str]:
        directory = experiments.write_experiment(
            tmp_path / "-".join((scheduler, *arms)), space="objectives_by_lag", scheduler=scheduler
        )
        for arm in arms:
            (trial,) = SPACES["objectives_by_lag"].trials({"arm": arm, "rounds": 4}, [0])
            experiments.write_trial(directory, trial.to_dict(), [experiments.row(1)])
        record = read_experiment(directory)
        return _arms_run(record), run_section(record)

    run, settings = page_parts("grpo_lag0", "grpo_lag4", "rloo_lag4")
    assert "The effect of a lag can be seen only between grpo_lag0 and grpo_lag4, because" in run
    cells = settings.partition(">loss.clip_high<")[2].partition("</tr>")[0]
    assert re.findall(r">([^<>]+)</td>", cells) == ["0.2", "0.2", "-"]
    assert NO_EFFECT in settings
    run, settings = page_parts("grpo_lag0", "grpo_lag4")  # all arms
    assert "search space. These arms differ only in lag.<" in run
    assert NO_EFFECT not in settings
    assert "only in lag" not in page_parts("grpo_lag0", "rloo_lag4")[0]
    _, settings = page_parts("grpo_lag4", "rloo_lag4", scheduler="pbt")  # one arm
    assert ">0.2 | -</td>" in settings
    assert NO_EFFECT in settings


def test_arms_with_different_tasks_have_settings_of_their_own(tmp_path):
    directory = experiments.write_experiment(tmp_path / "e")
    for arm in ("keyword", "math"):
        task = {"name": arm} | ({"train_file": "/data.jsonl"} if arm == "math" else {})
        config = GRPOConfig.from_dict({"arm": arm, "rounds": 1, "task": task}).to_dict()
        experiments.write_trial(directory, config, [experiments.row(1)])
    record = read_experiment(directory)
    shared = settings_section(record).partition("params.json of")[0]
    assert "eval.every" in shared
    assert "task.keywords_per_prompt" not in shared
    cells = run_section(record).partition(">task.keywords_per_prompt<")[2].partition("</tr>")[0]
    assert re.findall(r">([^<>]+)</td>", cells) == ["1", "-"]


def test_the_page_explains_how_the_arms_differ(tmp_path):
    directory = experiments.write_experiment(tmp_path / "e")
    for arm in ("colocated_k1", "colocated_k8", "sync"):
        (trial,) = SPACES["async_vs_sync"].trials({"arm": arm}, [0], samples=1024)
        experiments.write_trial(directory, trial.to_dict(), [experiments.row(1)])
    page = run_section(read_experiment(directory))

    assert "Every trial is planned with 1024 responses (samples), so an arm with more" in page
    table = page.partition("<tbody>")[2].partition("</tbody>")[0]
    cells = {
        row.partition("</th>")[0]: re.findall(r"<td>([^<>]+)</td>", row)
        for row in table.split('<th scope="row">')[1:]
    }
    assert cells["rounds"] == ["16", "2", "16"]
    assert cells["responses per round"] == ["64", "512", "64"]
    assert cells["reserved devices"] == ["0.95 CPUs", "0.95 CPUs", "1.9 CPUs"]
    for key in ("placement", "k", "k_mode"):  # k_mode is not a default, and all arms share it
        meaning = CHECKS[key].meaning.replace("'", "&#x27;")
        assert f"<li><code>{key}</code>: {meaning}</li>" in page


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ({}, "keyword (reward 0 or 1)"),
        ({"length_penalty": 0.1, "length_target": 9}, "keyword"),
        ({"reward": "/mine.py:score"}, "keyword"),
        (
            {"reward": "/mine.py:score", "train_file": "/data/qa.jsonl"},
            "keyword with the prompts of qa.jsonl",
        ),
        ({"name": "math"}, "math"),
    ],
)
def test_the_range_of_the_reward_is_given_if_the_settings_determine_it(tmp_path, task, said):
    directory = experiments.write_experiment(tmp_path / "e", samples=64)
    config = GRPOConfig.from_dict({"arm": "a", "rounds": 1, "task": task}).to_dict()
    experiments.write_trial(directory, config, [experiments.row(1)])
    task_fact, (what, model), samples = _trained(read_experiment(directory))
    assert task_fact == ("task", said)
    assert (what, model) == ("model", config["model"]["preset"])
    assert samples == ("samples per trial", "64")


def test_a_setting_of_a_users_task_is_not_explained_as_that_of_a_built_in_task(tmp_path):
    directory = experiments.write_experiment(tmp_path / "e")
    for arm, match in (("a", "exactly"), ("b", "loosely")):
        task = {"name": TASK, "match": match}
        config = GRPOConfig.from_dict({"arm": arm, "rounds": 1, "task": task}).to_dict()
        experiments.write_trial(directory, config, [experiments.row(1)])
    page = run_section(read_experiment(directory))
    row = page.partition(">task.match<")[2].partition("</tr>")[0]
    assert re.findall(r"<td>([^<>]+)</td>", row) == ["exactly", "loosely"]
    assert "<code>task.match</code>" not in page
    assert "<code>rounds</code>" in page


def test_a_setting_of_a_users_task_is_compared_with_the_default_that_it_declares(tmp_path):
    own = {"task.largest": 9.0, "task.match": "exactly", "task.signs": ("+", "-")}
    said = changed_settings(tmp_path / "same", task_defaults={TASK: own})
    assert said == (
        f"Seed: 0. Shared settings that differ from the defaults: rounds=1; task.name={TASK}."
    )
    own["task.largest"] = 10
    said = changed_settings(tmp_path / "other", task_defaults={TASK: own})
    assert said.endswith(f"rounds=1; task.name={TASK}; task.largest=9.")


@pytest.mark.parametrize("described", [{}, {"task_defaults": 3}, {"task_defaults": {TASK: None}}])
def test_a_default_that_was_not_recorded_is_not_guessed(tmp_path, described):
    said = changed_settings(tmp_path / "old", **described)
    assert said.endswith(
        "Settings of your own task whose defaults were not recorded: task.largest=9; "
        "task.match=exactly; task.signs=[&quot;+&quot;, &quot;-&quot;]."
    )


def test_settings_are_shown_with_the_values_that_take_effect(tmp_path):
    """`loss.clip_high` follows `loss.clip` unless it is set, as --dry-run shows."""
    directory = experiments.write_experiment(tmp_path / "clips")
    experiments.write_trial(
        directory, experiments.config(**{"loss.clip": 0.1}), [experiments.row(1)]
    )
    page = settings_section(read_experiment(directory))
    assert '<th scope="row">loss.clip_high</th><td>0.1</td>' in page
    page = run_section(read_experiment(directory))
    changed = page.partition("differ from the defaults: ")[2].partition("</p>")[0]
    assert "loss.clip=0.1" in changed
    assert "loss.clip_high" not in changed


@pytest.mark.parametrize("zone", ["+0000", "+00:00", "Z"])
def test_utc_has_one_name(zone):
    assert moment(f"2026-11-26T11:34:55{zone}") == "2026-11-26 11:34 UTC"


# ---- The documentation -----------------------------------------------------------------------

DOCS = Path(__file__).resolve().parents[3] / "docs"
REPORT = (DOCS / "report.md").read_text(encoding="utf-8")
METRICS = (DOCS / "metrics.md").read_text(encoding="utf-8")

# Paths whose keys are names from an experiment -> placeholder in the documentation.
NAMED = {
    "audit": "ARM",
    "columns": "COLUMN",
    "arms": "ARM",
    "arms.ARM.columns": "COLUMN",
    "arms.ARM.changes": "QUANTITY",
    "pairs": "ARM",
    "pairs.ARM": "FIGURE",
    "every_pair.figures": "FIGURE",
    "own_files": "SETTING",
}


def section(page: str, title: str) -> str:
    (found,) = (text for text in page.split("\n## ")[1:] if text.startswith(f"{title}\n"))
    return found


def first_cells(text: str) -> list[str]:
    """Return the first cell of every row in a section's tables."""
    return [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| ")]


def expanded(path: str) -> list[str]:
    """Expand `arms.ARM.{rounds,samples}` into two paths."""
    found = re.fullmatch(r"([^{]*)\{([^}]*)\}", path)
    return [found[1] + last.strip() for last in found[2].split(",")] if found else [path]


def paths_of(data: Any, path: str = "") -> set[str]:
    """Return every path to a value. A median with its least and most counts as one value."""
    if isinstance(data, list) and data and isinstance(data[0], dict):
        return {inner for item in data for inner in paths_of(item, path)}
    if not isinstance(data, dict) or data.keys() == {"median", "least", "most"}:
        return {path}
    found = set()
    for key, value in data.items():
        name = NAMED.get(path, key)
        found |= paths_of(value, f"{path}.{name}" if path else name)
    return found


def test_every_key_of_report_json_is_documented_and_every_documented_key_is_there(own):
    write_arm(own, "a", 0.5)
    write_arm(own, "b", 0.25)
    cells = first_cells(section(REPORT, "report.json"))
    keys = [key for cell in cells for key in re.findall(r"`([^`]+)`", cell)]
    documented = [path for key in keys for path in expanded(key)]

    assert len(documented) == len(set(documented))
    assert set(documented) == paths_of(data_of(own))


def test_the_menu_is_in_the_data_and_without_a_margin_the_command_that_makes_it(tmp_path):
    for name, margin in (("with", 0.03), ("without", None)):
        directory = experiments.write_experiment(tmp_path / name, margin=margin)
        for arm in ("a", "b"):
            rows = write_arm(directory, arm, 0.5) / "result.json"
            rows.write_text(rows.read_text().replace('"eval/round": 0.0', '"eval/round": 5.0'))
        data = data_of(directory)
        if margin is None:
            assert data["menu"] is None
            assert data["no_verdict"].endswith("run at least 3 seeds, the same for every arm.")
        else:
            assert data["no_verdict"] is None
            assert data["menu"]["margin"] == margin
            assert data["menu"]["arms"]["b"]["verdict"] == "undecided"
            assert data["menu"].keys() >= {"baseline", "price", "answer", "status"}


def test_every_two_arms_are_compared(own):
    for arm, reward in (("a", 0.5), ("b", 0.5), ("c", 0.5)):
        write_arm(own, arm, reward)
    data = data_of(own)

    named = [(pair["arm"], pair["over"]) for pair in data["every_pair"]]
    assert named == [("b", "a"), ("c", "a"), ("c", "b")]
    for pair in data["every_pair"][:2]:  # the baseline is arm a
        assert pair["figures"] == data["pairs"][pair["arm"]]
    assert data["every_pair"][2]["figures"]["speed_up"]["value"] == pytest.approx(1.0)


def test_every_column_of_the_table_is_documented():
    assert first_cells(section(REPORT, "The table"))[1:] == list(HEADER)


def shipped_columns() -> dict[str, Column]:
    found = [column for space in SPACES.values() for column in space.columns]
    found += [c for c in vars(columns).values() if isinstance(c, Column)]
    groups = [group for group in vars(columns).values() if isinstance(group, tuple)]
    found += [c for group in groups for c in group if isinstance(c, Column)]
    return {column.name: column for column in found}


def test_every_column_that_ships_is_documented_by_name_and_title():
    cells = first_cells(section(REPORT, "The question, arm by arm"))
    assert len(shipped_columns()) >= 20
    for column in shipped_columns().values():
        assert f"`{column.name}` {column.title}" in cells
    for name in columns.ALWAYS:
        assert any(cell.startswith(f"`{name}` ") for cell in cells)


@pytest.mark.parametrize("figure", columns.DERIVED)
def test_every_figure_that_is_no_metric_of_a_round_is_documented(figure):
    assert f"`{figure}`" in first_cells(section(METRICS, "Figures of a whole trial"))


def test_every_quantity_that_may_change_is_documented():
    assert all(f"`{quantity.name}`" in section(REPORT, "report.json") for quantity in QUANTITIES)


def header_and_cells(page: str, header: str) -> list[str]:
    """Return the first cell of every row in the table whose first header cell is `header`."""
    _, _, rest = page.partition(f"| {header} |")
    assert rest, f"no table begins with {header}"
    return first_cells(rest.partition("\n\n")[0].partition("\n")[2])


RESPONSE_TABLE = "column of `rollouts/`, and of `evaluations/`"


@pytest.mark.parametrize(
    ("kind", "tables"),
    [
        ("evaluations", [RESPONSE_TABLE]),
        ("rollouts", [RESPONSE_TABLE, "column of `rollouts/` alone"]),
        ("steps", ["column of `steps/`"]),
        ("versions", ["column of `versions/`"]),
    ],
)
def test_every_column_of_a_parquet_file_is_documented(kind, tables):
    cells = [cell for table in tables for cell in header_and_cells(METRICS, table)]
    assert sorted(re.findall(r"`(\w+)`", " ".join(cells))) == sorted(SCHEMAS[kind].names)


def test_every_column_of_the_live_table_is_documented():
    page = (DOCS / "running.md").read_text(encoding="utf-8")
    titles = [column.header for column in live_table([], {}, 0).columns]
    assert header_and_cells(page, "column of the live table") == [t for t in titles if t]


# ---- Singular forms --------------------------------------------------------------------------


def test_one_of_anything_is_singular(tmp_path):
    directory = experiments.write_experiment(tmp_path / "one")
    rows = [experiments.row(1, time__wall_clock_s=2.0, time__disturbed_fraction=0.5)]
    experiments.write_trial(directory, experiments.config(rounds=1), rows)
    words = " ".join(table(compare(read_experiment(directory).trials)).split())

    assert "colocated_k1, seed 0 (50% in 1 of 1 round). " in words
