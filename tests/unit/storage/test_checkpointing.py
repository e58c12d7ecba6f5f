"""A checkpoint counts only if it is complete. Otherwise, the error names the faulty file."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import write_checkpoint
from write_points import killed_at

from grpo_trainable.protocol.rollout import RolloutGroup
from grpo_trainable.storage import checkpointing
from grpo_trainable.storage.checkpointing import (
    FORMAT_VERSION,
    MANIFEST,
    STATE,
    CheckpointError,
    DamagedCheckpoint,
    TrialState,
    begun,
    finish_checkpoint,
    learner_messages,
    newest_whole,
    part_file,
    read_checkpoint,
    refuse_foreign_files,
    remove_older,
    write_learner_files,
    write_messages,
)

FILES = (MANIFEST, STATE, *(part_file(part) for part in ("policy", "optimizer", "buffer")))

OURS = {"format_version": FORMAT_VERSION, "world_size": 1}


def group(prompt_index: int) -> RolloutGroup:
    """Return two responses with a hole in a mask and tokens of two versions."""
    mask = torch.tensor([[True, False, True], [True, True, False]])
    return RolloutGroup(
        prompt_index=prompt_index,
        prompt_ids=torch.tensor([5, 6, 7]),
        response_ids=torch.tensor([[1, 2, 3], [4, 5, 0]]),
        response_mask=mask,
        behaviour_log_probs=torch.tensor([[-0.1, 0.0, -0.3], [-1e-30, -5.0, 0.0]]),
        rewards=torch.tensor([0.1, 1 / 3]),
        finished=torch.tensor([True, False]),
        token_versions=torch.tensor([[3, 0, 4], [3, 4, 0]], dtype=torch.int32),
        token_rounds=torch.tensor([[1, 0, 2], [1, 2, 0]], dtype=torch.int32),
        reference_log_probs=torch.tensor([[-0.2, 0.0, -9.0], [-1.0, -2.0, 0.0]]),
        uses=prompt_index % 2,
    )


def trial(seed: int = 0) -> TrialState:
    rng = torch.Generator().manual_seed(seed)
    weights = {name: torch.randn(3, 2, generator=rng) for name in ("a.weight", "b.weight")}
    return TrialState(
        state={
            "learner": {"version": seed},
            "pipeline": {"learner_round": seed},
            "config": {"lag": 1},
        },
        policy=weights,
        optimizer={"a.weight/step": torch.tensor(7.0), "a.weight/exp_avg": weights["a.weight"].t()},
        groups=[group(4), replace(group(9), reference_log_probs=None)],
    )


def assert_equal(ours: TrialState, theirs: TrialState) -> None:
    assert ours.state == theirs.state
    for a, b in ((ours.policy, theirs.policy), (ours.optimizer, theirs.optimizer)):
        assert a.keys() == b.keys()
        assert all(a[name].equal(b[name]) and a[name].dtype == b[name].dtype for name in a)
    assert len(ours.groups) == len(theirs.groups)
    for x, y in zip(ours.groups, theirs.groups, strict=True):
        for name in RolloutGroup.__dataclass_fields__:
            left, right = getattr(x, name), getattr(y, name)
            if isinstance(right, torch.Tensor):
                assert left.equal(right), name
                assert left.dtype == right.dtype, name
            else:
                assert left == right, name


def test_groups_without_log_probs_or_values_take_no_entries_for_them(tmp_path: Path) -> None:
    plain = replace(trial(), groups=[replace(group(4), reference_log_probs=None)])
    write_checkpoint(tmp_path, plain)
    state = json.loads((tmp_path / "state.json").read_text())
    assert not {"reference_log_probs", "state_values"} & state["buffer"][0].keys()
    assert_equal(read_checkpoint(tmp_path), plain)


def test_values_of_states_are_stored_with_their_gaps(tmp_path: Path) -> None:
    values = torch.tensor([[0.5, torch.nan], [0.5, 0.25]])
    valued = replace(group(4), state_values=values)
    write_checkpoint(tmp_path, replace(trial(), groups=[valued]))
    (found,) = read_checkpoint(tmp_path).groups
    assert found.state_values.nan_to_num(-1).tolist() == [[0.5, -1], [0.5, 0.25]]


def test_what_was_written_is_read_back_bit_for_bit(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "new" / "directory", trial())
    assert_equal(read_checkpoint(tmp_path / "new" / "directory"), trial())


def test_checkpoint_without_groups_or_optimizer_state(tmp_path: Path) -> None:
    first = replace(trial(), groups=[], optimizer={})
    write_checkpoint(tmp_path, first)
    assert_equal(read_checkpoint(tmp_path), first)


def test_live_parameters_and_shared_storage_are_stored_by_value(tmp_path: Path) -> None:
    storage = torch.arange(6.0)
    parameter = torch.nn.Parameter(storage[:3])
    write_checkpoint(
        tmp_path, replace(trial(), policy={"a": parameter, "b": storage[3:], "c": storage[::2]})
    )
    policy = read_checkpoint(tmp_path).policy
    assert policy["a"].tolist() == [0, 1, 2]
    assert policy["b"].tolist() == [3, 4, 5]
    assert policy["c"].tolist() == [0, 2, 4]


def test_directory_holds_safetensors_and_json_and_no_pickle(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, trial())
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(FILES)
    for path in tmp_path.iterdir():
        content = path.read_bytes()
        if path.suffix == ".json":
            json.loads(content)
        else:
            header = int.from_bytes(content[:8], "little")
            json.loads(content[8 : 8 + header])
    manifest = json.loads((tmp_path / MANIFEST).read_text())
    assert manifest["format_version"] == FORMAT_VERSION
    assert manifest["world_size"] == 1
    assert sorted(manifest["files"]) == sorted(FILES[1:])


def test_numbers_that_are_not_json_are_refused_and_leave_no_checkpoint(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, trial())
    with pytest.raises(ValueError, match="JSON compliant"):
        write_checkpoint(tmp_path, replace(trial(1), state={"mean": float("nan")}))
    with pytest.raises(DamagedCheckpoint, match=MANIFEST):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize("name", FILES)
def test_missing_file_is_named(tmp_path: Path, name: str) -> None:
    write_checkpoint(tmp_path, trial())
    (tmp_path / name).unlink()
    with pytest.raises(DamagedCheckpoint, match=f"{name}: is missing"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize("name", FILES)
def test_directory_in_place_of_a_file_is_damage(tmp_path: Path, name: str) -> None:
    write_checkpoint(tmp_path, trial())
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    with pytest.raises(DamagedCheckpoint, match=rf"{name}: damaged \(Is a directory\)"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize("name", FILES)
def test_truncated_file_is_named(tmp_path: Path, name: str) -> None:
    write_checkpoint(tmp_path, trial())
    content = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match=f"{name}: (damaged|not JSON)"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize("name", FILES[1:])
def test_flipped_bit_is_named(tmp_path: Path, name: str) -> None:
    write_checkpoint(tmp_path, trial())
    content = bytearray((tmp_path / name).read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{name}: damaged"):
        read_checkpoint(tmp_path)


@pytest.mark.slow
def test_no_flipped_bit_of_the_manifest_passes(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, trial())
    content = (tmp_path / MANIFEST).read_bytes()
    for place in range(len(content)):
        flipped = bytearray(content)
        flipped[place] ^= 1 << place % 8
        (tmp_path / MANIFEST).write_bytes(flipped)
        try:
            read = read_checkpoint(tmp_path)
        except CheckpointError:
            continue
        # With different white space, the manifest is still the same.
        assert json.loads(flipped) == json.loads(content)
        assert_equal(read, trial())


@pytest.mark.parametrize("name", FILES)
def test_file_that_is_a_link_is_refused(tmp_path: Path, name: str) -> None:
    write_checkpoint(tmp_path / "checkpoint", trial())
    inside, outside = tmp_path / "checkpoint" / name, tmp_path / "outside"
    shutil.move(inside, outside)
    inside.symlink_to(outside)
    with pytest.raises(CheckpointError, match=f"{name}: cannot be read"):
        read_checkpoint(tmp_path / "checkpoint")


def test_directory_that_is_a_link_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "elsewhere", trial())
    (tmp_path / "checkpoint").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="checkpoint: is a link"):
        read_checkpoint(tmp_path / "checkpoint")


@pytest.mark.parametrize(
    ("manifest", "reason"),
    [
        ([], "not a JSON object"),
        ({}, "format version None"),
        (
            {"format_version": 99, "shards": 4},
            "format version 99, but this program reads version 5",
        ),
        (
            {"format_version": FORMAT_VERSION, "world_size": 0},
            "states an invalid number of learners, 0",
        ),
        (
            {"format_version": FORMAT_VERSION, "world_size": "2"},
            "states an invalid number of learners, 2",
        ),
        ({**OURS, "world_size": 2, "files": {}}, "does not list .*optimizer-00002-of-00002"),
        (OURS, "does not list"),
        ({**OURS, "files": {"model.bin": "00"}}, "does not list"),
        ({**OURS, "files": {"../state.json": "00"}}, "does not list"),
    ],
)
def test_foreign_directory_is_refused(tmp_path: Path, manifest: Any, reason: str) -> None:
    (tmp_path / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=f"{MANIFEST}: {reason}"):
        read_checkpoint(tmp_path)


def test_no_directory_and_no_text_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=MANIFEST):
        read_checkpoint(tmp_path / "nowhere")
    (tmp_path / MANIFEST).write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CheckpointError, match=f"{MANIFEST}: not JSON"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize("fails_at", range(1, len(FILES) + 1))
def test_rewriting_that_is_interrupted_never_passes_for_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    write_checkpoint(tmp_path, trial(0))
    renamed = 0
    rename = os.replace

    def interrupted(source: Any, target: Any, **directories: Any) -> None:
        nonlocal renamed
        renamed += 1
        if renamed == fails_at:
            raise OSError(28, "No space left on device")
        rename(source, target, **directories)

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(OSError, match="No space left"):
        write_checkpoint(tmp_path, trial(1))
    with pytest.raises(CheckpointError, match=MANIFEST):
        read_checkpoint(tmp_path)
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]

    monkeypatch.setattr(os, "replace", rename)
    write_checkpoint(tmp_path, trial(1))
    assert_equal(read_checkpoint(tmp_path), trial(1))


@pytest.mark.slow
def test_killed_at_any_point_of_writing_it_is_whole_or_not_there(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "checkpoint_000000", trial(0))
    event, outcomes = 0, []
    while True:
        event += 1
        directory = tmp_path / "checkpoint_000001"
        if not killed_at(event, lambda to=directory: write_checkpoint(to, trial(1)), directory):
            break
        whole, _ = newest_whole(tmp_path) or (None, 0)
        outcomes.append(whole and whole.name)
        # The leftover files do not block a new checkpoint.
        write_checkpoint(directory, trial(1))
        assert_equal(read_checkpoint(directory), trial(1))
        refuse_foreign_files(directory)
        shutil.rmtree(directory)
    # The events are: create the directory, remove an old manifest, create and remove the file that
    # learners look for. Then, for each of five files: create it, rename it, open the directory to
    # sync the directory.
    assert len(outcomes) == 4 + 5 * 3
    assert set(outcomes[:-1]) == {"checkpoint_000000"}
    # After a kill before the last sync, the manifest may or may not be there. In this test, it is.
    assert outcomes[-1] == "checkpoint_000001"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_a_copy_that_was_cut_short_is_not_whole(tmp_path: Path, seed: int) -> None:
    """Copy a checkpoint as Tune does: file by file, in any order, directly to the final names."""
    rng = random.Random(seed)
    write_checkpoint(tmp_path / "source", trial(1))
    write_checkpoint(tmp_path / "checkpoint_000000", trial(0))
    copy = tmp_path / "checkpoint_000001"
    copy.mkdir()
    names = rng.sample(FILES, len(FILES))
    copied = rng.randrange(len(names))
    for name in names[:copied]:
        shutil.copyfile(tmp_path / "source" / name, copy / name)
    content = (tmp_path / "source" / names[copied]).read_bytes()
    # At least two bytes are missing, because the manifest is whole without its final line feed.
    (copy / names[copied]).write_bytes(content[: rng.randrange(len(content) - 1)])
    whole, _ = newest_whole(tmp_path) or (None, 0)
    assert whole == tmp_path / "checkpoint_000000"


@pytest.mark.parametrize("kept", FILES[1:])
def test_old_and_new_files_together_never_pass_for_a_checkpoint(tmp_path: Path, kept: str) -> None:
    # An interrupted copy of the directory leaves a mix of old and new files. Both checkpoints have
    # the same groups.
    write_checkpoint(tmp_path / "old", trial(0))
    write_checkpoint(tmp_path / "new", replace(trial(1), groups=[group(5)]))
    changed = (tmp_path / "old" / kept).read_bytes() != (tmp_path / "new" / kept).read_bytes()
    (tmp_path / "new" / kept).write_bytes((tmp_path / "old" / kept).read_bytes())
    assert changed
    with pytest.raises(CheckpointError, match=f"{kept}: damaged"):
        read_checkpoint(tmp_path / "new")


@pytest.mark.parametrize("name", ["_dict_checkpoint.pkl", "notes.txt", ".hidden"])
def test_file_of_anybody_else_is_refused(tmp_path: Path, name: str) -> None:
    write_checkpoint(tmp_path, trial())
    (tmp_path / f".{STATE}.k3j4h5").write_bytes(b"what a killed write leaves")
    refuse_foreign_files(tmp_path)
    (tmp_path / name).write_bytes(b"anything")
    with pytest.raises(CheckpointError, match=f"{name}: does not belong to a checkpoint"):
        refuse_foreign_files(tmp_path)


def checkpoints(directory: Path, rounds: list[int]) -> list[str]:
    """Write one checkpoint for each of the rounds, in order, and return their names."""
    names = [f"checkpoint_{number:06d}" for number in range(len(rounds))]
    for name, round_ in zip(names, rounds, strict=True):
        write_checkpoint(directory / name, trial(round_))
    return names


def left(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize("keep", [1, 2, 9])
def test_the_newest_checkpoints_are_kept(tmp_path, keep):
    names = checkpoints(tmp_path, [2, 4, 6, 8])
    remove_older(tmp_path, keep, shared_rounds=[])
    assert left(tmp_path) == names[-keep:]


def test_checkpoints_that_another_trial_may_start_from_are_kept_as_well(tmp_path):
    # PBT saved round 4 twice: first to clone the trial, and again to pause it.
    names = checkpoints(tmp_path, [2, 4, 4, 6, 8])
    remove_older(tmp_path, 1, shared_rounds=[4])
    assert left(tmp_path) == [names[1], names[2], names[4]]


def test_nothing_is_removed_while_the_newest_checkpoint_is_damaged(tmp_path):
    names = checkpoints(tmp_path, [2, 4, 6])
    with (tmp_path / names[-1] / part_file("policy")).open("r+b") as file:
        file.truncate(9)
    with pytest.raises(CheckpointError, match=names[-1]):
        remove_older(tmp_path, 1, shared_rounds=[])
    assert left(tmp_path) == names


def test_a_copy_that_was_cut_short_is_none_of_those_kept(tmp_path):
    # The Trainable was killed while Tune copied round 12, and the trial continued from round 8.
    names = checkpoints(tmp_path, [4, 8, 12, 12])
    (tmp_path / names[2] / MANIFEST).unlink()
    remove_older(tmp_path, 2, shared_rounds=[])
    assert left(tmp_path) == names[1:]
    write_checkpoint(tmp_path / "checkpoint_000004", trial(16))
    remove_older(tmp_path, 2, shared_rounds=[])
    assert left(tmp_path) == [names[3], "checkpoint_000004"]


@pytest.mark.parametrize(
    ("confirmed", "kept"), [(1, 5), (2, 5), (4, 5), (5, 4), (6, 4), (8, 3), (10, 2), (99, 2)]
)
def test_a_checkpoint_counts_once_its_round_is_confirmed(tmp_path, confirmed, kept):
    names = checkpoints(tmp_path, [2, 4, 5, 8, 10])
    remove_older(tmp_path, 2, shared_rounds=[], confirmed=confirmed)
    assert left(tmp_path) == names[-kept:]


def test_each_checkpoint_is_verified_once(tmp_path, monkeypatch):
    names, verified, read = checkpoints(tmp_path, [2, 4, 6, 8]), {}, []
    whole = checkpointing.checkpoint_round
    monkeypatch.setattr(
        checkpointing, "checkpoint_round", lambda path: read.append(path.name) or whole(path)
    )
    for confirmed in (4, 6, 8):
        remove_older(tmp_path, 2, shared_rounds=[], confirmed=confirmed, verified=verified)
    assert sorted(read) == names
    assert left(tmp_path) == names[-2:]


def test_what_a_killed_removal_left_goes_with_the_next(tmp_path):
    names = checkpoints(tmp_path, [2, 4])
    write_checkpoint(tmp_path / ".removed", trial(1))
    remove_older(tmp_path, 1, shared_rounds=[])
    assert left(tmp_path) == names[-1:]


# ---- Checkpoints of several learners -----------------------------------------------------------


def written_by(directory: Path, size: int, *, apart: Sequence[int] = ()) -> TrialState:
    """Write a checkpoint with `size` learners and return its content.

    Learners in `apart` do not see the directory.
    """
    whole = {"matrix": torch.arange(15.0).view(5, 3), "vector": torch.arange(5.0)}
    rows = [
        dict(zip(whole, parts, strict=True)) for parts in zip(*_split(whole, size), strict=True)
    ]
    steps = {"vector/step": torch.tensor(7.0)}
    files = []
    with begun(directory) as proof:
        for number, held in enumerate(rows, start=1):
            seen_by = "elsewhere" if number in apart else proof
            tensors = {"policy": held, "optimizer": steps if number == 1 else {}}
            written = write_learner_files(
                str(directory), seen_by, tensors, {"version": number}, number=number, of=size
            )
            if number in apart:
                assert not written.written
                messages = learner_messages(tensors, number=number, of=size)
                digests = write_messages(directory, messages)
                written = replace(written, digests=digests)
            files.append(written)
    finish_checkpoint(directory, files, trial().state, trial().groups)
    return replace(trial(), policy=whole, optimizer=steps)


def _split(tensors: dict[str, torch.Tensor], size: int) -> list[list[torch.Tensor]]:
    """Split the rows of each tensor; the last part is empty when there are too few rows."""
    bounds = [-(-5 // size) * i for i in range(size + 1)]
    return [[t[a:b] for a, b in pairwise(bounds)] for t in tensors.values()]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("apart", [(), (1,), (2, 3)])
def test_what_several_learners_wrote_is_read_as_a_whole(
    tmp_path: Path, size: int, apart: tuple[int, ...]
) -> None:
    expected = written_by(tmp_path, size, apart=apart)
    assert_equal(read_checkpoint(tmp_path), expected)
    assert len(list(tmp_path.glob("policy-*"))) == size
    refuse_foreign_files(tmp_path)
    assert list(tmp_path.glob(".*")) == []


def test_a_file_of_one_learner_that_is_missing_is_named(tmp_path: Path) -> None:
    written_by(tmp_path, 2)
    (tmp_path / part_file("optimizer", 2, 2)).unlink()
    with pytest.raises(CheckpointError, match=r"optimizer-00002-of-00002\S*: is missing"):
        read_checkpoint(tmp_path)


def test_a_learner_that_cannot_write_is_an_error_of_the_directory(tmp_path: Path) -> None:
    with begun(tmp_path / "there") as proof:
        tensors = {"policy": {"a": torch.zeros(1)}}
        (tmp_path / "there" / part_file("policy")).mkdir()  # a directory, which no file can replace
        files = write_learner_files(str(tmp_path / "there"), proof, tensors, {})
    with pytest.raises(OSError, match="Is a directory"):
        finish_checkpoint(tmp_path / "there", [files], {}, [])


def test_the_directory_of_a_trial_is_refused_with_the_name_of_a_checkpoint_in_it(tmp_path: Path):
    for name in ("checkpoint_000000", "checkpoint_000003"):
        (tmp_path / name).mkdir()
    (tmp_path / "result.json").touch()
    told = "is not a checkpoint, but contains checkpoints, such as checkpoint_000003; nothing was"
    with pytest.raises(CheckpointError, match=f"{tmp_path}: {told}"):
        refuse_foreign_files(tmp_path)
