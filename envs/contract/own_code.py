"""Code that a user writes, loaded by name: a suite, an action parser, an engine, a learner.

load_own       the object that `package.module:Attribute` or `file.py:Attribute` names
code_digest    a digest of the file that defines it, which changes with the code
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from bus.error_texts import did_you_mean, one_line
from bus.errors import TaskError


def load_own(
    what: str,
    name: str,
    path: str,
    *,
    once: bool = False,
    instantiate: bool = True,
    method: str = "",
) -> object:
    """Return the object at `path`. A class is instantiated, unless `instantiate` is false.

    A file's path is relative to the current folder, and modules are searched there too. `what` (e.g. suite,
    action parser) and `name` (as the user wrote it) are for errors. With `once`, the file runs only once in
    this process, for code that registers something. Raises TaskError; for a path without an attribute the
    error suggests the classes that have `method`.
    """
    module_name, _, attribute = path.rpartition(":")
    module = _import(what, name, module_name or path, once=once)
    if not attribute or not module_name:
        raise TaskError(
            f"{what} {name}: {_fix_without_class(what, module_name or path, module, method)}"
        )
    if not hasattr(module, attribute):
        public = [key for key in vars(module) if not key.startswith("_")]
        raise TaskError(
            f"{what} {name}: {module_name} has no {attribute!r}{did_you_mean(attribute, public)}"
        )
    value: object = getattr(module, attribute)
    try:
        return value() if instantiate and isinstance(value, type) else value
    except (Exception, SystemExit) as error:
        raise TaskError(f"{what} {name}: {attribute}() failed: {one_line(error)}") from error


def _fix_without_class(what: str, path: str, module: ModuleType, method: str) -> str:
    """Return the part of the error that tells what to write in place of a path without a class."""
    own = {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, type) and value.__module__ == module.__name__
    }
    fitting = [f"{path}:{name}" for name, value in own.items() if hasattr(value, method)]
    if fitting or not method:
        return f"name its class, too: {' or '.join(fitting) or f'{path}:CLASS'}"
    others = f"; its classes are {', '.join(own)}" if own else ""
    return f"{path} has no {what}: no class of it has a method {method}{others}"


def code_digest(thing: object) -> str:
    """Return a digest of the file that defines the class of a user's object; "" for a class of dart.

    Modules that the file imports do not change the digest.
    """
    name = type(thing).__module__
    path = getattr(sys.modules.get(name), "__file__", None)
    if path is None or name.partition(".")[0] in ("bus", "dart_cli", "envs"):
        return ""
    return hashlib.blake2b(Path(path).read_bytes(), digest_size=8).hexdigest()


def _import(what: str, name: str, module_name: str, *, once: bool) -> ModuleType:
    """Return a module by its name or its file, as `load_own` describes it. Raises TaskError."""
    if not module_name.endswith(".py"):
        example = f"My{what.capitalize()}"
        if not all(part.isidentifier() for part in module_name.split(".")):
            raise TaskError(
                f"{what} {name}: {module_name!r} is no module; "
                f"name my_package.my_module:{example} or path/to/file.py:{example}"
            )
        here = str(Path.cwd())
        if here not in sys.path and "" not in sys.path:  # a console script has neither
            sys.path.append(here)  # at the end, so that a folder there hides no installed package
        try:
            return importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            raise TaskError(
                f"{what} {name}: cannot import {module_name}: no module {error.name!r}; "
                "install it or add its folder to PYTHONPATH"
            ) from error
        except (Exception, SystemExit) as error:  # the user's module: they fix whatever it raises
            raise TaskError(
                f"{what} {name}: {module_name} cannot be loaded, fix it: {one_line(error)}"
            ) from error
    file = Path(module_name)
    if not file.is_file():
        raise TaskError(f"{what} {name}: no file {file}; the path is relative to {Path.cwd()}")
    # The digest makes the name unique, so that two files called my_env.py do not clash in sys.modules.
    digest = hashlib.blake2b(str(file.resolve()).encode(), digest_size=4).hexdigest()
    spec = importlib.util.spec_from_file_location(f"{file.stem}_{digest}", file)
    if spec is None or spec.loader is None:
        raise TaskError(f"{what} {name}: {file} is not a Python file")
    if once and spec.name in sys.modules:
        return sys.modules[spec.name]
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # a script that ends itself where it is imported
        del sys.modules[spec.name]
        raise TaskError(
            f"{what} {name}: {file} cannot be loaded, fix it: {one_line(error)}"
        ) from error
    return module
