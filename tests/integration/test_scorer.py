"""Scorers with real processes."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from grpo_trainable.config import GRPOConfig
from grpo_trainable.generator.scorer import ProcessScorer, check_reward, make_scorer
from grpo_trainable.tasks import Example, RewardError, Score, ScoreRequest
from grpo_trainable.tasks.prompts import build_task
from grpo_trainable.telemetry.progress import steps_done

REPOSITORY = Path(__file__).parents[2]

# The text of a response decides what the function does.
REWARD_FUNCTION = """
import os, re, subprocess, sys, time
from pathlib import Path

def reward(response, ground_truth):
    if response == "hang":
        time.sleep(60)
    if response == "busy":
        re.match("(a+)+$", "a" * 60 + "b")  # for hours, and no other thread can run
    if response == "die":
        os._exit(3)
    if response == "crash":
        os.kill(os.getpid(), 11)
    if response == "exit":
        sys.exit(5)
    if response == "raise":
        raise KeyError("two\\nlines")
    if response == "print":
        print("noise on the protocol?", flush=True)
        os.write(1, b"more noise\\n")
        os.system("echo and more")
    if response == "read":
        return len(sys.stdin.read())
    if response == "pid":
        return os.getpid()
    if response == "meet":  # until eight processes are here
        here = Path(ground_truth)
        (here / str(os.getpid())).touch()
        while len(list(here.iterdir())) < 8:
            time.sleep(0.01)
        return os.getpid()
    if response in ("child", "child, then die", "child, then hang"):
        child = subprocess.Popen(["sleep", "1000"])
        if response == "child":
            return child.pid
        os.write(2, b"child %d\\n" % child.pid)
        time.sleep(1000) if "hang" in response else os._exit(3)
    if response == "dict":
        return {"reward": 0.5, "format_reward": 1, "answer_reward": 0, "extra": "ignored"}
    if response == "nan":
        return float("nan")
    if response == "text":
        return "1"
    return float(len(response)) + float(len(ground_truth))
"""


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    path = tmp_path_factory.mktemp("reward") / "my_reward.py"
    path.write_text(REWARD_FUNCTION)
    return f"{path}:reward"


@pytest.fixture
def scorer(spec):
    with contextlib.closing(ProcessScorer(spec, deadline_s=60.0)) as scorer:
        yield scorer


def requests(*responses):
    return [ScoreRequest(response, "ab") for response in responses]


def worker_pids(scorer):
    """Return the pids of the workers. The last pid is that of the spare worker."""
    return [worker._process.pid for worker in scorer._processes]


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pids, timeout_s=60.0):
    deadline = time.monotonic() + timeout_s
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not any(map(is_running, pids))


def test_a_number_is_the_reward_and_a_dict_may_say_more(scorer):
    assert scorer.score(requests("abc", "dict", "")) == [
        Score(5.0, None, 5.0),
        Score(0.5, 1.0, 0.0),
        Score(2.0, None, 2.0),
    ]


def test_any_text_and_any_json_survive_the_trip(scorer):
    text = 'line\nbreak "quotes" \u2028 \ud800 \0 é 🦜'
    assert scorer.score([ScoreRequest(text, {"a": [1, None]})]) == [
        Score(len(text) + 1.0, None, len(text) + 1.0)
    ]
    long = "x" * 3_000_000  # many times the capacity of a pipe
    assert scorer.score([ScoreRequest(long, [])])[0].reward == 3_000_000


def test_the_users_prints_and_reads_do_not_reach_the_protocol(capfd, spec):
    with contextlib.closing(ProcessScorer(spec, deadline_s=60.0)) as scorer:
        answers = scorer.score(requests("print", "read", "x"))
    assert [answer.reward for answer in answers] == [7.0, 0.0, 3.0]
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "noise on the protocol?\nmore noise\nand more\n" in captured.err


def test_an_exception_or_a_bad_value_is_the_error_of_that_response_alone(scorer):
    before = worker_pids(scorer)
    answers = scorer.score(requests("raise", "nan", "text", "exit", "x"))
    assert answers == [
        RewardError("KeyError: 'two\\nlines' (my_reward.py, line 17)", repeats=True),
        RewardError("ValueError: reward must be a finite float32, got nan", repeats=True),
        RewardError("TypeError: reward must be a number, got str", repeats=True),
        RewardError("SystemExit: 5 (my_reward.py, line 15)", repeats=True),
        Score(3.0, None, 3.0),
    ]
    assert worker_pids(scorer) == before  # no process had to be replaced


@pytest.mark.parametrize(
    ("response", "message"),
    [
        ("die", "the reward process died (exit status 3)"),
        ("crash", "the reward process died (signal Segmentation fault)"),
    ],
)
def test_a_death_is_the_error_of_that_response_and_the_spare_goes_on(scorer, response, message):
    spare = worker_pids(scorer)[1]
    answers = scorer.score(requests("x", response, "pid", "x"))
    assert answers[1] == RewardError(message)
    assert answers[0] == answers[3] == Score(3.0, None, 3.0)
    assert answers[2].reward == spare


@pytest.mark.parametrize("response", ["hang", "busy"])
def test_a_hang_is_killed_at_the_deadline_and_the_spare_goes_on(spec, response):
    with contextlib.closing(ProcessScorer(spec, deadline_s=1.0)) as scorer:
        hung, spare = worker_pids(scorer)
        answers = scorer.score(requests("x", response, "pid"))
        assert answers[1] == RewardError("no reward within 1 s")
        assert answers[2].reward == spare
        assert not is_running(hung)


def test_hangs_and_deaths_in_a_row_all_get_their_errors(spec):
    with contextlib.closing(ProcessScorer(spec, deadline_s=1.0)) as scorer:
        answers = scorer.score(requests("hang", "die", "hang", "x", "die"))
        kinds = [type(answer) for answer in answers]
        assert kinds == [RewardError, RewardError, RewardError, Score, RewardError]
        assert scorer.score(requests("x")) == [Score(3.0, None, 3.0)]


def test_a_reward_that_always_hangs_is_not_asked_for_ever(spec):
    with contextlib.closing(ProcessScorer(spec, deadline_s=0.5)) as scorer:
        answers = scorer.score(requests(*["hang"] * 12, "x"))
        hung = RewardError("no reward within 0.5 s")
        left_out = RewardError(
            "not scored: the reward hung on 10 other responses of the same chunk"
        )
        assert answers == [hung] * 10 + [left_out] * 3
        assert scorer.score(requests("x")) == [Score(3.0, None, 3.0)]


def test_every_response_is_a_step_of_progress_whatever_came_of_it(spec, monkeypatch):
    # All waits are shorter than these 60 s, so no wait counts as a step of progress.
    monkeypatch.setattr("grpo_trainable.generator.worker_process.WAIT_S", 60.0)
    with contextlib.closing(ProcessScorer(spec, deadline_s=1.0)) as scorer:
        before = steps_done()
        scorer.score(requests("x", "raise", "hang", "die", "x"))
    assert steps_done() - before == 5


def test_workers_score_side_by_side_and_answer_in_order(spec, tmp_path):
    with contextlib.closing(ProcessScorer(spec, deadline_s=60, workers=8)) as scorer:
        met = scorer.score([ScoreRequest("meet", str(tmp_path))] * 16)
        assert len({answer.reward for answer in met}) == 8
        lengths = [n % 7 for n in range(64)]
        answers = scorer.score(requests(*("x" * n for n in lengths)))
        assert [answer.reward for answer in answers] == [n + 2.0 for n in lengths]


def test_each_process_uses_its_share_of_the_reserved_cores(tmp_path):
    path = tmp_path / "threads.py"
    path.write_text("import os\ndef f(response, truth): return int(os.environ['OMP_NUM_THREADS'])")
    for cpus, workers, threads in ((0.0, 2, 1), (4.0, 2, 2)):
        resources = {"reward_cpus": cpus, "reward_workers": workers}
        config = GRPOConfig.from_dict({"task": {"reward": f"{path}:f"}, "resources": resources})
        with contextlib.closing(make_scorer(config, build_task(config))) as scorer:
            assert [answer.reward for answer in scorer.score(requests("x"))] == [threads]


def test_hangs_of_one_worker_are_replaced_while_the_others_go_on(spec):
    with contextlib.closing(ProcessScorer(spec, deadline_s=1.0, workers=3)) as scorer:
        answers = scorer.score(requests("x", "hang", "die", *["x"] * 9))
        failed = [i for i, answer in enumerate(answers) if isinstance(answer, RewardError)]
        assert failed == [1, 2]
        assert all(isinstance(answer, Score) for answer in scorer.score(requests(*["x"] * 9)))
        assert len(worker_pids(scorer)) == 4


def test_rest_of_a_unit_is_not_asked_for_once_many_hung_whatever_the_workers(spec):
    with contextlib.closing(ProcessScorer(spec, deadline_s=0.5, workers=4)) as scorer:
        answers = [answer.message for answer in scorer.score(requests(*["hang"] * 30))]
        hung = answers.count("no reward within 0.5 s")
        # When the tenth response hung, other workers were still scoring. Their answers are still
        # awaited.
        assert 10 <= hung <= 13
        assert all(
            "other responses of the same chunk" in message for message in answers[hung + 4 :]
        )


def test_scorer_that_is_closed_while_it_scores_leaves_no_process(spec):
    scorer = ProcessScorer(spec, deadline_s=60, workers=2)
    pids = worker_pids(scorer)
    answers = []
    scoring = threading.Thread(target=lambda: answers.extend(scorer.score(requests(*["hang"] * 5))))
    scoring.start()
    time.sleep(0.2)  # let the requests reach the workers
    scorer.close()
    scoring.join(5)
    assert [type(answer) for answer in answers] == [RewardError] * 5
    assert wait_until_gone([*pids, *worker_pids(scorer)])


@pytest.mark.parametrize("response", ["child, then die", "child, then hang"])
def test_what_a_reward_has_started_ends_with_it(spec, response, capfd):
    with contextlib.closing(ProcessScorer(spec, deadline_s=2.0)) as scorer:
        (answer,) = scorer.score(requests(response))
        assert isinstance(answer, RewardError)
        child = int(re.search(r"child (\d+)", capfd.readouterr().err)[1])
        assert wait_until_gone([child])


def test_processes_that_died_between_two_calls_are_replaced_without_an_error(scorer):
    for pid in worker_pids(scorer):
        os.kill(pid, signal.SIGKILL)
    assert wait_until_gone(worker_pids(scorer))
    assert scorer.score(requests("x")) == [Score(3.0, None, 3.0)]


def test_an_interrupted_call_leaves_no_answer_for_the_next(spec):
    def interrupt(*_):
        raise InterruptedError("asked to stop")

    def interrupted_call():
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        return scorer.score(requests("hang"))

    with contextlib.closing(ProcessScorer(spec, deadline_s=60)) as scorer:
        previous = signal.signal(signal.SIGALRM, interrupt)
        try:
            with pytest.raises(InterruptedError):
                interrupted_call()
        finally:
            signal.signal(signal.SIGALRM, previous)
        assert scorer.score(requests("x")) == [Score(3.0, None, 3.0)]


def test_close_leaves_no_process_and_may_be_called_twice(spec):
    scorer = ProcessScorer(spec, deadline_s=1.0)
    pids = worker_pids(scorer)
    scorer.close()
    scorer.close()
    assert not any(map(is_running, pids))


@pytest.mark.parametrize("response", ["hang", "busy", None])
def test_no_worker_outlives_a_parent_that_was_killed(spec, response):
    call = "" if response is None else f"scorer.score([ScoreRequest({response!r}, 'ab')])"
    program = f"""
        import time
        from grpo_trainable.generator.scorer import ProcessScorer
        from grpo_trainable.tasks import ScoreRequest
        scorer = ProcessScorer({spec!r}, deadline_s=60)
        print(*[worker._process.pid for worker in scorer._processes], flush=True)
        {call}
        time.sleep(60)
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        stdout=subprocess.PIPE,
        cwd=REPOSITORY,
    ) as parent:
        pids = [int(word) for word in parent.stdout.readline().split()]
        time.sleep(0.2)  # let the call reach the worker
        assert all(map(is_running, pids))
        parent.kill()
    assert wait_until_gone(pids)


# ---- Finding the function --------------------------------------------------------------------


@pytest.mark.parametrize("by", ["directory", "path"])
def test_a_module_is_found_from_the_directory_and_from_our_path(tmp_path, monkeypatch, by):
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").touch()
    (tmp_path / "pkg" / "sibling.py").write_text("VALUE = 4")
    (tmp_path / "pkg" / "rewards.py").write_text(
        "from .sibling import VALUE\ndef f(response, ground_truth): return VALUE"
    )
    if by == "path":
        monkeypatch.syspath_prepend(str(tmp_path))
    directory = str(tmp_path) if by == "directory" else None
    scorer = ProcessScorer("pkg.rewards:f", deadline_s=5.0, directory=directory)
    with contextlib.closing(scorer):
        assert scorer.score(requests("x")) == [Score(4.0, None, 4.0)]


def test_a_file_is_found_from_the_directory_and_finds_its_neighbours(tmp_path):
    (tmp_path / "neighbour.py").write_text("VALUE = 4")
    # The file has the name of a standard library module that is always imported.
    (tmp_path / "json.py").write_text(
        "from neighbour import VALUE\ndef f(response, ground_truth): return VALUE"
    )
    check_reward(f"{tmp_path / 'json.py'}:f")
    (tmp_path / "reward.py").write_text((tmp_path / "json.py").read_text())
    (tmp_path / "json.py").unlink()
    check_reward("reward.py:f", directory=str(tmp_path))


@pytest.mark.parametrize(
    ("reward", "reason"),
    [
        ("reward", "must be module:name or path/to/file.py:name"),
        ("some/path:reward", "must be module:name or path/to/file.py:name"),
        ("module:", "must be module:name or path/to/file.py:name"),
        ("no_such_module_here:f", "ModuleNotFoundError: No module named 'no_such_module_here'"),
        ("/no/such/file.py:f", "FileNotFoundError: no file /no/such/file.py"),
        ("json:no_such_function", "has no attribute 'no_such_function'"),
        ("math:pi", "TypeError: pi is not callable"),
        ("math:hypot3", "has no attribute 'hypot3'"),
        ("os.path:basename", "takes (p); accepted: (response, ground_truth), TRL's"),
    ],
)
def test_a_function_that_cannot_be_had_is_a_value_error_of_one_line(reward, reason):
    for attempt in (check_reward, lambda spec: ProcessScorer(spec, deadline_s=1.0)):
        with pytest.raises(ValueError, match=rf"^task\.reward={reward}: ") as error:
            attempt(reward)
        assert reason in str(error.value)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("raise RuntimeError('no licence')", "cannot be imported: RuntimeError: no licence"),
        ("def f(:", "cannot be imported: SyntaxError: "),
        ("exit(2)", "cannot be imported: SystemExit: 2"),
        ("import os; os._exit(7)", "importing it ended the process (exit status 7)"),
    ],
)
def test_a_failing_import_is_a_value_error_with_its_reason(tmp_path, source, reason):
    path = tmp_path / "bad.py"
    path.write_text(source)
    with pytest.raises(ValueError, match=r"^task\.reward=") as error:
        check_reward(f"{path}:f")
    assert reason in str(error.value)
    assert "\n" not in str(error.value)


def test_a_function_of_two_values_gets_no_row_that_it_cannot_read(scorer):
    # Sending the row would fail, because the row is not JSON.
    unsent: Any = {"image": object()}
    assert scorer.score([ScoreRequest("x", [], columns=unsent)]) == [Score(1.0, None, 1.0)]


# ---- Forms of functions --------------------------------------------------------------------------

# The texts of a call decide what the function does.
GROUP_FUNCTION = """
import os, time

calls = []

def grouped(completions, completion_ids, level, **kwargs):
    calls.append(completions)
    if "raise" in completions:
        raise KeyError("no")
    if "away" in completions:
        raise ConnectionError("no service")
    if "flaky" in completions and calls.count(completions) == 1:
        raise RuntimeError("once")
    if "differs" in completions:
        raise RuntimeError(f"call {len(calls)}")
    if "hang" in completions:
        time.sleep(60)
    if "short" in completions:
        return [1.0]
    special = {"nan": float("nan"), "none": None, "calls": float(len(calls))}
    return [
        special.get(text, len(completions) + 10.0 * len(ids) + 100.0 * own)
        for text, ids, own in zip(completions, completion_ids, level)
    ]

def half(response, ground_truth):
    return 0.5

both = [grouped, half]
"""


@pytest.fixture(scope="module")
def groups(tmp_path_factory):
    path = tmp_path_factory.mktemp("groups") / "groups.py"
    path.write_text(GROUP_FUNCTION)
    return str(path)


@pytest.fixture
def grouped(groups):
    with contextlib.closing(ProcessScorer(f"{groups}:grouped", deadline_s=60)) as scorer:
        yield scorer


def group(example, *texts):
    return [
        ScoreRequest(text, None, example=example, columns={"level": example}, token_ids=(1, 2))
        for text in texts
    ]


def test_responses_to_a_prompt_are_scored_together_with_their_tokens_and_columns(grouped):
    asked = [*group(3, "a", "b"), *group(1, "c", "d", "e"), *group(3, "f")]
    answers = [answer.reward for answer in grouped.score(asked)]
    assert answers == [322.0] * 2 + [123.0] * 3 + [321.0]


def test_a_failed_call_fails_its_group_and_a_wrong_number_its_response(grouped):
    asked = [
        *group(0, "a", "raise"),
        *group(1, "b", "short"),
        *group(2, "nan", "c"),
        *group(3, "d"),
    ]
    no_list = "ValueError: returned 1 rewards for 2 completions"
    not_finite = "ValueError: reward must be a finite float32, got nan"
    assert grouped.score(asked) == [
        *[RewardError("KeyError: 'no' (groups.py, line 9)", repeats=True)] * 2,
        *[RewardError(no_list, repeats=True)] * 2,
        RewardError(not_finite, repeats=True),
        Score(222.0, None, 222.0),
        Score(321.0, None, 321.0),
    ]


def test_none_is_no_failure_and_is_not_asked_for_again(grouped):
    none = RewardError("the reward function returned None", is_failure=False)
    assert grouped.score(group(0, "none", "calls")) == [none, Score(1.0, None, 1.0)]
    assert grouped.score(group(0, "calls")) == [Score(2.0, None, 2.0)]


def test_a_failure_that_passes_or_differs_does_not_repeat(grouped):
    assert grouped.score(group(0, "flaky")) == [Score(21.0, None, 21.0)]
    (away,) = grouped.score(group(0, "away"))
    assert away == RewardError("ConnectionError: no service (groups.py, line 11)", repeats=False)
    (differs,) = grouped.score(group(0, "differs"))
    assert re.fullmatch(r"RuntimeError: call \d+ \(groups\.py, line 15\)", differs.message)
    assert not differs.repeats


def test_a_group_may_take_the_time_of_all_its_responses(groups):
    with contextlib.closing(ProcessScorer(f"{groups}:grouped", deadline_s=0.5)) as scorer:
        answers = scorer.score([*group(0, "hang", "a", "b"), *group(1, "c")])
    assert answers == [RewardError("no reward within 1.5 s")] * 3 + [Score(121.0, None, 121.0)]


def test_a_list_of_functions_gives_a_part_for_each_and_their_weighted_sum(groups):
    parts = {"grouped": 22.0, "half": 0.5}
    weights = {"grouped": 2.0, "half": 4.0}
    for given, total in ((None, 22.5), (weights, 46.0)):
        with contextlib.closing(
            ProcessScorer(f"{groups}:both", deadline_s=60, weights=given)
        ) as scorer:
            answers = scorer.score(group(0, "a", "b"))
        assert answers == [Score(total, None, total, parts=parts)] * 2


def test_the_only_part_of_one_function_of_trls_form_is_the_answer(groups):
    check_reward(f"{groups}:grouped", weighted=["answer"])
    with pytest.raises(ValueError, match=r"names grouped, but .*:grouped has the parts answer$"):
        check_reward(f"{groups}:grouped", weighted=["grouped"])


def test_a_json_list_of_rewards_is_one_reward_with_a_part_for_each(groups):
    reward = f'["{groups}:grouped", "{groups}:half"]'
    with contextlib.closing(ProcessScorer(reward, deadline_s=60)) as scorer:
        answers = scorer.score(group(0, "a", "b"))
    assert answers == [Score(22.5, None, 22.5, parts={"grouped": 22.0, "half": 0.5})] * 2
    with pytest.raises(ValueError, match=r"lists two rewards with the same name \(half, half\)"):
        check_reward(f'["{groups}:half", "{groups}:half"]')
    with pytest.raises(ValueError, match="both is not callable"):
        check_reward(f'["{groups}:half", "{groups}:both"]')


def test_a_check_compares_a_function_with_the_data_and_the_weights(groups):
    fitting = Example("p", None, {"level": 1})
    check_reward(f"{groups}:grouped", examples=[fitting])
    lacking = Example("p", None, {"question": "?", "answer": 3})
    with pytest.raises(ValueError, match=r"^task\.reward=.*needs the column level") as error:
        check_reward(f"{groups}:grouped", examples=[fitting, lacking])
    assert "they have the columns answer, ground_truth, question" in str(error.value)
    check_reward(f"{groups}:both", weighted=["half"])
    for other in ("hlaf", "format", "answer"):
        weights = {"half": 1.0, other: 1.0}
        attempts = (
            lambda weights=weights: check_reward(f"{groups}:both", weighted=weights),
            lambda weights=weights: ProcessScorer(f"{groups}:both", deadline_s=60, weights=weights),
        )
        for attempt in attempts:
            with pytest.raises(ValueError, match=f"^task.reward_weights: names {other}, ") as error:
                attempt()
            assert str(error.value).endswith("has the parts grouped, half")
    check_reward(f"{groups}:half", weighted=["any"])  # a returned dict may have any parts
