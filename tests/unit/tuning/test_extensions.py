"""Extensions of an experiment: the trials that they add, and the extensions that are rejected."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import experiments
import pytest
import ray

from grpo_trainable.command_line import UsageError
from launch import tune
from reports import EXPERIMENT_FILE
from reports.experiment import read_experiment
from tuning.directories import held
from tuning.plan import Plan

BASE, OTHER, THIRD = "colocated_k1", "sync", "async_k1"
Extend = Callable[..., Plan]


@pytest.fixture
def planned(tmp_path, monkeypatch) -> Extend:
    """Return a function that plans an experiment, its extension or its resume."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ray, "init", lambda *_, **__: pytest.fail("the command has started Ray"))

    def plan(*argv: str) -> Plan:
        where = ("--name", "mine", "--storage", str(tmp_path / "storage"))
        made = tune.plan_of(tune.parse_arguments([*argv, *where]))
        made.check()
        made.prepare_directory()
        return made

    return plan


def start(planned: Extend, *argv: str, arm: str = BASE) -> Plan:
    return planned("--space", "async_vs_sync", "--set", f"arm={arm}", "--iterations", "5", *argv)


def finish(plan: Plan, leave_out: int = 0) -> None:
    """Write the files of the trials as Tune would, except for the last `leave_out` trials."""
    plan.run_directory.mkdir(parents=True, exist_ok=True)
    (plan.run_directory / "tuner.pkl").touch()
    for trial in plan.trials[: len(plan.trials) - leave_out]:
        rows = [experiments.row(n, eval__round=5.0) for n in range(1, 6)]
        rows[-1]["done"] = True
        experiments.write_trial(Path(str(plan.run_directory)), trial.to_dict(), rows)


def pairs(plan: Plan) -> list[tuple[str, int]]:
    return [(trial.arm, trial.seed) for trial in plan.trials]


def stored(plan: Plan) -> dict:
    return json.loads((plan.directory / EXPERIMENT_FILE).read_text())


def refused(planned: Extend, capsys, *argv: str) -> str:
    """Return the error of a rejected extension, which must be one line."""
    where = ("--name", "mine", "--storage", "storage")
    assert tune.main(["--extend", *argv, *where]) == 2
    output, error = capsys.readouterr()
    assert (output, error.count("\n")) == ("", 1)
    return error


def test_two_seeds_extended_to_four_have_the_trials_of_four_from_the_start(planned):
    first = start(planned, "--num-samples", "2")
    finish(first)
    extension = planned("--extend", "--num-samples", "4")
    shutil.rmtree(first.directory)
    whole = start(planned, "--num-samples", "4")

    assert pairs(extension) == [(BASE, 2), (BASE, 3)]
    assert first.trials + extension.trials == whole.trials
    assert extension.run_directory == first.directory / "extensions" / "1"


def test_every_run_is_read_as_one_experiment_and_the_report_knows_when_seeds_came(planned):
    finish(start(planned))
    before = stored(start_of := planned("--resume"))
    extension = planned("--extend", "--num-samples", "3")
    finish(extension, leave_out=1)
    record = read_experiment(start_of.directory)

    assert [(t.arm, t.config.seed, t.path[:-1]) for t in record.trials] == [
        (BASE, 0, ()),
        (BASE, 1, ("extensions", "1")),
    ]
    assert record.not_begun == [(BASE, 2)]
    assert [own.planned for own in record.extensions] == [[(BASE, 1), (BASE, 2)]]
    assert record.seeds_before_addition == 1
    assert record.problems == []
    assert record.extensions[0].started == stored(extension)["extensions"][0]["started"]
    kept = stored(extension)
    assert {key: kept[key] for key in before.keys() - {"num_samples"}} == {
        key: before[key] for key in before.keys() - {"num_samples"}
    }


def test_a_resume_continues_the_last_extension_and_a_further_one_gets_its_own_directory(planned):
    finish(start(planned))
    finish(planned("--extend", "--num-samples", "2"))
    resumed = planned("--resume")
    assert (pairs(resumed), resumed.run_directory.name) == ([(BASE, 1)], "1")
    assert resumed.has_state

    third = planned("--extend", "--num-samples", "3")
    assert (pairs(third), third.run_directory.name, third.has_state) == ([(BASE, 2)], "2", False)
    resumed = planned("--resume")
    assert (pairs(resumed), resumed.run_directory.name) == ([(BASE, 2)], "2")
    # The command that started the experiment may be repeated.
    assert pairs(planned("--resume", "auto", "--num-samples", "1")) == [(BASE, 2)]


@pytest.mark.parametrize(
    "argv",
    [("--arm", OTHER, THIRD), ("--arm", f"{OTHER},{THIRD}"), ("--arm", OTHER, "--arm", THIRD)],
)
def test_several_arms_can_be_added_in_each_usual_form(planned, argv):
    finish(start(planned))
    assert sorted(pairs(planned("--extend", *argv))) == sorted([(OTHER, 0), (THIRD, 0)])


def test_an_added_arm_gets_every_seed_and_the_settings_of_the_experiment(planned):
    finish(start(planned, "--num-samples", "2", "--set", "optim.lr=2e-4"))
    extension = planned("--extend", "--arm", OTHER)
    assert sorted(pairs(extension)) == [(OTHER, 0), (OTHER, 1)]
    assert {(trial.optim.lr, trial.rounds) for trial in extension.trials} == {(2e-4, 5)}
    assert read_experiment(extension.directory).seeds_before_addition == 0

    finish(extension)
    both = planned("--extend", "--arm", THIRD, "--num-samples", "3")
    new = [(BASE, 2), (OTHER, 2), *((THIRD, seed) for seed in range(3))]
    assert sorted(pairs(both)) == sorted(new)
    assert len(both.grid) == 9
    assert sorted(pairs(planned("--resume"))) == sorted(new)


def test_an_arm_that_changes_the_other_arms_is_refused_by_the_setting(planned, capsys):
    # 1024 responses are 16 rounds of 64, with an evaluation every 3 rounds. Beside an arm whose
    # rounds have 512 responses, there would be an evaluation every 8 rounds.
    argv = ("--space", "async_vs_sync", "--set", f"arm={BASE}", "--samples", "1024")
    first = planned(*argv)
    rows = [experiments.row(n) for n in range(1, first.trials[0].rounds + 1)]
    rows[-1]["done"] = True
    experiments.write_trial(Path(str(first.directory)), first.trials[0].to_dict(), rows)

    error = refused(planned, capsys, "--arm", "colocated_k8")
    assert "--arm colocated_k8: would change eval.every of arm colocated_k1 from" in error


def test_what_cannot_be_extended_is_refused_in_one_line(planned, capsys):
    assert "no experiment mine in" in refused(planned, capsys, "--num-samples", "2")
    first = start(planned, "--num-samples", "2")
    finish(first, leave_out=1)
    error = refused(planned, capsys, "--num-samples", "4")
    assert (
        "1 trial of experiment mine must end first, such as colocated_k1/1 (not started)" in error
    )
    assert "--resume --name mine" in error

    shutil.rmtree(next(first.directory.glob("*-0-*")))
    finish(first)
    with held(first.directory):
        error = refused(planned, capsys, "--num-samples", "4")
        assert "--extend: another command is running experiment mine" in error
    before = (first.directory / EXPERIMENT_FILE).read_bytes()
    assert "nothing to add" in refused(planned, capsys)
    assert "nothing to add" in refused(planned, capsys, "--arm", BASE)
    assert "did you mean sync?" in refused(planned, capsys, "--arm", "synk")
    assert "--resume" in refused(planned, capsys, "--resume", "--num-samples", "4")
    error = refused(planned, capsys, "--set", "optim.lr=1e-3", "--num-samples", "4")
    assert "optim.lr was not fixed" in error
    assert "needs --until-decided" in refused(
        *(planned, capsys, "--budget", "2h", "--num-samples", "4")
    )
    assert (first.directory / EXPERIMENT_FILE).read_bytes() == before
    assert tune.main(["--space", "async_vs_sync", "--arm", OTHER]) == 2
    assert "--arm needs --extend" in capsys.readouterr().err


def test_two_commands_do_not_extend_the_same_experiment(planned):
    finish(start(planned))
    argv = ("--extend", "--name", "mine", "--storage", "storage", "--num-samples")
    first, second = (tune.plan_of(tune.parse_arguments([*argv, n])) for n in ("2", "3"))
    first.prepare_directory()
    before = stored(first)
    with pytest.raises(UsageError, match="another command has changed experiment mine"):
        second.prepare_directory()
    assert stored(first) == before


@pytest.mark.parametrize("scheduler", ["asha", "pbt"])
def test_trials_that_a_scheduler_compared_get_no_others(planned, capsys, scheduler):
    first = start(planned)
    changed = {**stored(first), "scheduler": scheduler}
    (first.directory / EXPERIMENT_FILE).write_text(json.dumps(changed))
    error = refused(planned, capsys, "--num-samples", "2")
    assert f"--scheduler {scheduler} compared the trials of experiment mine" in error


def test_a_resume_refuses_an_extension_whose_state_others_can_write(planned, capsys):
    finish(start(planned))
    extension = planned("--extend", "--num-samples", "2")
    finish(extension, leave_out=1)
    state = Path(str(extension.run_directory)) / "tuner.pkl"
    state.chmod(0o666)
    assert tune.main(["--resume", "--name", "mine", "--storage", "storage"]) == 2
    assert f"{state} can be written by others" in capsys.readouterr().err


def test_a_changed_input_file_is_refused_by_name(planned, capsys, tmp_path):
    words = ["apple", "pear", "stone", "river", "cloud", "horse", "lamp", "tower", "coat", "wheel"]
    (tmp_path / "words.txt").write_text("\n".join(words) + "\n")
    finish(start(planned, "--set", "task.keywords_file=words.txt"))
    (tmp_path / "words.txt").write_text("\n".join(words[1:]) + "\n")

    error = refused(planned, capsys, "--num-samples", "2")
    assert "--extend: task.keywords_file" in error


def test_an_extension_that_no_cluster_can_run_leaves_the_experiment_as_it_was(planned):
    first = start(planned)
    finish(first)
    before = stored(first)
    extension = planned("--extend", "--num-samples", "2")
    assert stored(extension) != before
    extension.withdraw()
    assert stored(first) == before


def test_a_link_in_the_place_of_an_extension_is_not_followed(planned, tmp_path):
    first = start(planned)
    finish(first)
    finish(planned("--extend", "--num-samples", "2"))
    (first.directory / "extensions").rename(tmp_path / "elsewhere")
    (first.directory / "extensions").symlink_to(tmp_path / "elsewhere")
    record = read_experiment(first.directory)

    assert len(record.trials) == 1
    assert "mine/extensions is a link; not followed" in record.problems
    assert "extensions/1 cannot be read (extensions is a link)" in record.problems


@pytest.mark.parametrize("extensions", [1, {"a": 1}, [1], [{"planned": [["sync", "0"]]}]])
def test_extensions_that_cannot_be_used_are_named(planned, extensions):
    first = start(planned)
    finish(first)
    changed = {**stored(first), "extensions": extensions}
    (first.directory / EXPERIMENT_FILE).write_text(json.dumps(changed))
    (problem,) = read_experiment(first.directory).problems
    assert problem.startswith("experiment.json: extensions: ")
