"""Real trials that replace groups without a signal by drawing other training prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from conftest import trial_config, untimed

from grpo_trainable.storage.checkpointing import read_checkpoint

RESAMPLED = {"zero_advantage": "resample", "group_size": 2, "oversample": 16.0, "redraws": 32}
TWO_GENERATORS = {"num_generators": 2, "generator_cpus": 0.95}


def assert_same_checkpoint(ours: Path, theirs: Path) -> None:
    for part in ("policy", "optimizer", "buffer"):
        name = f"{part}-00001-of-00001.safetensors"
        assert (ours / name).read_bytes() == (theirs / name).read_bytes()
    assert read_checkpoint(ours).state["pipeline"] == read_checkpoint(theirs).state["pipeline"]


def assert_accounts_close(row: dict[str, Any]) -> None:
    parts = ("trained", "dropped", "waiting", "in_flight")
    assert row["count/requested"] == sum(row[f"count/{part}"] for part in parts)
    assert row["count/dropped"] == row["count/dropped_zero_advantage"]


def test_resampled_run_is_the_same_with_other_actors_and_after_a_restart(
    begun: Any, tmp_path: Path
) -> None:
    alone = begun(trial_config(placement="colocated", rollout=RESAMPLED))
    rows = [alone.step() for _ in range(2)]
    alone.save_checkpoint(str(tmp_path / "middle"))
    rows += [alone.step() for _ in range(2)]
    alone.save_checkpoint(str(tmp_path / "end"))
    for row in rows:
        assert_accounts_close(row)
        assert row["group/zero_advantage_fraction"] == 0
        assert row["group/drawn"] == 4 + row["group/resampled"]
    assert rows[-1]["count/trained"] == 16
    assert rows[-1]["count/short_batches"] == 0
    drawn = sum(row["group/drawn"] for row in rows)
    assert rows[-1]["count/requested"] == drawn > 16, "every group had signal by chance"
    assert rows[-1]["env_runners/num_episodes_lifetime"] == 2 * drawn

    resumed = begun(trial_config(rollout=RESAMPLED, resources=TWO_GENERATORS))
    resumed.restore(str(tmp_path / "middle"))
    again = [resumed.step() for _ in range(2)]
    assert [untimed(row) for row in again] == [untimed(row) for row in rows[2:]]
    resumed.save_checkpoint(str(tmp_path / "again"))
    assert_same_checkpoint(tmp_path / "again", tmp_path / "end")


def test_asynchronous_resampling_trains_full_batches_within_the_lag(begun: Any) -> None:
    running = begun(trial_config(lag=2, rollout=RESAMPLED, resources=TWO_GENERATORS, rounds=6))
    rows = [running.step() for _ in range(6)]
    for row in rows:
        assert_accounts_close(row)
        assert row["lag/max"] <= 2
        assert row["group/zero_advantage_fraction"] == 0
    assert rows[-1]["count/trained"] == 24
    assert rows[-1]["count/waiting"] == rows[-1]["count/in_flight"] == 0


def test_pools_draw_the_same_examples_with_other_actors_and_after_a_restart(
    begun: Any, tmp_path: Path
) -> None:
    words = ["cat", "dog", "sun", "tree", "house", "bird", "fish", "boat", "ball", "cake"]
    file = tmp_path / "words.txt"
    file.write_text("\n".join(words), encoding="utf-8")
    chosen = {
        "rollout": RESAMPLED,
        "pools": {"enabled": True, "easy": 1.0, "mid": 1.0, "hard": 1.0, "memory": 0.0},
        "task": {"match": "substring", "keywords_file": str(file)},
        "eval": {"prompts": 1},
    }
    alone = begun(trial_config(placement="colocated", **chosen))
    rows = [alone.step() for _ in range(2)]
    alone.save_checkpoint(str(tmp_path / "middle"))
    rows += [alone.step() for _ in range(2)]
    alone.save_checkpoint(str(tmp_path / "end"))
    examples = sum(rows[-1][f"pool/{name}_size"] for name in ("easy", "mid", "hard"))
    assert 0 < examples < len(words)  # some words are held out
    for row in rows:
        drawn = sum(row[f"pool/{name}_drawn"] for name in ("easy", "mid", "hard"))
        assert drawn == row["group/drawn"]
    assert rows[-1]["pool/new_size"] == 0
    assert any(row["pool/easy_drawn"] + row["pool/hard_drawn"] for row in rows)

    resumed = begun(trial_config(resources=TWO_GENERATORS, **chosen))
    resumed.restore(str(tmp_path / "middle"))
    again = [resumed.step() for _ in range(2)]
    assert [untimed(row) for row in again] == [untimed(row) for row in rows[2:]]
    resumed.save_checkpoint(str(tmp_path / "again"))
    assert_same_checkpoint(tmp_path / "again", tmp_path / "end")
