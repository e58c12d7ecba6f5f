"""Settings of an evaluation: a trial's settings or the defaults, with the user's changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fake_hub import FakeHub

from grpo_trainable.config import CHECKS, ConfigError, GRPOConfig
from grpo_trainable.tasks.input_files import InputChanged, input_digests
from grpo_trainable.tools.evaluation.checkpoint import TrainedPolicy
from grpo_trainable.tools.evaluation.settings import READ, evaluation_config, is_read, must_name


def trained(inputs: dict[str, str] | None = None, **sections: Any) -> TrainedPolicy:
    """Return the checkpoint of a trial with these settings."""
    config = GRPOConfig.from_dict(sections)
    return TrainedPolicy(
        directory=Path("/trial/checkpoint_000001"),
        config=config,
        inputs=input_digests(config) if inputs is None else inputs,
        tensors={},
        version=4,
        round=4,
    )


def settled(*assignments: str, of: TrainedPolicy | None = None, **options: Any) -> GRPOConfig:
    given = {f"--{name}": value for name, value in options.items()}
    return evaluation_config(of, assignments, given, "/here")


def refused(*assignments: str, of: TrainedPolicy | None = None, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        settled(*assignments, of=of, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_every_name_in_the_table_is_a_key_or_a_section():
    sections = {f"{key.partition('.')[0]}." for key in CHECKS}
    assert [name for name in READ if name not in CHECKS and name not in sections] == []


def test_an_evaluation_reads_the_eval_section_except_what_plans_a_trial():
    assert is_read("eval.prompts")
    assert not is_read("eval.every")
    assert not is_read("eval.final_prompts")


def test_without_anything_the_defaults_are_evaluated():
    assert settled() == GRPOConfig()


def test_options_stand_for_keys():
    config = settled(model="policy", prompts=3, samples=5, temperature=1.5, seed=9)
    assert config.model.path == "/here/policy"
    assert (config.eval.prompts, config.eval.samples, config.eval.temperature) == (3, 5, 1.5)
    assert config.seed == 9
    assert settled(task="keyword") == GRPOConfig()


def test_small_files_of_a_model_on_the_hub_are_fetched_first(tmp_path, monkeypatch):
    hub = FakeHub(tmp_path / "hub", monkeypatch)
    for name in ("org/name", "org/other"):
        hub.add(name, chat_template="{{ messages }}")
    assert settled("model.system=Be short.", model="org/name").model.chat_template == "on"
    settled(of=trained())
    assert hub.fetched == ["org/name"]
    adapters = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps({**adapters, "base_model_name_or_path": "org/other"}))
    assert settled(f"model.path={tmp_path}").model.chat_template == "on"
    assert hub.fetched == ["org/name", "org/other"]


def test_paths_mean_the_callers_directory():
    assert settled("task.keywords_file=words.txt").task.keywords_file == "/here/words.txt"


def test_temperature_zero_asks_for_one_response():
    assert settled(temperature=0.0).eval.samples == 1
    assert settled("eval.temperature=0").eval.samples == 1
    assert "eval.samples=2: must be 1" in refused(temperature=0.0, samples=2)


def test_a_nucleus_of_a_trial_is_left_out_at_temperature_zero():
    assert settled("eval.top_p=0.9").eval.top_p == 0.9
    of = trained(eval={"top_p": 0.9})
    assert settled(of=of).eval.top_p == 0.9
    assert settled(of=of, temperature=0.0).eval.top_p == 1.0
    assert "eval.top_p=0.9: has no effect with eval.temperature=0.0" in refused(
        "eval.top_p=0.9", temperature=0.0
    )


def test_a_trial_is_evaluated_with_its_own_settings():
    own = {"seed": 3, "task": {"match": "substring"}, "eval": {"prompts": 5, "samples": 4}}
    loss = {"type": "dapo", "clip_high": 0.3}
    config = settled(of=trained(**own, loss=loss))
    assert config == GRPOConfig.from_dict({**own, "loss": loss})
    assert settled("task.match=word", of=trained(**own), prompts=7).eval.prompts == 7
    final = trained(eval={"prompts": 5, "final_prompts": 6})
    assert settled(of=final, prompts=7).eval.final_prompts is None


def test_another_task_begins_with_its_own_defaults(tmp_path):
    (tmp_path / "other.py").write_text("class Other: ...\n")
    other = f"{tmp_path}/other.py:Other"
    config = settled(of=trained(task={"match": "substring"}), task=other)
    assert config.task.name == other
    assert config.task.match == "word"


@pytest.mark.parametrize(
    ("assignments", "text"),
    [
        (
            ["optim.lr=1"],
            "optim.lr=1: has no effect on an evaluation; it reads model.…, task.…",
        ),
        (["rollout.temperature=1"], "rollout.temperature=1: has no effect on an evaluation"),
        (["task.length_penalty=0.1"], "has no effect on an evaluation; only training reads it"),
        (["eval.prompt=1"], "did you mean eval.prompts?"),
        (["task.name=maths"], "task.name=maths: must be"),
        (["nothing"], "must be KEY=VALUE"),
        (["eval.samples=0"], "eval.samples=0: must be an integer >= 1"),
        (["task.train_file=t", "task.keywords_file=w"], "task.keywords_file="),
    ],
)
def test_what_an_evaluation_does_not_read_is_refused(assignments, text):
    assert text in refused(*assignments)


def test_an_option_and_an_assignment_may_agree_but_not_differ():
    assert settled("eval.samples=4", samples=4).eval.samples == 4
    assert refused("eval.samples=3", samples=4) == "--samples 4 contradicts --set eval.samples=3"


# ---- Input files of the trial ----------------------------------------------------------------


def test_a_word_list_that_has_changed_is_refused_unless_it_is_named(tmp_path):
    words = tmp_path / "words.txt"
    words.write_text("apple\nhen\n")
    trial = trained(task={"keywords_file": str(words)})
    assert settled(of=trial).task.keywords_file == str(words)
    words.write_text("apple\npear\n")
    with pytest.raises(InputChanged, match=r"words\.txt has .*add --set task\.keywords_file=FILE"):
        settled(of=trial)
    assert settled(f"task.keywords_file={words}", of=trial).task.keywords_file == str(words)


def test_a_directory_of_data_may_be_exchanged_for_another(tmp_path):
    trial = trained({"task.eval_file/state.json": "0" * 64}, task={"eval_file": "/gone"})
    assert settled("task.eval_file=/other", of=trial).task.eval_file == "/other"


def test_what_only_training_read_may_be_gone(tmp_path):
    loss = tmp_path / "my_loss.py"
    loss.write_text("def mine(): pass\n")
    trial = trained(loss={"type": f"{loss}:mine"})
    loss.unlink()
    assert settled(of=trial).loss.type == f"{loss}:mine"


def test_the_policy_that_the_trial_began_with_must_be_the_same():
    trial = trained(inputs={"model.path/tokenizer.json": "0" * 64})
    with pytest.raises(InputChanged, match=r"model\.path/tokenizer\.json.*start a new run$"):
        settled(of=trial)


# ---- Code ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "sections"),
    [
        ("task.reward", {"task": {"reward": "/x/evil.py:run"}}),
        ("task.name", {"task": {"name": "/x/evil.py:run"}}),
        ("engine", {"engine": "/x/evil.py:run"}),
    ],
)
def test_code_that_a_checkpoint_names_runs_only_where_the_user_names_it(key, sections):
    # The file does not exist, so an import of it would fail visibly.
    line = refused(of=trained(inputs={}, **sections))
    assert line.startswith(f"{key}=/x/evil.py:run: code or a judge that a checkpoint names")
    assert line.endswith(f"--set {key}=/x/evil.py:run")


def test_judge_that_a_checkpoint_names_gets_no_response_unless_the_user_names_it():
    # The file of a judge says where responses and an API key are sent.
    named = "judge:/x/evil.yaml"
    line = refused(of=trained(inputs={}, task={"reward": named}))
    assert line.endswith(f"is used only if you name it too: --set task.reward={named}")
    mix = json.dumps({"one": {"name": "keyword", "weight": 1, "reward": named}})
    line = refused(of=trained(inputs={}, task={"name": "mix", "mix": mix}))
    assert line.startswith("task.mix, one: code or a judge that a checkpoint names is used only")


def test_a_function_in_a_list_of_rewards_must_be_named_too():
    listed = '["model:/x/rm", "/x/evil.py:run"]'
    line = refused(of=trained(inputs={}, task={"reward": listed}))
    assert line.startswith("task.reward=")
    assert "code or a judge that a checkpoint names" in line
    assert line.endswith(f"--set 'task.reward={listed}'")
    for reward in ("/x/evil.py:run", ["model:/x/rm", "/x/evil.py:run"]):
        mix = {"keyword": 1, "hard": {"name": "keyword", "weight": 1, "reward": reward}}
        line = refused(of=trained(inputs={}, task={"name": "mix", "mix": mix}))
        assert line.startswith("task.mix, hard: code or a judge that a checkpoint names")


def test_the_code_that_must_be_named_is_named_for_the_user(tmp_path):
    (tmp_path / "mine.py").write_text("def score(response, truth): return 1.0\n")
    mine = f"{tmp_path}/mine.py:score"
    mix = json.dumps({"one": {"name": "keyword", "weight": 1, "reward": mine}})
    for sections in (
        {"task": {"reward": mine}},
        {"task": {"name": "mix", "mix": mix}},
        {"env": {"name": "python", "allow_unsafe": True}},
    ):
        trial = trained(**sections)
        refused(of=trial)
        named = must_name(trial.config.to_dict())
        assert must_name(settled(*named.values(), of=trial).to_dict()).keys() == named.keys()
    assert must_name(GRPOConfig().to_dict()) == {}


def test_a_reward_model_may_be_exchanged_but_not_changed(tmp_path):
    for directory in (tmp_path / "one", tmp_path / "two"):
        directory.mkdir()
        for name in ("config.json", "tokenizer.json", "model.safetensors"):
            (directory / name).write_text(directory.name)
    trial = trained(task={"reward": f"model:{tmp_path}/one"})
    assert settled(of=trial).task.reward == f"model:{tmp_path}/one"
    other = f"task.reward=model:{tmp_path}/two"
    assert settled(other, of=trial).task.reward == f"model:{tmp_path}/two"
    (tmp_path / "one" / "config.json").write_text("changed")
    with pytest.raises(InputChanged, match=r"task\.reward/config\.json"):
        settled(of=trial)


def test_code_of_a_setting_of_a_task_must_be_named_too(tmp_path):
    (tmp_path / "judged.py").write_text(
        "from dataclasses import dataclass\n"
        "from grpo_trainable.config import reference\n"
        "class Judged:\n"
        "    @dataclass(frozen=True, kw_only=True)\n"
        "    class Settings:\n"
        "        judge: str | None = reference(None, 'A judge.', what='function')\n"
    )
    name = f"{tmp_path}/judged.py:Judged"
    trial = trained(inputs={}, task={"name": name, "judge": "/x/evil.py:run"})
    assert refused(f"task.name={name}", of=trial).startswith("task.judge=/x/evil.py:run: code")


def test_code_that_the_user_names_must_be_what_the_trial_ran(tmp_path):
    reward = tmp_path / "my_rewards.py"
    reward.write_text("def score(response, truth): return 1.0\n")
    trial = trained(task={"reward": f"{reward}:score"})
    named = f"task.reward={reward}:score"
    assert settled(named, of=trial).task.reward == f"{reward}:score"
    reward.write_text("def score(response, truth): return 0.0\n")
    with pytest.raises(
        InputChanged,
        match=r"^task\.reward: .* to another name, and evaluate with --set task\.reward=",
    ):
        settled(named, of=trial)
    other = tmp_path / "other.py"
    other.write_text(reward.read_text())
    assert settled(f"task.reward={other}:score", of=trial).task.reward == f"{other}:score"


def test_a_checkpoint_does_not_let_code_run_uncontained():
    trial = trained(env={"name": "python", "allow_unsafe": True})
    assert refused(of=trial).startswith(
        "env.allow_unsafe=true: a checkpoint's setting is not enough"
    )
    assert settled("env.allow_unsafe=true", of=trial).env.allow_unsafe
    assert not settled("env.allow_unsafe=false", of=trial).env.allow_unsafe


def test_a_trial_without_code_of_its_own_names_none():
    assert settled("task.reward=none", of=trained(task={"match": "word"})).task.reward is None


def test_another_reward_takes_the_place_of_the_trials(tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text("def score(response, truth): return 1.0\n")
    trial = trained(inputs={}, task={"reward": "/x/evil.py:run"})
    assert settled(f"task.reward={mine}:score", of=trial).task.reward == f"{mine}:score"
