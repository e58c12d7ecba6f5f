"""Curves of the campaign `token_env`."""

from __future__ import annotations

import pytest
import token_env


def test_a_point_of_a_curve_is_the_mean_of_the_newest_rewards(monkeypatch):
    monkeypatch.setattr(token_env, "WINDOW", 3)
    monkeypatch.setattr(token_env, "POINTS", 2)
    assert token_env.curve_of([0.0, 1.0, 1.0, 0.0, 0.0, 0.5]) == [
        (3.0, pytest.approx(2 / 3)),
        (6.0, pytest.approx(0.5 / 3)),
    ]
