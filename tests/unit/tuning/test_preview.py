"""A dry run shows the differences between trials in one line each, and everything else once."""

from __future__ import annotations

from grpo_trainable.config import GRPOConfig, flatten, resources
from tuning.preview import (
    CPUS,
    MOST_CHARACTERS,
    WIDTH,
    example_lines,
    in_short,
    preview,
    shortened,
    shown,
    wrapped,
)


def trials(*settings: dict) -> list[GRPOConfig]:
    return [GRPOConfig.from_dict({"arm": f"arm{i}", **one}) for i, one in enumerate(settings)]


def test_keys_in_which_trials_differ_are_columns_and_the_others_stand_below():
    text = preview(
        trials({"seed": 3, "optim": {"lr": 1e-3}, "rounds": 8}, {"k": 2, "rounds": 8, "seed": 3})
    )
    table, chosen, defaults = text.split("\n\n")
    assert table.splitlines() == [
        "arm   seed  k  optim.lr",
        "arm0     3  1     0.001",
        "arm1     3  2    0.0003",
    ]
    assert chosen == "the same in every trial:\n  rounds=8"
    assert defaults.startswith("left at their defaults in every trial:\n  placement=colocated")
    assert max(map(len, text.splitlines())) <= WIDTH


def test_numbers_of_cpus_in_the_table_are_explained_as_cores():
    one = {"placement": "colocated"}
    both = trials(one, {**one, "resources": {"worker_cpus": 1.9}})
    assert preview(both).split("\n\n")[0].splitlines()[-1] == CPUS
    assert CPUS not in preview(trials(one))
    assert [resources.threads(cpus) for cpus in (0.95, 1.9)] == [1, 2]
    assert resources.bundles(both[0])[0] == {"CPU": 0.1}


def test_every_setting_that_a_trial_reads_is_there_once():
    both = trials({"task": {"name": "my:Task", "size": 3}}, {"k": 2})
    text = preview(both)
    words = [word.split("=")[0] for word in text.split()]
    for trial in both:
        for key in flatten(trial.to_dict()):
            assert words.count(key) == 1 or not trial.reads(key), key
    assert "critic.clip" not in words  # neither trial has a critic
    header, first, second = (line.split() for line in text.splitlines()[:3])
    rows = [dict(zip(header, row, strict=True)) for row in (first, second)]
    assert [row["task.size"] for row in rows] == ["3", "-"]
    assert [row["task.match"] for row in rows] == ["-", "word"]


def test_what_follows_from_other_settings_is_shown_as_a_number():
    dapo = {"loss": {"type": "dapo"}}
    table, *_ = preview(trials({}, dapo)).split("\n\n")
    assert table.splitlines()[0].split() == ["arm", "seed", "loss.type", "loss.clip_high"]
    assert [line.split()[-1] for line in table.splitlines()[1:]] == ["0.2", "0.28"]
    critic = {"loss": {"advantage": "gae"}, "rollout": {"overlong": "penalty"}}
    _, chosen, defaults = preview(trials(critic)).split("\n\n")
    assert chosen.split()[-2:] == ["rollout.overlong=penalty", "loss.advantage=gae"]
    assert {"critic.lr=0.0015", "rollout.overlong_buffer=12"} <= set(defaults.split())


def test_defaults_of_a_model_stand_apart_with_their_reasons(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    model = {"path": str(tmp_path)}
    text = preview(trials({"model": model, "rounds": 20}, {"model": model, "rounds": 40}))
    table, chosen, of_model, defaults = text.split("\n\n")
    assert table.splitlines()[0].split() == ["arm", "seed", "rounds", "optim.warmup_rounds"]
    assert chosen == f"the same in every trial:\n  model.path={tmp_path}"
    assert of_model.splitlines() == [
        "defaults that follow from the model or the device:",
        "  model.chat_template=on (the model has a chat template)",
        "  model.packing=true (packing is tested with this kind of model)",
        "  optim.lr=5e-06 (all weights of a Hugging Face model)",
        "  optim.warmup_rounds (early AdamW steps can easily damage a pretrained model)",
        "  callbacks.kl_band=[0.0,12.0] (0.2 nats for each of rollout.max_new_tokens tokens)",
    ]
    assert "optim.betas=[0.9,0.95]" in defaults
    assert "optim.lr" not in defaults


def test_in_short_it_says_how_many_trials_differ_in_what():
    assert in_short(trials({"seed": 3})) == "1 trial: arm arm0, seed 3"
    assert in_short(trials({}, {"k": 2, "optim": {"lr": 1e-3}})) == (
        "2 trials, which differ in arm, k, optim.lr"
    )
    grid = [
        GRPOConfig.from_dict({"arm": arm, "seed": seed, "k": k})
        for arm, k in (("one", 1), ("two", 2))
        for seed in (0, 1, 2)
    ]
    assert in_short(grid) == "6 trials (2 arms × 3 seeds), which differ in arm, seed, k"


def test_values_are_written_as_set_takes_them():
    values = (None, True, 2e-4, (0.9, 0.95), "words.txt")
    assert [shown(v) for v in values] == ["none", "true", "0.0002", "[0.9,0.95]", "words.txt"]


def test_an_item_is_never_broken():
    long = "x" * (WIDTH + 1)
    assert list(wrapped(["a=1", "b=2", long, "c=3"])) == ["  a=1  b=2", f"  {long}", "  c=3"]


def test_the_defaults_of_a_task_are_defaults():
    text = preview(trials({"task": {"name": "math"}, "optim": {"betas": [0.9, 0.99]}}))
    _, chosen, defaults = text.split("\n\n")
    assert "task.name=math" in chosen
    assert "optim.betas=[0.9,0.99]" in chosen
    for setting in ("model.preset=arithmetic", "rollout.temperature=1.0", "optim.weight_decay=0.0"):
        assert setting in defaults


def test_a_prompt_is_shown_as_the_model_reads_it_with_its_true_answer(tmp_path):
    file = tmp_path / "sums.jsonl"
    file.write_text('{"question": "1 + 1?", "answer": "#### 2"}\n')
    (tmp_path / "mine.txt").write_text("Sum:\n{question}\n\n")
    task = {"name": "math", "train_file": str(file), "eval_file": str(file)}
    task |= {"equality": "exact", "template": str(tmp_path / "mine.txt")}
    (trial,) = trials({"task": task})
    assert list(example_lines(trial)) == [
        "\nthe first prompt of arm arm0, as the model reads it:",
        "  | Sum:",
        "  | 1 + 1?",
        "  | ",  # the last line break is visible
        "its ground truth: 2",
    ]


def test_of_a_long_prompt_both_ends_are_shown():
    assert shortened("x" * MOST_CHARACTERS) == "x" * MOST_CHARACTERS
    text = "a" * MOST_CHARACTERS + "b" * MOST_CHARACTERS
    half = MOST_CHARACTERS // 2
    assert shortened(text) == f"{'a' * half} [… {MOST_CHARACTERS:,} characters …] {'b' * half}"
