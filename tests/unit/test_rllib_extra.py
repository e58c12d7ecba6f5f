"""What is there of RLlib without RLlib."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_a_missing_extra_is_one_line_that_says_how_to_install_it():
    without = "import sys; sys.modules['gymnasium'] = None; import grpo_trainable.rllib"
    done = subprocess.run(
        [sys.executable, "-c", without], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    error = done.stderr.splitlines()[-1]
    assert error.startswith("ImportError: grpo_trainable.rllib needs RLlib (")
    assert "gymnasium" in error
    assert error.endswith("; install it by: pip install 'grpo-trainable[rllib]'")
