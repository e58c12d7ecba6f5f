"""The judge file: the endpoint, the model and the criteria of a judge.

A mistake in the file raises a one-line `ConfigError` that begins with the name of the key. No error
shows a value that could be an API key.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any
from urllib.parse import urlsplit

import yaml

from grpo_trainable.config import ConfigError, integer, number, pair, text
from grpo_trainable.config.values import Settings
from grpo_trainable.text import did_you_mean

MAX_WEIGHT = 1e6
RUBRICS = "rubrics"  # name of the reward part for the rubrics that the judge writes
# Names that no criterion may have, because other reward parts have them (see `Score.all_parts`).
RESERVED = ("answer", "format", RUBRICS)
# Entries of a request that the judge's file must not set.
OUR_PARAMETERS = ("messages", "model", "n", "stream")
# Parameters of a request, unless the file sets others. At temperature 0, most endpoints give nearly
# the same verdict again.
PARAMETERS = {"temperature": 0, "max_tokens": 512}
REQUIRED = ("endpoint", "model", "criteria")


def _is_name(name: str) -> bool:
    return re.fullmatch(r"[A-Za-z][\w-]*", name) is not None and name not in RESERVED


def _is_filled(value: str) -> bool:
    return bool(value.strip())


@dataclass(frozen=True, kw_only=True)
class Criterion(Settings):
    """One criterion of a rubric."""

    name: str = text(
        "",
        expected=f"letters, digits, _ and -, and none of {', '.join(RESERVED)}",
        valid=_is_name,
    )
    description: str = text("", expected="text", valid=_is_filled)
    # A negative weight makes a criterion a penalty.
    weight: float = number(1.0, minimum=-MAX_WEIGHT, maximum=MAX_WEIGHT)


@dataclass(frozen=True, kw_only=True)
class JudgeSettings(Settings):
    """The checked contents of a judge's file."""

    # The URL is checked separately, so that no error message shows a password in it.
    endpoint: str = text("")
    model: str = text("", expected="the name of a model", valid=_is_filled)
    # Environment variable that holds the API key. None: the endpoint needs no key.
    key_variable: str | None = text(None)
    # The lowest and the highest score of a criterion.
    scale: tuple[float, float] = pair(
        (0.0, 2.0),
        expected="two numbers, the lowest and the highest score, such as [0, 2]",
        valid=lambda low, high: low < high,
    )
    concurrency: int = integer(8, minimum=1, maximum=256)  # maximum number of concurrent calls
    timeout_s: float = number(60.0, above=0, maximum=3600)  # time limit of one call
    retries: int = integer(4, minimum=0, maximum=20)  # maximum number of retries of a failed call
    # Maximum number of rubrics per prompt that the judge writes. 0: it writes none.
    max_rubrics: int = integer(0, minimum=0, maximum=50)
    parameters: str = json.dumps(PARAMETERS)  # additional entries of each request, as JSON
    criteria: tuple[Criterion, ...] = ()


def read_judge_file(path: str) -> JudgeSettings:
    """Read and check the file of a judge.

    Raises:
        ConfigError: The file cannot be read or contains a mistake. The message is one line.
    """
    given = _keys_of(_load(path), JudgeSettings, "")
    for key in REQUIRED:
        if key not in given:
            raise ConfigError(f"{key} is missing")
    _check_endpoint(given["endpoint"])
    _check_variable(given.get("key_variable"))
    criteria = _criteria(given["criteria"])
    parameters = _parameters(given.get("parameters", {}))
    return JudgeSettings(**{**given, "criteria": criteria, "parameters": parameters})


def api_key(settings: JudgeSettings) -> str | None:
    """Return the API key from the environment, or None if the endpoint needs no key.

    Raises:
        ConfigError: The variable is not set, or its value cannot be sent in a header.
    """
    variable = settings.key_variable
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ConfigError(f"key_variable={variable}: this environment variable is not set")
    if not re.fullmatch("[!-~]+", key):
        raise ConfigError(f"key_variable={variable}: the value of this variable is not an API key")
    return key


class _Loader(yaml.SafeLoader):
    """A loader that rejects repeated keys. By default, the last of the repeated keys would win."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        found = super().construct_mapping(node, deep)
        if len(found) < len(node.value):
            mark = node.start_mark
            raise yaml.MarkedYAMLError(problem="a key occurs twice", problem_mark=mark)
        return found


def _load(path: str) -> Any:
    try:
        with open(path, encoding="utf-8") as file:
            return yaml.load(file, _Loader)  # a subclass of the safe loader
    except OSError as error:
        raise ConfigError(f"cannot be read ({error.strerror})") from None
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f" in line {error.problem_mark.line + 1}"
        raise ConfigError(f"is not valid YAML{line}: {error.problem}") from None
    except (yaml.YAMLError, ValueError, RecursionError):
        raise ConfigError("is not valid YAML") from None


def _keys_of(given: Any, kind: type[Settings], where: str) -> dict[str, Any]:
    """Check that `given` is a mapping whose keys are fields of `kind`."""
    known = [item.name for item in fields(kind)]  # type: ignore[arg-type]
    if not isinstance(given, Mapping):
        raise ConfigError(f"{where}must be a mapping with keys from {', '.join(known)}")
    for key in given:
        if key not in known:
            near = did_you_mean(str(key), known)
            raise ConfigError(
                f"{where}unknown key {key}; {near or 'the keys are ' + ', '.join(known)}"
            )
    return dict(given)


def _check_endpoint(endpoint: Any) -> None:
    if isinstance(endpoint, str):
        try:
            url = urlsplit(endpoint)
            _ = url.port  # raises ValueError if the port is not a number
        except ValueError:
            url = None
        if url is not None and url.scheme in ("http", "https") and url.hostname:
            if url.username is None and not url.query and not url.fragment:
                return
            raise ConfigError(
                "endpoint must not contain a user, a password or a query; the API key comes from "
                "the environment variable that key_variable names"
            )
    raise ConfigError("endpoint must be a URL such as https://api.openai.com/v1")


def _check_variable(name: Any) -> None:
    if name is not None and not (isinstance(name, str) and re.fullmatch("[A-Z][A-Z0-9_]*", name)):
        raise ConfigError(
            "key_variable must be the name of an environment variable, in capital letters, such "
            "as OPENAI_API_KEY; never write the key into the file"
        )


def _criteria(given: Any) -> tuple[Criterion, ...]:
    if not isinstance(given, list) or not given:
        raise ConfigError("criteria must be a list of at least one criterion")
    criteria = tuple(_criterion(entry, number) for number, entry in enumerate(given, start=1))
    names = [criterion.name for criterion in criteria]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"criteria: two criteria have the name {name}")
    if not any(criterion.weight for criterion in criteria):
        raise ConfigError("criteria: at least one weight must differ from 0")
    return criteria


def _criterion(given: Any, number: int) -> Criterion:
    where = f"criterion {number}: "
    entry = _keys_of(given, Criterion, where)
    for key in ("name", "description"):
        if key not in entry:
            raise ConfigError(f"{where}{key} is missing")
    try:
        return Criterion(**entry)
    except ConfigError as error:
        raise ConfigError(f"{where}{error}") from None


def _parameters(given: Any) -> str:
    """Return the parameters of a request as JSON. A null removes the parameter."""
    if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
        raise ConfigError("parameters must be a mapping, such as {temperature: 0}")
    for key in given:
        if key in OUR_PARAMETERS:
            raise ConfigError(f"parameters: {key} cannot be set")
    try:
        own = {key: value for key, value in {**PARAMETERS, **given}.items() if value is not None}
        return json.dumps(own, allow_nan=False)
    except (TypeError, ValueError):
        raise ConfigError("parameters must contain only JSON values") from None
