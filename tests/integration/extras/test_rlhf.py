"""The page docs/howto/rlhf.md, executed with fewer prompts, steps and rounds."""

from __future__ import annotations

import json

import pytest
from rlhf import STAGES, walk

pytest.importorskip("trl", reason="needs the extra align")
pytest.importorskip("matplotlib", reason="needs the extra report")

SHORT = {
    "--prompts all": "--prompts 24",
    "num_train_epochs=2": "max_steps=4",
    "rounds=30": "rounds=2",
    "eval.every=5": "eval.every=1 --set eval.prompts=8 --set rollout.prompts=2",
}


def test_the_walk_measures_every_policy_and_an_interrupted_walk_repeats_one_stage(tmp_path):
    seconds = walk(tmp_path, changes=SHORT)
    found = json.loads((tmp_path / "walk.json").read_text())
    print(seconds, found)
