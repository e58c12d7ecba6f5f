"""The page docs/howto/rlhf.md, executed with fewer prompts, steps, rounds and policies."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from walk import walk

pytest.importorskip("trl", reason="needs the extra align")
pytest.importorskip("matplotlib", reason="needs the extra report")

SHORT = {
    "--prompts all": "--prompts 12",
    "num_train_epochs=1": "max_steps=2",
    "rounds=30": "rounds=2",
    "eval.every=5": "eval.every=2 --set eval.prompts=4 --set rollout.prompts=2",
    # `free` differs from `grpo` only in its settings.
    "python launch/tune.py --preset grpo --name free": "true",
    "ppo grpo free; do": "ppo grpo; do",
    '"grpo", "free")': '"grpo")',
    # Commands that do not need each other's output run at the same time.
    "--out sft_stories\n": "--out sft_stories &\n",
    "--out heldout_stories\n": "--out heldout_stories; wait\n",
    "batch_size=16\npython launch/align.py dpo": "batch_size=16 &\npython launch/align.py dpo",
    "batch_size=16\n```": "batch_size=16; wait\n```",
    "eval.temperature=1\ndone": "eval.temperature=1 &\ndone; wait",
    "policies/$arm\ndone": "policies/$arm &\ndone; wait",
    "measured/sft)\ndone": "measured/sft) &\n    [ $policy != sft ] || wait\ndone; wait",
}


def test_the_walk_measures_every_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    walk(tmp_path, changes=SHORT)
    found = json.loads((tmp_path / "walk.json").read_text())
    assert list(found["policies"]) == ["sft", "dpo", "ppo", "grpo"]
    sft, *others = found["policies"].values()
    assert abs(sft["kl_nats"]) < 1e-6
    for own in others:
        assert own["kl_nats"] > 0
        assert own["gain"]["value"] == pytest.approx(own["preference"] - sft["preference"])
        assert own["gain"]["low"] <= own["gain"]["value"] <= own["gain"]["high"]
    for curve in found["curves"].values():
        assert [number for number, *_ in curve] == [0, 2]
    report = (tmp_path / "walk.md").read_text()
    assert [line.split()[1] for line in report.splitlines()[-4:]] == list(found["policies"])
    assert (tmp_path / "walk.svg").read_text().startswith("<?xml")
