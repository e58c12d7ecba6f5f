"""Settings of each built-in task."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from grpo_trainable.config.conditions import CONTROL, Config, Conflict, none_given, one_of
from grpo_trainable.config.defaults import GIVEN, by_model, where_none
from grpo_trainable.config.foreign_names import verl
from grpo_trainable.config.values import (
    Settings,
    choice,
    choice_or_path,
    flag,
    integer,
    json_object,
    path,
    task_mix,
    text,
)
from grpo_trainable.models.hf.json_files import ModelFacts

MIX = "mix"  # `task.name` of a trial with several tasks
# Tasks whose prompts make sense only in the environment with the same name.
GAMES = ("guess", "calculator")

# Tasks that read an answer from a response, and forms of prompts that already contain the beginning
# of the response.
ANSWERED = ("math", "reasoning_gym")
BEGIN_RESPONSE = ("short", "r1_zero", "completion")
# Tasks whose responses must be longer than a story.
PROBLEMS = (*ANSWERED, "code")

_KEYWORD = one_of("task.name", "keyword")
_REASONING_GYM = one_of("task.name", "reasoning_gym")
_CODE = one_of("task.name", "code")
_FROM_FILES = one_of("task.name", "keyword", "math", "code")
_NO_TRAIN_FILE = none_given("task.train_file")
_DATA = "a JSONL file, a Parquet file, or a directory that Dataset.save_to_disk wrote"


def settled_equality(equality: str, train_file: str | None, eval_file: str | None) -> str:
    """Return how the math task compares answers, resolving `auto`."""
    if equality != "auto":
        return equality
    return "exact" if train_file is None and eval_file is None else "math_verify"


def _default_equality(
    name: str, reward: str | None, train_file: str | None, eval_file: str | None
) -> str | None:
    compares = name == "math" and reward is None
    return settled_equality("auto", train_file, eval_file) if compares else None


def _default_template(model: ModelFacts, answer_in: str, chat_template: str | None) -> str:
    """Return the template for a Hugging Face model.

    A chat model answers a message, so its prompt cannot begin the response as `r1_zero` does.
    """
    chat = model.has_chat_template or chat_template not in (None, "off")
    boxed = answer_in == "boxed" or (answer_in == "auto" and chat)
    return "boxed" if boxed else "r1_zero"


def _default_code_in(model: ModelFacts, chat_template: str | None) -> str | None:
    chat = model.has_chat_template if chat_template is None else chat_template != "off"
    return "block" if chat else None


def _are_options(options: dict[str, Any]) -> bool:
    return options.keys().isdisjoint({"seed", "size"})


@dataclass(frozen=True, kw_only=True)
class PromptFileSettings(Settings):
    """Files that a task reads prompts from."""

    train_file: str | None = path(
        None,
        f"Training prompts, in one of the task's formats (docs/howto): {_DATA}. Without eval_file, "
        "about a fifth of the prompts are held out, chosen by a hash of each prompt.",
        read_if=_FROM_FILES,
        also_called=(verl("data.train_files", _DATA),),
    )
    eval_file: str | None = path(
        None,
        f"Held-out prompts: {_DATA}. All prompts in the file are held out. Without train_file, "
        "training uses the prompts that ship with the task. No prompts ship with the task `code`.",
        read_if=_FROM_FILES,
        also_called=(verl("data.val_files", _DATA),),
    )


@dataclass(frozen=True, kw_only=True)
class KeywordSettings(PromptFileSettings):
    """Settings of the keyword task."""

    SECTION: ClassVar[str] = "task"

    keywords_file: str | None = path(
        None,
        "UTF-8 file with one keyword per line. `none` uses the nouns that ship with the package.",
        read_if=(_KEYWORD, _NO_TRAIN_FILE),
    )
    keywords_per_prompt: int = integer(
        1,
        "Number of keywords in each prompt.",
        minimum=1,
        read_if=(_KEYWORD, _NO_TRAIN_FILE),
    )
    match: str = choice(
        ("word", "substring"),
        "Rule for finding a keyword in a response: as a whole word (word), or anywhere "
        '(substring), such as "hen" in "when".',
        read_if=(_KEYWORD, none_given("task.reward")),
    )


@dataclass(frozen=True, kw_only=True)
class AnswerSettings(Settings):
    """Template of the prompts, and location of the answer in a response."""

    template: str = choice_or_path(
        ("short", "r1_zero", "boxed", "question_only"),
        "Template that turns a question into a prompt. In a file of your own, {question} stands "
        "for the question.",
        read_if=one_of("task.name", *ANSWERED),
        default_by=by_model(
            "asks for the answer in the form that the reward reads",
            _default_template,
            keys=("task.answer_in", f"{GIVEN}model.chat_template"),
            told="`boxed` with a chat template or `answer_in=boxed`, else `r1_zero`",
        ),
    )
    answer_in: str = choice(
        ("auto", "tags", "boxed"),
        r"Location of the answer in a response: in answer tags after the reasoning (tags), or in "
        r"\boxed{} (boxed). `auto` follows the template.",
        read_if=one_of("task.name", *ANSWERED),
    )


@dataclass(frozen=True, kw_only=True)
class MathSettings(PromptFileSettings, AnswerSettings):
    """Settings of the math task."""

    SECTION: ClassVar[str] = "task"

    equality: str = choice(
        ("auto", "exact", "math_verify"),
        "Comparison of an answer with the correct answer: as numbers or strings (exact), or as "
        "mathematical expressions, using math-verify (math_verify). `auto` chooses math_verify if "
        "a file of problems is given, and exact otherwise.",
        read_if=(one_of("task.name", "math"), none_given("task.reward")),
        default_by=where_none(
            ("task.name", "task.reward", "task.train_file", "task.eval_file"), _default_equality
        ),
    )


@dataclass(frozen=True, kw_only=True)
class ReasoningGymSettings(AnswerSettings):
    """Settings of the reasoning_gym task."""

    SECTION: ClassVar[str] = "task"

    dataset: str | None = text(
        None,
        "Data set from reasoning-gym that makes the problems and scores the answers.",
        expected="the name of a data set, such as chain_sum",
        valid=str.isidentifier,
        read_if=_REASONING_GYM,
    )
    size: int = integer(
        20000,
        "Number of problems in the data set. A fifth of them are held out. After one pass, the "
        "problems repeat in a different order.",
        minimum=1,
        read_if=_REASONING_GYM,
    )
    options: str = json_object(
        "{}",
        "Options of the data set, as JSON.",
        expected='a JSON object without seed and size, such as {"min_terms": 2}',
        valid=_are_options,
        read_if=_REASONING_GYM,
    )


@dataclass(frozen=True, kw_only=True)
class CodeSettings(PromptFileSettings):
    """Settings of the code task."""

    SECTION: ClassVar[str] = "task"

    code_in: str = choice(
        ("completion", "block"),
        "Location of the code in a response: the whole response, which continues the prompt "
        "(completion), or the last Markdown code block (block). The prompt asks for this form.",
        read_if=_CODE,
        default_by=by_model(
            "a chat model puts its code into a Markdown block",
            _default_code_in,
            keys=(f"{GIVEN}model.chat_template",),
            told="`block` with a chat template",
        ),
    )
    partial_credit: bool = flag(
        False,
        "If a program fails some of its tests, reward it with the share of the tests that it "
        "passes. Without partial credit, only a program that passes all of its tests is rewarded.",
        read_if=(_CODE, none_given("task.reward")),
    )


@dataclass(frozen=True, kw_only=True)
class NoSettings(Settings):
    """Empty `task` section for the games and for `control`, which reads only `model.env`."""

    SECTION: ClassVar[str] = "task"


@dataclass(frozen=True, kw_only=True)
class MixSettings(Settings):
    """Settings of a mix of tasks."""

    SECTION: ClassVar[str] = "task"

    mix: str | None = task_mix(
        "Tasks and their shares of the prompts, as JSON. For a task with settings, give an object "
        "with its weight and its settings (docs/howto/mix.md). Setting this key implies "
        "task.name=mix.",
        read_if=one_of("task.name", MIX),
    )


# Settings of each built-in task, in addition to the settings that all tasks have.
TASK_SETTINGS: dict[str, type[Settings]] = {
    "keyword": KeywordSettings,
    "math": MathSettings,
    "reasoning_gym": ReasoningGymSettings,
    "code": CodeSettings,
    "guess": NoSettings,
    "calculator": NoSettings,
    CONTROL: NoSettings,
    MIX: MixSettings,
}


def conflicts(config: Config) -> Iterator[Conflict]:
    """Yield conflicts between a mix of tasks and other settings."""
    task, tasks = config.task, len(config.parts)
    mixed = tasks > 0

    yield (
        task.name == MIX and not mixed,
        "task.name",
        "needs task.mix, which gives the weight of each task, such as "
        '{"math": 0.5, "keyword": 0.5}',
    )
    yield (
        mixed and config.env.plays,
        "env.name",
        "must be off with task.mix: prompts of a mix are answered in a single turn",
    )
    yield (
        mixed and task.reward is not None,
        "task.reward",
        "must be none with task.mix; name the function in the entry of the task whose responses "
        "it scores",
    )
    yield (
        mixed and config.pools.enabled,
        "pools.enabled",
        "must be false with task.mix: pools draw prompts by difficulty, but a mix draws by weight",
    )
    yield (
        mixed and config.loss.advantage == "batch",
        "loss.advantage",
        "must not be batch with task.mix, because it would compare rewards of different tasks; "
        "choose an advantage that compares the responses of a group, such as group_std",
    )
    yield (
        mixed and config.has_critic and config.loss.whiten,
        "loss.whiten",
        "must be false with task.mix, because whitening would compare rewards of different tasks",
    )
    yield (
        config.eval.prompts < tasks,
        "eval.prompts",
        f"must be >= {tasks}, so that each task of task.mix is evaluated",
    )
