"""The real-model benchmark, without a model: its problems and its measurement of memory."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import grade_school
import pytest
from grade_school import LARGEST, GradeSchool, held_out, problem
from real_model import APART, ARMS, arm_of, held_mb


def test_only_an_engine_that_cannot_be_colocated_on_cpus_gets_another_arm():
    assert [arm_of("hf", arm) for arm in ARMS] == [*ARMS]
    assert [arm_of("vllm", arm) for arm in ARMS] == [APART, ARMS[1]]


def test_the_same_problems_come_again_and_others_for_another_seed():
    def first(seed: int) -> list[str]:
        examples = [GradeSchool(seed).train_example(i) for i in range(20)]
        return [example.prompt[-1]["content"] for example in examples]

    assert first(3) == first(3)
    assert len(set(first(3) + first(4))) > 30


def test_a_problem_of_the_benchmark_is_what_it_says():
    found = [problem(str(i), held_out=False) for i in range(300)]
    assert {own.calculation.split()[1] for own in found} == set("+-*")
    for own in found:
        left, sign, right = own.calculation.split()
        assert own.answer == grade_school.OPERATIONS[sign](int(left), int(right))
        assert 1 <= own.answer <= LARGEST
        assert re.findall(r"\d+", own.question) == [left, right]


def test_no_calculation_is_both_trained_on_and_held_out():
    trained = {problem(str(i), held_out=False).calculation for i in range(2000)}
    asked = held_out(256)
    assert not trained & {own.calculation for own in asked}
    assert len({own.question for own in asked}) == 256


@pytest.mark.slow
def test_fewer_held_out_problems_are_the_first_and_more_come_round_again():
    task = GradeSchool(0)
    assert task.eval_examples(3) == task.eval_examples(600)[:3]
    assert task.eval_examples(600)[512:] == task.eval_examples(88)
    assert len(task.eval_examples(600)) == 600


@pytest.mark.parametrize(
    ("response", "scores"),
    [
        (r"8 + 5 = 13. \boxed{13}", (1, 1, 1)),
        (r"\boxed{13 plums}", (1, 1, 1)),
        (r"8 + 5 = 14. \boxed{14}", (0, 1, 0)),
        ("8 + 5 = 13.", (0, 0, 0)),
        (r"\boxed{13", (0, 0, 0)),
    ],
)
def test_the_right_number_in_a_box_is_worth_one(response, scores):
    score = GradeSchool(0).reward(response, 13)
    assert (score.reward, score.format_reward, score.answer_reward) == scores


@pytest.mark.slow
def test_memory_is_that_of_a_process_and_all_it_started():
    script = "import sys; x = b'1' * 50_000_000; print(len(x), flush=True); sys.stdin.read()"
    shell = ["sh", "-c", f'{sys.executable} -c "{script}"; true']
    with subprocess.Popen(shell, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as started:
        assert started.stdout is not None
        assert started.stdout.readline() == b"50000000\n"
        assert 50 < held_mb(started.pid) < held_mb(os.getpid())
        started.communicate(b"")
