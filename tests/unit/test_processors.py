"""The environment variables with which `make test-processors` simulates other machines."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest
import torch

pytestmark = [
    pytest.mark.numerics,
    pytest.mark.skipif(platform.machine() != "x86_64", reason="the variables are those of x86"),
]

ASKED = "import torch; print(torch.backends.cpu.get_cpu_capability(), torch.get_num_threads())"


def capability_of_another_process(**variables: str) -> list[str]:
    """Return the instruction set and the number of threads that torch uses in a new process."""
    done = subprocess.run(
        [sys.executable, "-c", ASKED],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_torch_is_held_to_the_instructions_of_a_variable(capability: str):
    found = capability_of_another_process(ATEN_CPU_CAPABILITY=capability, OMP_NUM_THREADS="1")
    assert found == [capability.upper(), "1"]


@pytest.mark.skipif("ATEN_CPU_CAPABILITY" not in os.environ, reason="make test-processors sets it")
def test_what_holds_for_these_tests_holds_for_the_processes_they_start():
    wanted = os.environ["ATEN_CPU_CAPABILITY"].upper()
    assert torch.backends.cpu.get_cpu_capability() == wanted
    assert capability_of_another_process() == [wanted, os.environ["OMP_NUM_THREADS"]]
