"""Memory that checkpoints take in addition to their tensors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

MIB = 1 << 20
STATE_MIB = 96
# Room for pieces of 1 MiB, and for memory that the allocator and Python keep. The peak also counts
# library pages, of which some processors touch 15 MiB. A copy of the state would take four times
# this.
EXTRA_MIB = 24

PREPARE = f"""
import re, sys
from pathlib import Path
import torch
from grpo_trainable.storage import checkpointing
from checkpoints import write_checkpoint
from grpo_trainable.storage.checkpointing import *

def peak_mib():
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", status)[1]) / 1024

def grown_mib(work):
    Path("/proc/self/clear_refs").write_text("5")  # begin to measure the peak here
    before = peak_mib()
    held = work()
    print(peak_mib() - before)

directory = sys.argv[1]
matrix = torch.ones(1024, 1024)  # 4 MiB
state = TrialState(
    state={{"pipeline": {{"learner_round": 1}}}},
    policy={{f"w{{i}}": matrix.clone() for i in range({STATE_MIB} // 12)}},
    # Half of it lies in memory by column.
    optimizer={{f"m{{i}}": matrix.clone().t() for i in range({STATE_MIB} // 12)}}
    | {{f"v{{i}}": matrix.clone() for i in range({STATE_MIB} // 12)}},
    groups=[],
)
few = {{"m0": matrix.t(), "v0": matrix}}
warm = TrialState(state=state.state, policy={{"w0": matrix}}, optimizer=few, groups=[])
write_checkpoint(directory + "/warm", warm)
read_checkpoint(directory + "/warm")
"""


def grown_mib(directory: Path, work: str) -> float:
    """Return the growth in MiB of a separate process's peak memory while it does the work."""
    done = subprocess.run(
        [sys.executable, "-c", f"{PREPARE}\n{work}", str(directory)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


linux = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="only Linux reports peak memory"
)
WRITE = 'write_checkpoint(directory + "/checkpoint_000000", state)'
VERIFY = 'checkpoint_round(directory + "/checkpoint_000000")'
READ = 'read_checkpoint(directory + "/checkpoint_000000")'


@pytest.mark.slow
@linux
@pytest.mark.parametrize(
    ("first", "work", "mib"),
    [
        ("", WRITE, EXTRA_MIB),
        (WRITE, VERIFY, EXTRA_MIB),
        (WRITE, READ, STATE_MIB + EXTRA_MIB),
    ],
    ids=["write", "verify", "read"],
)
def test_beside_tensors_a_checkpoint_takes_little(tmp_path, first, work, mib):
    assert grown_mib(tmp_path, f"{first}\ngrown_mib(lambda: {work})") < mib


LOAD = """
from grpo_trainable.learner.training_state import TrainingState
from grpo_trainable.config import GRPOConfig

class Weights:
    def trained(self):
        return {name: torch.nn.Parameter(t.clone()) for name, t in state.policy.items()}

def training_state():
    return TrainingState(GRPOConfig.from_dict({}), Weights(), torch.device("cpu"), "same")

counters = {"reference_checksum": "same", "round": 1, "version": 1}
counters |= {"skipped_steps": 0, "skipped_in_a_row": 0}
kinds = ("exp_avg", "exp_avg_sq")
moments = {f"{n}/{kind}": t.clone() for n, t in state.policy.items() for kind in kinds}
write_checkpoint(
    directory + "/checkpoint_000000",
    TrialState(state=state.state, policy=state.policy, optimizer=moments, groups=[]),
)
moments.clear()
place = Path(directory, "checkpoint_000000")
digests = checkpointing.verified_digests(place)
training_state().read(Path(directory, "nowhere"), digests, counters)  # warm
learner = training_state()
def read():
    assert learner.read(place, digests, counters)
grown_mib(read)
"""


@pytest.mark.slow
@linux
def test_a_learner_that_reads_a_checkpoint_holds_no_moment_twice(tmp_path):
    # The policy and the moments are read, and only the moments stay.
    assert grown_mib(tmp_path, LOAD) < STATE_MIB + EXTRA_MIB
