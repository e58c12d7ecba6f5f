"""Imports run in one direction, both in the source of every file and in a fresh interpreter."""

from __future__ import annotations

import ast
import functools
import graphlib
import importlib.metadata
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from callbacks.trackers.tracked_run import TRACKERS
from grpo_trainable.storage import ray_private
from grpo_trainable.tasks import TASKS

ROOT = Path(__file__).resolve().parents[2]
# Each package and the other packages that it may import.
PACKAGES: dict[str, set[str]] = {
    "grpo_trainable": set(),
    "callbacks": {"grpo_trainable"},
    "search_spaces": {"grpo_trainable"},
    "reports": {"grpo_trainable", "search_spaces"},
    "tuning": {"grpo_trainable", "callbacks", "search_spaces", "reports"},
    "launch": {"grpo_trainable", "callbacks", "search_spaces", "reports", "tuning"},
}

# The rooms (subpackages or modules) of grpo_trainable that a package may not import.
NOT_FOR = {"callbacks": {"learner", "generator"}, "search_spaces": {"learner", "generator"}}

# The rooms of grpo_trainable, lowest first. Each may import the rooms listed for it, and everything
# that those rooms may import, as docs/architecture.md shows. A string `module:name` does not count
# as an import.
FLOORS: dict[str, set[str]] = {
    "telemetry": set(),
    "algo": set(),
    "environments": set(),
    "text": set(),
    "plugins": {"text"},
    "protocol": {"telemetry"},
    "storage": {"protocol"},
    "models": {"plugins", "protocol"},
    "config": {"models"},
    "command_line": {"config"},
    "transports": {"config", "models", "storage"},
    "tasks": {"config", "environments", "models", "storage"},
    "adapters": {"environments", "tasks"},
    "engines": {"tasks"},
    "pipeline": {"tasks", "transports"},
    "control": {"engines"},
    "learner": {"algo", "config", "models", "storage"},
    "generator": {"engines", "learner"},
    "simulation": {"pipeline"},
    "cluster": {"generator", "pipeline"},
    "tools": {"generator", "pipeline"},
    "trial": {"cluster"},
    "trainable": {"trial"},
    "rllib": {"trial"},
    # The package loads its names lazily; a test below checks what importing it loads.
    "": {"config", "trainable"},
}
MAY_IMPORT_RAY = {"transports", "storage", "cluster", "trial", "trainable", "rllib"}
# Ray may move its private and alpha names. Only this module may use them.
RAY_PRIVATE = "grpo_trainable.storage.ray_private"
UNSTABLE_RAY = re.compile(
    r"ray\.(air|experimental|tune\.execution|util\.collective|([\w.]+\.)?_(?!_))[\w.]*"
)
STANDARD_LIBRARY_ONLY = {"plugins", "config", "environments", "text"}
STANDARD_LIBRARY_AND_OURS = {*sys.stdlib_module_names, "grpo_trainable"}


def _below(room: str) -> set[str]:
    """Return the room and all rooms that it may import, directly or indirectly."""
    return {room}.union(*(_below(other) for other in FLOORS[room]))


MAY_IMPORT = {room: _below(room) for room in FLOORS}


@functools.cache
def sources() -> dict[str, str]:
    """Return the source of every file in the packages, by dotted module name."""
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
    """Yield the dotted names that a source imports, even in functions and type-checking blocks."""
    parents = module.split(".") if package else module.split(".")[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = parents[: len(parents) - node.level + 1] if node.level else []
            prefix = ".".join([*base, *([node.module] if node.module else [])])
            # In `from grpo_trainable import plugins`, the last part is a module.
            yield from (f"{prefix}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call):
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            first = node.args[0] if node.args else None
            if called in ("import_module", "__import__") and isinstance(first, ast.Constant):
                yield str(first.value)


def files_imported_by(module: str) -> set[str]:
    """Return this project's modules that `module` imports.

    For each imported name, the module is the longest prefix that is a file.
    """
    found = set()
    for name in imported(module, sources()[module], package=is_package(module)):
        parts = name.split(".")
        prefixes = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
        found |= {next((prefix for prefix in prefixes if prefix in sources()), module)}
    return found - {module}


def violations(module: str, source: str, *, package: bool = False) -> list[str]:
    """Return the imports of one module that the rules forbid."""
    top, _, rest = module.partition(".")
    room = rest.partition(".")[0]
    bad = []
    for name in imported(module, source, package=package):
        target, _, inner = name.partition(".")
        target_room = inner.partition(".")[0]
        if target in PACKAGES and target not in {top, *PACKAGES[top]}:
            bad.append(name)
        elif top == "grpo_trainable":
            # A name that the package provides lazily counts as an import of its room.
            looks_into = target == "grpo_trainable" and target_room not in ("", "__version__")
            if (
                (looks_into and target_room not in MAY_IMPORT[room])
                or (target == "ray" and room not in MAY_IMPORT_RAY)
                or (room in STANDARD_LIBRARY_ONLY and target not in STANDARD_LIBRARY_AND_OURS)
            ):
                bad.append(name)
        elif target_room in NOT_FOR.get(top, ()):
            bad.append(name)
    return bad


@pytest.mark.slow
def test_modules_import_only_what_stands_below_them():
    found = {}
    for module, source in sources().items():
        parts = module.split(".")
        if parts[0] == "grpo_trainable" and len(parts) > 1:
            assert parts[1] in FLOORS, f"{module}: a new room needs its line in FLOORS"
        found[module] = violations(module, source, package=is_package(module))
    assert {module: names for module, names in found.items() if names} == {}


@pytest.mark.slow
def test_no_files_import_each_other_in_a_circle():
    graph = {module: files_imported_by(module) for module in sources()}
    graph["grpo_trainable"] = set()  # the package provides names lazily
    tuple(graphlib.TopologicalSorter(graph).static_order())  # raises if there is a cycle


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("grpo_trainable.config", "import torch"),
        ("grpo_trainable.config.values", "import numpy as np"),
        ("grpo_trainable.config.schema", "from grpo_trainable.transports import shm"),
        ("grpo_trainable.config.schema", "from grpo_trainable.engines.engine import Engine"),
        ("grpo_trainable.plugins", "from grpo_trainable.config import ConfigError"),
        ("grpo_trainable.tasks.keyword", "from grpo_trainable.pipeline import Pipeline"),
        ("grpo_trainable.tasks.keyword", "from ..engines import engine"),
        ("grpo_trainable.algo.losses", "from grpo_trainable import config"),
        ("grpo_trainable.algo.losses", "from grpo_trainable import GRPOConfig"),
        ("grpo_trainable.models.transformer", "import grpo_trainable.algo.masking"),
        ("grpo_trainable.protocol.rollout", "from grpo_trainable.config import GRPOConfig"),
        ("grpo_trainable.engines.engine", "import grpo_trainable.learner.learner"),
        ("grpo_trainable.learner.learner", "import ray"),
        ("grpo_trainable.learner.learner", "importlib.import_module('ray.util')"),
        ("grpo_trainable.learner.learner", "from grpo_trainable.transports import object_store"),
        ("grpo_trainable.pipeline", "from grpo_trainable.trainable import GRPOTrainable"),
        ("grpo_trainable.pipeline", "from grpo_trainable.generator.generator import Generator"),
        ("grpo_trainable.trainable", "import callbacks"),
        ("grpo_trainable.trainable", "from launch.tune import main"),
        ("callbacks.versions", "from grpo_trainable.learner.learner import Learner"),
        ("search_spaces.spaces", "from launch import tune"),
        ("search_spaces.spaces", "from reports.summary import median"),
        ("reports.page", "from launch.report import main"),
        ("reports.page", "from callbacks import bands"),
        ("callbacks.bands", "from tuning.plan import Plan"),
    ],
)
def test_forbidden_import_is_noticed(module, source):
    assert len(violations(module, source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("grpo_trainable.config", "import json\nfrom collections.abc import Mapping"),
        ("grpo_trainable.config.schema", "from grpo_trainable.plugins import is_reference"),
        ("grpo_trainable.algo.losses", "import torch\nfrom .masking import masked_mean"),
        ("grpo_trainable.learner.learner", "from grpo_trainable.algo import losses"),
        ("grpo_trainable.trial", "import ray\nfrom grpo_trainable.pipeline import Pipeline"),
        ("callbacks.versions", "from grpo_trainable import metrics\nfrom ray import tune"),
        ("launch.tune", "import launch.report, grpo_trainable.learner"),
        (
            "reports.page",
            "import grpo_trainable.telemetry.machine_load\nfrom search_spaces import SPACES",
        ),
    ],
)
def test_import_of_what_stands_below_is_allowed(module, source):
    assert violations(module, source) == []


# ---- docs/architecture.md ----------------------------------------------------------------------

ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def table_below(header: str) -> list[list[str]]:
    """Return the cells of the table in docs/architecture.md that begins with `header`."""
    assert header in ARCHITECTURE
    lines = ARCHITECTURE.split(header)[1].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def named(text: str) -> list[str]:
    """Return the names in backticks, without `/` or `.py`, and "" for `__init__`."""
    found = re.findall(r"`(\w+)(?:/|\.py)?`", text)
    return ["" if name == "__init__" else name for name in found]


def further(cell: str) -> set[str]:
    """Return the rooms that a cell in the last column of the table of rooms means."""
    if not cell.startswith("all that "):
        return set(named(cell))
    (room,) = named(cell)
    return _below(room) - {room}


def test_page_has_the_table_of_rooms():
    rows = table_below("| room | what it holds | built on |")
    built_on = {room: set(named(cell)) for name, _, cell, _ in rows for room in named(name)}
    assert built_on == FLOORS
    also = {room: further(cell) for name, _, _, cell in rows for room in named(name)}
    for room, direct in FLOORS.items():
        assert also[room] - direct == MAY_IMPORT[room] - {room} - direct, room


def test_page_draws_every_room_above_all_that_it_imports():
    (drawing,) = re.findall(r"```text\n(10 .*?)```", ARCHITECTURE, re.DOTALL)
    lines = {
        "" if name == "__init__" else name: int(line.split()[0])
        for line in drawing.splitlines()
        for name in re.findall(r"(\w+)(?:/|\.py)", line)
    }
    assert lines.keys() == FLOORS.keys()
    for room, others in FLOORS.items():
        assert all(lines[other] < lines[room] for other in others), room


def test_page_has_the_table_of_packages():
    rows = {named(row[0])[0]: row[2] for row in table_below("| package | what it holds |")}
    allowed, refused = {}, {}
    for package, cell in rows.items():
        yes, _, no = cell.partition("but not")
        allowed[package] = set(named(yes))
        refused[package] = set(named(no))
    assert {"grpo_trainable": set(), **allowed} == PACKAGES
    assert {package: rooms for package, rooms in refused.items() if rooms} == NOT_FOR


@pytest.mark.slow
def test_page_names_the_rooms_that_may_import_ray():
    (told,) = re.findall(r"only (`transports/`.*?) may import Ray", ARCHITECTURE, re.DOTALL)
    assert set(named(told)) == MAY_IMPORT_RAY
    (beside,) = re.findall(r"Of the other packages, only (.*?)\simport it\.", ARCHITECTURE)
    importers = {
        module.split(".")[0]
        for module, source in sources().items()
        for name in imported(module, source, package=is_package(module))
        if name.split(".")[0] == "ray"
    }
    assert set(named(beside)) == importers - {"grpo_trainable"}


def names_of_ray(module: str, source: str, *, package: bool = False) -> Iterator[str]:
    """Yield the dotted names in a source: imported names, attributes, and whole strings."""
    yield from imported(module, source, package=package)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            yield ast.unparse(node)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def unstable_names(module: str, source: str, *, package: bool = False) -> list[str]:
    """Return the private and alpha names of Ray in a source. Only one file may contain any."""
    names = names_of_ray(module, source, package=package)
    return sorted({name for name in names if UNSTABLE_RAY.fullmatch(name)})


@pytest.mark.slow
def test_one_file_holds_all_private_and_alpha_names_of_ray():
    found = {
        module: unstable_names(module, source, package=is_package(module))
        for module, source in sources().items()
    }
    assert found.pop(RAY_PRIVATE)
    assert {module: names for module, names in found.items() if names} == {}


@pytest.mark.parametrize(
    "source",
    [
        "from ray.train._internal.storage import StorageContext",
        "from ray.train import _internal",
        "import ray._private.state",
        "from ray.air.constants import EXPR_RESULT_FILE",
        "from ray import air",
        "def nixl():\n    from ray import experimental",
        "from ray.tune.execution import tune_controller",
        "importlib.import_module('ray.util.collective.const')",
        "import ray\nray._private.worker.global_worker",
        "logging.getLogger('ray.train._internal.syncer')",
    ],
)
def test_private_name_of_ray_is_noticed(source):
    assert unstable_names("callbacks.bands", source)


@pytest.mark.parametrize(
    "source",
    [
        "from ray import tune\nfrom ray.tune.result import RESULT_DUPLICATE",
        "import ray\nray.util.get_node_ip_address()\nray.__version__",
        "actor.handle.__ray_call__.remote()",
    ],
)
def test_public_name_of_ray_is_allowed(source):
    assert unstable_names("callbacks.bands", source) == []


def test_names_of_ray_load_their_modules_late():
    loaded = loaded_after([RAY_PRIVATE])
    assert "ray" not in loaded


def test_private_names_of_ray_are_where_the_table_says():
    for name in ray_private._MODULES:
        if ray_private.too_old_for(name) is None:
            getattr(ray_private, name)  # raises if Ray has moved it
        else:
            assert not hasattr(ray_private, name)
    declared = {
        alias.name
        for node in ast.walk(ast.parse(sources()[RAY_PRIVATE]))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ray.")
        for alias in node.names
    }
    assert declared == set(ray_private._MODULES)


def loaded_after(modules: list[str]) -> set[str]:
    """Return `sys.modules` of a fresh interpreter after an import of `modules`."""
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


@pytest.mark.slow
def test_package_and_config_load_only_the_standard_library():
    modules = ["grpo_trainable", "grpo_trainable.storage.digests", *rooms(*STANDARD_LIBRARY_ONLY)]
    loaded = {name.partition(".")[0] for name in loaded_after(modules)}
    assert loaded.isdisjoint({"torch", "numpy", "ray", "pyarrow"})


@pytest.mark.slow
def test_processes_that_score_and_play_load_neither_torch_nor_ray():
    workers = ["grpo_trainable.generator.score_worker", "grpo_trainable.generator.env_worker"]
    built_in = {reference.partition(":")[0] for reference in TASKS.values()}
    loaded = loaded_after([*workers, "grpo_trainable.tasks.custom", *built_in])
    assert loaded.isdisjoint({"torch", "ray"})


@pytest.mark.slow
def test_only_the_rooms_that_may_load_ray():
    without_ray = [room for room in FLOORS if room and MAY_IMPORT_RAY.isdisjoint(_below(room))]
    assert "ray" not in loaded_after(rooms(*without_ray))


@pytest.mark.slow
def test_the_command_checks_and_runs_trials_without_torch():
    of_extras = {f"callbacks.trackers.{tracker}_run" for tracker in TRACKERS}
    modules = [*(set(_all_of("callbacks")) - of_extras), *_all_of("tuning")]
    program = (
        "import importlib, json, sys\n"
        "from launch.tune import main\n"
        "assert main(['--space', 'async_vs_sync', '--dry-run']) == 0\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        "print(json.dumps(sorted(sys.modules)))"
    )
    loaded = modules_printed_by(program)
    assert {"ray.tune", "tokenizers", "tuning.memory_estimate"} <= loaded
    assert "torch" not in loaded


@pytest.mark.slow
def test_no_process_of_a_trial_loads_the_compiler_of_torch():
    loaded = loaded_after(["grpo_trainable.trial", *rooms("learner", "generator", "engines")])
    assert "torch" in loaded
    assert "torch._dynamo" not in loaded


def _all_of(package: str) -> list[str]:
    return [name for name in sources() if name.startswith(f"{package}.")]


def reached_from(modules: list[str]) -> set[str]:
    """Return the project's modules that `modules` import, directly or indirectly."""
    found: set[str] = set()
    waiting = list(modules)
    while waiting:
        module = waiting.pop()
        if module not in found and module != "grpo_trainable":  # the package provides names lazily
            found.add(module)
            waiting += files_imported_by(module)
    return found


@pytest.mark.slow
def test_callbacks_and_search_spaces_reach_no_actor():
    both = ("callbacks", "search_spaces")
    reached = reached_from([name for name in sources() if name.split(".")[0] in both])
    assert "grpo_trainable.protocol.round_records" in reached
    actors = ("grpo_trainable.learner", "grpo_trainable.generator")
    assert [name for name in reached if name.startswith(actors)] == []
    assert "grpo_trainable.learner.learner" in reached_from(["grpo_trainable.trainable"])


def test_every_directory_with_code_is_a_package():
    # The wheel contains only packages, so it would leave out a directory without `__init__.py`.
    folders = {path.parent for name in PACKAGES for path in (ROOT / name).rglob("*.py")}
    assert [str(path) for path in folders if not (path / "__init__.py").is_file()] == []


@pytest.mark.slow
def test_no_command_hides_a_library():
    # `python launch/tune.py` puts launch/ first on the path.
    names = {path.stem for path in (ROOT / "launch").glob("*.py")} - {"__init__"}
    libraries = {*sys.stdlib_module_names, *importlib.metadata.packages_distributions()}
    assert names.isdisjoint(libraries)


def test_oldest_and_newest_supported_ray_are_tested():
    project, makefile = (
        (ROOT / name).read_text(encoding="utf-8") for name in ("pyproject.toml", "Makefile")
    )
    (versions,) = re.findall(r"^RAY_VERSIONS := (.+)", makefile, re.MULTILINE)
    tested = [int(version.split(".")[1]) for version in versions.split()]
    bounds = re.findall(r'"ray\[[\w,]+\]>=2\.(\d+),<2\.(\d+)"', project)
    assert bounds == [(str(tested[0]), str(tested[-1] + 1))] * 2


def test_package_and_distribution_have_one_version():
    import grpo_trainable

    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'\nversion = "{grpo_trainable.__version__}"\n' in project
