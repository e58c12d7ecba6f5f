"""The extra for RLlib: the error if it is missing, and a Trainable that does not load RLlib."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120
    )


@pytest.mark.slow
def test_a_missing_extra_is_one_line_that_says_how_to_install_it():
    done = run("import sys; sys.modules['gymnasium'] = None; import grpo_trainable.rllib")
    assert done.returncode == 1
    error = done.stderr.splitlines()[-1]
    assert error.startswith("ImportError: grpo_trainable.rllib needs RLlib (")
    assert "gymnasium" in error
    assert error.endswith("; install it with: pip install 'grpo-trainable[rllib]'")


@pytest.mark.slow
def test_the_trainable_loads_nothing_of_rllib():
    done = run(
        "import sys, grpo_trainable.trainable\n"
        "print([name for name in sys.modules if name.startswith(('ray.rllib', 'gymnasium'))])"
    )
    assert done.stdout == "[]\n"
