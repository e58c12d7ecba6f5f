"""A real trial on a mix of tasks, one of which is scored in separate processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
from conftest import trial_config, untimed, written_by_the_page

from grpo_trainable.protocol.round_records import SCHEMAS
from grpo_trainable.storage.checkpointing import read_checkpoint
from grpo_trainable.telemetry.metrics import names_with

LABELS = ("keyword", "Letters")


def test_mixed_run_resumes_bit_for_bit_and_tells_of_each_task(
    begun: Any, trainable: Any, tmp_path: Path
) -> None:
    letters = written_by_the_page("task.md", "my_task.py", tmp_path)
    mix = {"keyword": {"weight": 1, "match": "substring"}, f"{letters}:Letters": 3}
    config = trial_config(placement="colocated", eval={"every": 2, "prompts": 6})
    config["task"] = {"mix": mix}
    alone = begun(config)
    rows = [alone.step() for _ in range(2)]
    alone.save_checkpoint(str(tmp_path / "middle"))
    rows += [alone.train() for _ in range(2)]
    alone.save_checkpoint(str(tmp_path / "end"))
    for row in rows:
        assert (row["task/keyword/groups"], row["task/Letters/groups"]) == (1, 3)
        held_out = [row[f"eval/{label}/reward_mean"] for label in LABELS]
        assert abs(sum(held_out) / 2 - row["reward/eval_mean"]) < 1e-6
        trained = row["task/keyword/reward_mean"] + 3 * row["task/Letters/reward_mean"]
        assert abs(trained / 4 - row["reward/train_mean"]) < 1e-6
        assert 0 < row["task/Letters/reward_mean"] < 1, "a share of letters"
    table = pa.Table.from_pydict(rows[-1].details.rollouts, SCHEMAS["rollouts"]).to_pylist()
    assert [row["task"] for row in table].count("keyword") == 4
    for response in table:
        if response["task"] == "keyword":
            assert response["reward"] in (0, 1)

    resumed = trainable(config)
    resumed.restore(str(tmp_path / "middle"))
    again = [resumed.step() for _ in range(2)]
    names = names_with(LABELS)
    assert [untimed(row, names) for row in again] == [untimed(row, names) for row in rows[2:]]
    resumed.save_checkpoint(str(tmp_path / "again"))
    for part in ("policy", "optimizer"):
        name = f"{part}-00001-of-00001.safetensors"
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "end" / name).read_bytes()
    end, same = read_checkpoint(tmp_path / "end").state, read_checkpoint(tmp_path / "again").state
    assert end["pipeline"] == same["pipeline"]
