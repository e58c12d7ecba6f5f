"""Imports run one way: read from the source of every file, and tried in a fresh interpreter."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Each package and the packages it may import besides itself.
PACKAGES: dict[str, set[str]] = {
    "grpo_trainable": set(),
    "callbacks": {"grpo_trainable"},
    "search_spaces": {"grpo_trainable"},
    "reports": {"grpo_trainable", "search_spaces"},
    "tuning": {"grpo_trainable", "callbacks", "search_spaces", "reports"},
    "launch": {"grpo_trainable", "callbacks", "search_spaces", "reports", "tuning"},
}

# The rooms of grpo_trainable and the rooms each may look into besides itself.
FOUNDATION = {
    "plugins",
    "config",
    "rollout",
    "checksums",
    "digests",
    "algo",
    "models",
    "tasks",
    "stages",
    "threads",
    "atomic",
    "tensor_files",
    "command_line",
    "wording",
    "environments",
    "control",
    "storage",
}
CLOCKS = {"timers", "metrics", "noise"}
MIDDLE = {"engines", "versions", "replay_buffer", "checkpointing", "prompts", "details", "inputs"}
MIDDLE |= {"messages", "weight_transfer", "stops", "exporting", "memory"}
BELOW_ACTORS = FOUNDATION | CLOCKS | MIDDLE
# The pipeline knows actors by their messages alone.
PIPELINE = BELOW_ACTORS | {"calls", "liveness"}
# Rooms whose package is a table of what there is, of which the config may read nothing but that.
TABLES = {"engines", "transports"}
MAY_IMPORT: dict[str, set[str]] = {
    **{room: set() for room in FOUNDATION},
    "plugins": {"wording"},
    "config": {"plugins", "wording", *TABLES},
    "command_line": {"config", "plugins"},
    "tasks": {"config", "plugins", "environments", "control"},
    "control": {"plugins"},
    "models": {"control"},
    **dict.fromkeys(CLOCKS, FOUNDATION | CLOCKS),
    **dict.fromkeys(MIDDLE, BELOW_ACTORS),
    "actors": BELOW_ACTORS,
    "transports": BELOW_ACTORS | {"calls"},
    "calls": set(),
    "last_policy": set(),
    "liveness": {"calls"},
    "remote": {"calls", "timers"},
    "room": set(),
    "clocks": {"timers"},
    "shipping": {"atomic", "digests"},
    "learner_group": PIPELINE,
    "pipeline": PIPELINE | {"learner_group"},
    "adapters": {"environments", "tasks"},
    "environment_check": BELOW_ACTORS | {"actors"},
    "pretraining": BELOW_ACTORS | {"actors"},
    "evaluation": PIPELINE | {"actors", "pipeline"},
    "prompt_sets": BELOW_ACTORS,
    "simulation": PIPELINE | {"learner_group", "pipeline"},
    "trial_actors": PIPELINE
    | {"actors", "transports", "learner_group", "remote", "room", "shipping", "clocks"},
    "trial_storage": {"checkpointing", "storage"},
    "trial": PIPELINE | {"pipeline", "remote", "trial_actors", "trial_storage"},
    "trainable": PIPELINE | {"trial", "shipping", "last_policy"},
    "rllib": PIPELINE | {"actors", "trial"},
    # The package itself hands out names lazily; what loads with it is tried below.
    "": {"config", "trainable"},
}
MAY_IMPORT_RAY = {"transports", "remote", "trial_actors", "trial_storage", "trial"}
MAY_IMPORT_RAY |= {"trainable", "rllib", "room", "shipping", "clocks"}
STANDARD_LIBRARY_ONLY = {"plugins", "config", "digests", "environments"}
TORCH_FREE = STANDARD_LIBRARY_ONLY | {"tasks"}
REFERENCE = re.compile(r"grpo_trainable(\.\w+)+:\w+")
STANDARD_LIBRARY_AND_OURS = {*sys.stdlib_module_names, "grpo_trainable"}


@functools.cache
def sources() -> dict[str, str]:
    """Dotted module name → source, of every file of the packages."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = path.read_text(encoding="utf-8")
    return found


def is_package(module: str) -> bool:
    return (ROOT / Path(*module.split("."))).is_dir()


def imported(module: str, source: str, *, package: bool) -> Iterator[str]:
    """Yield the dotted names that a source imports, also in functions and type-checking blocks.

    Tables name what is imported later as `module:name`, which counts as well.
    """
    parents = module.split(".") if package else module.split(".")[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = parents[: len(parents) - node.level + 1] if node.level else []
            prefix = ".".join([*base, *([node.module] if node.module else [])])
            # `from grpo_trainable import rollout` names a module as its last part.
            yield from (f"{prefix}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call):
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            first = node.args[0] if node.args else None
            if called in ("import_module", "__import__") and isinstance(first, ast.Constant):
                yield str(first.value)
        elif isinstance(node, ast.Constant) and REFERENCE.fullmatch(str(node.value)):
            yield str(node.value).partition(":")[0]


def is_in_package(name: str) -> bool:
    """Whether a dotted name leads into a module of a room, not only to what its package holds."""
    return ".".join(name.split(".")[:3]) in sources()


def violations(module: str, source: str, *, package: bool = False) -> list[str]:
    """The imports of one module that the rules forbid."""
    top, _, rest = module.partition(".")
    room = rest.partition(".")[0]
    bad = []
    for name in imported(module, source, package=package):
        target, _, inner = name.partition(".")
        target_room = inner.partition(".")[0]
        if target in PACKAGES and target not in {top, *PACKAGES[top]}:
            bad.append(name)
        elif top == "grpo_trainable":
            # A name the package hands out lazily stands for the room it comes from: ask that room.
            looks_into = target == "grpo_trainable" and target_room not in ("", "__version__")
            if (
                (looks_into and target_room not in {room, *MAY_IMPORT[room]})
                or (target == "ray" and room not in MAY_IMPORT_RAY)
                or (target == "torch" and room in TORCH_FREE)
                or (room in STANDARD_LIBRARY_ONLY and target not in STANDARD_LIBRARY_AND_OURS)
                or (room == "config" and target_room in TABLES and is_in_package(name))
            ):
                bad.append(name)
        elif top in ("callbacks", "search_spaces") and name.startswith("grpo_trainable.actors"):
            bad.append(name)
    return bad


def test_modules_import_only_what_stands_below_them():
    found = {}
    for module, source in sources().items():
        parts = module.split(".")
        if parts[0] == "grpo_trainable" and len(parts) > 1:
            assert parts[1] in MAY_IMPORT, f"{module}: a new room needs its line in MAY_IMPORT"
        found[module] = violations(module, source, package=is_package(module))
    assert {module: names for module, names in found.items() if names} == {}


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("grpo_trainable.config", "import torch"),
        ("grpo_trainable.config.values", "import numpy as np"),
        ("grpo_trainable.config.schema", "from grpo_trainable.transports import shm"),
        ("grpo_trainable.config.schema", "from grpo_trainable.engines.base import Engine"),
        ("grpo_trainable.plugins", "from grpo_trainable.config import ConfigError"),
        ("grpo_trainable.tasks.keyword", "def f():\n    from torch import Tensor"),
        ("grpo_trainable.tasks.keyword", "from grpo_trainable.prompts import Prompts"),
        ("grpo_trainable.tasks.keyword", "from ..rollout import Request"),
        ("grpo_trainable.algo.losses", "from grpo_trainable import config"),
        ("grpo_trainable.algo.losses", "from grpo_trainable import GRPOConfig"),
        ("grpo_trainable.models.transformer", "import grpo_trainable.algo.masking"),
        ("grpo_trainable.rollout", "from . import versions"),
        ("grpo_trainable.engines.base", "import grpo_trainable.actors.learner"),
        ("grpo_trainable.actors.learner", "import ray"),
        ("grpo_trainable.actors.learner", "importlib.import_module('ray.util')"),
        ("grpo_trainable.actors.learner", "from grpo_trainable.transports import object_store"),
        ("grpo_trainable.pipeline", "from grpo_trainable.trainable import GRPOTrainable"),
        ("grpo_trainable.pipeline", "from grpo_trainable.actors.generator import Generator"),
        ("grpo_trainable.trainable", "import callbacks"),
        ("grpo_trainable.trainable", "from launch.tune import main"),
        ("callbacks.versions", "from grpo_trainable.actors.learner import Learner"),
        ("search_spaces.lag", "from launch import tune"),
        ("search_spaces.lag", "from reports.summary import median"),
        ("reports.page", "from launch.report import main"),
        ("reports.page", "from callbacks import kl"),
        ("callbacks.kl", "from tuning.plan import Plan"),
    ],
)
def test_forbidden_import_is_noticed(module, source):
    assert len(violations(module, source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("grpo_trainable.config", "import json\nfrom collections.abc import Mapping"),
        ("grpo_trainable.config.schema", "from grpo_trainable.transports import TRANSPORTS"),
        ("grpo_trainable.algo.losses", "import torch\nfrom .masking import masked_mean"),
        ("grpo_trainable.actors.learner", "from grpo_trainable.algo import losses"),
        ("grpo_trainable.trial", "import ray\nfrom grpo_trainable.pipeline import Pipeline"),
        ("callbacks.versions", "from grpo_trainable import metrics\nfrom ray import tune"),
        ("launch.tune", "import launch.report, grpo_trainable.actors"),
        ("reports.page", "import grpo_trainable.noise\nfrom search_spaces import SPACES"),
    ],
)
def test_import_of_what_stands_below_is_allowed(module, source):
    assert violations(module, source) == []


def loaded_after(modules: list[str]) -> set[str]:
    """What a fresh interpreter has in `sys.modules` once it has imported `modules`."""
    program = (
        "import importlib, json, sys\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        "print(json.dumps(sorted(sys.modules)))"
    )
    return modules_printed_by(program)


def modules_printed_by(program: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def rooms(*wanted: str) -> list[str]:
    return [
        name
        for name in sources()
        if name.startswith("grpo_trainable.") and name.split(".")[1] in wanted
    ]


def test_package_and_config_load_only_the_standard_library():
    modules = ["grpo_trainable", *rooms(*STANDARD_LIBRARY_ONLY)]
    loaded = {name.partition(".")[0] for name in loaded_after(modules)}
    assert loaded.isdisjoint({"torch", "numpy", "ray", "pyarrow"})


def test_tasks_load_neither_torch_nor_ray():
    loaded = loaded_after(["grpo_trainable", *rooms(*TORCH_FREE)])
    assert loaded.isdisjoint({"torch", "ray"})


@pytest.mark.slow
def test_only_the_rooms_that_may_load_ray():
    without_ray = [room for room in MAY_IMPORT if room and room not in MAY_IMPORT_RAY]
    assert "ray" not in loaded_after(rooms(*without_ray))


@pytest.mark.slow
def test_the_command_checks_and_runs_trials_without_torch():
    modules = [*_all_of("callbacks"), *_all_of("tuning")]
    program = (
        "import importlib, json, sys\n"
        "from launch.tune import main\n"
        "assert main(['--space', 'async_vs_sync', '--dry-run']) == 0\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        "print(json.dumps(sorted(sys.modules)))"
    )
    loaded = modules_printed_by(program)
    assert {"ray.tune", "tokenizers", "grpo_trainable.memory"} <= loaded
    assert "torch" not in loaded


@pytest.mark.slow
def test_no_process_of_a_trial_loads_the_compiler_of_torch():
    loaded = loaded_after(["grpo_trainable.trial", *rooms("actors", "engines", "transports")])
    assert "torch" in loaded
    assert "torch._dynamo" not in loaded


def _all_of(package: str) -> list[str]:
    return [name for name in sources() if name.startswith(f"{package}.")]


def reached_from(modules: list[str]) -> set[str]:
    """Our modules that these import, directly or not, also within functions."""
    found: set[str] = set()
    waiting = list(modules)
    while waiting:
        module = waiting.pop()
        if module in found or module == "grpo_trainable":  # which hands out names lazily
            continue
        found.add(module)
        for name in imported(module, sources()[module], package=is_package(module)):
            parts = name.split(".")
            prefixes = (".".join(parts[:n]) for n in range(1, len(parts) + 1))
            waiting += [prefix for prefix in prefixes if prefix in sources()]
    return found


@pytest.mark.slow
def test_callbacks_and_search_spaces_reach_no_actor():
    both = ("callbacks", "search_spaces")
    reached = reached_from([name for name in sources() if name.split(".")[0] in both])
    assert "grpo_trainable.details" in reached
    assert [name for name in reached if name.startswith("grpo_trainable.actors")] == []
    assert "grpo_trainable.actors.learner" in reached_from(["grpo_trainable.trainable"])


def test_every_directory_with_code_is_a_package():
    # The wheel takes packages only: a directory without `__init__.py` would be left out.
    folders = {path.parent for name in PACKAGES for path in (ROOT / name).rglob("*.py")}
    assert [str(path) for path in folders if not (path / "__init__.py").is_file()] == []


@pytest.mark.slow
def test_no_command_hides_a_library():
    # `python launch/tune.py` puts launch/ first on the path.
    names = {path.stem for path in (ROOT / "launch").glob("*.py")} - {"__init__"}
    libraries = {*sys.stdlib_module_names, *importlib.metadata.packages_distributions()}
    assert names.isdisjoint(libraries)


def test_package_and_distribution_have_one_version():
    import grpo_trainable

    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'\nversion = "{grpo_trainable.__version__}"\n' in project
