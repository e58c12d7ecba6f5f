"""Python objects that a user names in a setting: `module:name` or `path/to/file.py:name`.

A module is looked up in the current directory first, then on `sys.path`. Every mistake raises a
`PluginError`. This module imports only the standard library.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any, TypeVar

from grpo_trainable.text import did_you_mean

T = TypeVar("T")

MOST_NAMED = 8  # the largest number of names that an error lists


class PluginError(ValueError):
    """An error in a user's code or in the reference to it, described in one line.

    The line begins with `key=reference` or `--option reference`.
    """


def missing_library(name: str, install: str) -> str | None:
    """Return a one-line message if a library is not installed, or None if it is installed.

    Args:
        name: Name under which the library is imported.
        install: The command that installs the library.
    """
    spec = importlib.util.find_spec(name)
    # A directory without Python files, such as the ./wandb that W&B writes, has no origin.
    if spec is not None and spec.origin is not None:
        return None
    return f"the library {name} is not installed; run: {install}"


def split_reference(reference: str) -> tuple[str, str]:
    """Split a reference into the module or file and the name.

    `my/file.py:name` gives `("my/file.py", "name")`, and `module:name` gives `("module", "name")`.

    Raises:
        ValueError: The reference has neither form.
    """
    where, _, name = reference.rpartition(":")
    is_file = where.endswith(".py") and "\0" not in where
    is_module = all(part.isidentifier() for part in where.split("."))
    if not name.isidentifier() or not (is_file or is_module):
        raise ValueError("must be module:name or path/to/file.py:name")
    return where, name


def is_reference(text: str) -> bool:
    """Return True if `text` is a well-formed reference. The named object need not exist."""
    try:
        split_reference(text)
    except ValueError:
        return False
    return True


def load(key: str, reference: str, fits: Callable[[Any], bool] = callable) -> Any:
    """Return the object that the setting `key` names. By default, the object must be callable.

    Raises:
        PluginError: The object cannot be imported, or `fits` rejects it.
    """
    with _one_line_errors(key, reference):
        found = _import_name(reference, fits)
        if not fits(found):
            raise TypeError(f"{split_reference(reference)[1]} is not callable")
        return found


def load_instance(key: str, reference: str, kind: type[T]) -> T:
    """Return the object that the setting or option `key` names. It must be an instance of `kind`.

    Raises:
        PluginError: The object cannot be imported, or is not an instance of `kind`.
    """
    with _one_line_errors(key, reference):
        found = _import_name(reference, lambda value: isinstance(value, kind))
    if not isinstance(found, kind):
        wanted, got = f"{kind.__module__}.{kind.__name__}", type(found).__name__
        raise PluginError(f"{_named(key, reference)}: must be a {wanted}, got a {got}")
    return found


def load_module(key: str, path: str) -> ModuleType:
    """Import a file, and return the module.

    Raises:
        PluginError: The file cannot be imported.
    """
    with _one_line_errors(key, path):
        return _import_file(Path(path))


@contextmanager
def _one_line_errors(key: str, reference: str) -> Iterator[None]:
    try:
        yield
    except (Exception, SystemExit) as error:
        reason = one_line(error)
        raise PluginError(f"{_named(key, reference)}: cannot be imported: {reason}") from error


def _named(key: str, reference: str) -> str:
    """Return a setting or an option with its value, as written on a command line."""
    return f"{key} {reference}" if key.startswith("--") else f"{key}={reference}"


def _import_name(reference: str, fits: Callable[[Any], bool]) -> Any:
    """Return the object that `reference` names.

    If the module has no such name, the error lists fitting names from the module.
    """
    where, name = split_reference(reference)
    module = _import_file(Path(where)) if where.endswith(".py") else _import_module(where)
    if not hasattr(module, name):
        offered = [text for text, value in _own_names(module) if fits(value)]
        near = did_you_mean(name, offered)
        hint = f"{near} " if near else ""
        others = f"; {hint}it has {', '.join(offered[:MOST_NAMED])}" if offered else ""
        raise AttributeError(f"{where} has no attribute {name!r}{others}")
    return getattr(module, name)


def _own_names(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """Yield the public names of a module and their values.

    Functions and classes that the module only imports are left out.
    """
    for name, value in vars(module).items():
        has_home = inspect.isclass(value) or inspect.isroutine(value)
        home = f"{getattr(value, '__module__', None) if has_home else module.__name__}."
        if not name.startswith("_") and home.startswith(f"{module.__name__}."):
            yield name, value


def source_of(reference: str) -> str | None:
    """Find the source file of `reference`, without importing anything.

    Returns:
        The path, or None if there is no file, as for a built-in module.
    """
    where, _ = split_reference(reference)
    if where.endswith(".py"):
        return where
    path: list[str] | None = _search_path()
    spec = None
    for name in where.split("."):
        spec = PathFinder.find_spec(name, path)
        path = None if spec is None else list(spec.submodule_search_locations or [])
        if path is None:
            return None
    origin = spec.origin if spec is not None and spec.has_location else None
    # The source of a module in an archive is not a file.
    return origin if origin is not None and os.path.isfile(origin) else None


def one_line(error: BaseException) -> str:
    """Return the error in one line of at most 300 characters."""
    text = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
    return text if len(text) <= 300 else text[:299] + "…"


def users_line(error: BaseException) -> str:
    """Return the place of the error in the user's own code, as " (FILE, line N)", or ""."""
    calls = [
        (Path(frame.f_code.co_filename).name, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if _is_users(frame)
    ]
    return f" ({calls[-1][0]}, line {calls[-1][1]})" if calls else ""


def _is_users(frame: FrameType) -> bool:
    """Return True if the code is the user's own, not part of an installed package or of Python."""
    file = Path(frame.f_code.co_filename)
    module = frame.f_globals.get("__name__", "").partition(".")[0]
    is_installed = {"site-packages", "dist-packages"} & {*file.parts}
    is_generated = file.name.startswith("<")  # for example the methods of a dataclass
    ships = module in sys.stdlib_module_names or Path(__file__).parent in file.parents
    return not (is_installed or is_generated or ships)


def _search_path() -> list[str]:
    here = os.getcwd()
    return sys.path if here in sys.path else [here, *sys.path]


def _import_module(name: str) -> ModuleType:
    sys.path[:] = _search_path()
    return importlib.import_module(name)


def _import_file(path: Path) -> ModuleType:
    path = path.resolve()
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    # The module gets an invented name, because a user's json.py must not replace the standard json.
    # For the same reason, the file's directory comes last on `sys.path`. The name depends on the
    # file's contents, so a process executes the file again only if its contents have changed.
    digest = hashlib.sha256(bytes(path) + path.read_bytes()).hexdigest()
    name = f"_plugin_{path.stem}_{digest[:16]}"
    if name not in sys.modules:
        _execute(name, path)
    return sys.modules[name]


class _Uncached(SourceFileLoader):
    """Loader that always compiles the file.

    Python uses a compiled file in `__pycache__` if the source file still has the recorded size and
    the recorded modification time, in whole seconds. So after a quick edit, Python could run the
    old code.
    """

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


def _execute(name: str, path: Path) -> None:
    spec = importlib.util.spec_from_file_location(name, path, loader=_Uncached(name, str(path)))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
