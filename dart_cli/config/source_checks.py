"""What one Python source file holds, found by reading it: nothing is imported or run.

    Module                                        the names, classes and functions of a file
    Named, Used, Overridden, Called, Has, Implemented   what another program may need of it

Each need says what differs in a module, in a few words, or nothing.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path


@dataclass(frozen=True)
class Named:
    """A module has `name` at its top level."""

    file: str
    name: str

    def problem(self, module: Module) -> str:
        """What differs; empty if nothing does."""
        return "" if self.name in module.names else f"has no {self.name}"


@dataclass(frozen=True)
class Used:
    """A module has `name` at its top level and reads it there, so that another can take its place."""

    file: str
    name: str

    def problem(self, module: Module) -> str:
        """What differs; empty if nothing does."""
        if self.name not in module.names:
            return f"has no {self.name}"
        return "" if self.name in module.reads else f"does not use {self.name}"


@dataclass(frozen=True)
class Overridden:
    """A function that ours takes the place of: it has just these parameters."""

    file: str
    name: str  # "function" or "Class.method"
    parameters: tuple[str, ...]  # without self; "*" before those by keyword alone

    def problem(self, module: Module) -> str:
        """What differs; empty if nothing does."""
        function = module.function(self.name)
        if function is None:
            return f"has no {self.name}"
        found = _parameters(function, is_method="." in self.name)
        if found != self.parameters:
            return f"{self.name} takes ({', '.join(found)}), not ({', '.join(self.parameters)})"
        return ""


@dataclass(frozen=True)
class Called:
    """A function that we call, with so many positional arguments and these keywords."""

    file: str
    name: str
    positional: int = 0
    keywords: tuple[str, ...] = ()

    def problem(self, module: Module) -> str:
        """What differs; empty if nothing does."""
        function = module.function(self.name)
        if function is None:
            return f"has no {self.name}"
        given = function.args
        ordered = [each.arg for each in (*given.posonlyargs, *given.args)]
        ordered = ordered[1:] if "." in self.name and not _is_static(function) else ordered
        if self.positional > len(ordered) and given.vararg is None:
            return f"{self.name} takes {len(ordered)} arguments by position, not {self.positional}"
        by_name = {*ordered, *(each.arg for each in given.kwonlyargs)}
        if given.kwarg is None and (unknown := set(self.keywords) - by_name):
            return f"{self.name} has no parameter {', '.join(sorted(unknown))}"
        required = [
            *ordered[self.positional : len(ordered) - len(given.defaults)],
            *(
                each.arg
                for each, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)
                if default is None
            ),
        ]
        if lacking := [name for name in required if name not in self.keywords]:
            return f"{self.name} asks for {', '.join(lacking)}"
        return ""


@dataclass(frozen=True)
class Has:
    """A class with these fields, attributes or methods."""

    file: str
    name: str
    members: tuple[str, ...] = ()

    def problem(self, module: Module) -> str:
        """What differs; empty if nothing does."""
        found = module.classes.get(self.name)
        if found is None:
            return f"has no class {self.name}"
        if lacking := [each for each in self.members if each not in _members(found)]:
            return f"{self.name} has no {', '.join(lacking)}"
        return ""


@dataclass(frozen=True)
class Implemented:
    """A class that we subclass: just these of its methods are abstract."""

    file: str
    name: str
    methods: tuple[str, ...]

    def problem(self, module: Module) -> str:
        """What differs; empty if nothing does."""
        found = module.classes.get(self.name)
        if found is None:
            return f"has no class {self.name}"
        abstract = {each.name for each in _functions(found) if _is_abstract(each)}
        if other := sorted(abstract ^ set(self.methods)):
            return f"{self.name} has other abstract methods: {', '.join(other)}"
        return ""


Need = Named | Used | Overridden | Called | Has | Implemented


_Function = ast.FunctionDef | ast.AsyncFunctionDef


class Module:
    """A module's source, as far as the checks look at it."""

    def __init__(self, tree: ast.Module) -> None:
        self._tree = tree

    @cached_property
    def names(self) -> set[str]:
        """Names that statements at the top level bind; those under an `if` or `try` too."""
        return set(_bound(self._tree.body))

    @cached_property
    def reads(self) -> set[str]:
        """Names that are read anywhere."""
        return {
            node.id
            for node in ast.walk(self._tree)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
        }

    @cached_property
    def classes(self) -> dict[str, ast.ClassDef]:
        """Classes at the top level."""
        return {each.name: each for each in self._tree.body if isinstance(each, ast.ClassDef)}

    def function(self, name: str) -> _Function | None:
        """A function at the top level, or a method as "Class.method"."""
        owner, _, last = name.rpartition(".")
        holder = self.classes.get(owner) if owner else self._tree
        if holder is None:
            return None
        found = [each for each in _functions(holder) if each.name == last]
        return found[-1] if found else None  # overloads come first


def read_module(file: Path) -> Module | None:
    """A file's module; None where there is none that this Python reads."""
    try:
        return Module(ast.parse(file.read_text(encoding="utf-8")))
    except (OSError, SyntaxError, ValueError):
        return None


def _bound(body: Sequence[ast.stmt]) -> Iterator[str]:
    for each in body:
        if isinstance(each, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name.partition(".")[0] for alias in each.names)
        elif isinstance(each, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield each.name
        elif isinstance(each, ast.Assign):
            yield from (target.id for target in each.targets if isinstance(target, ast.Name))
        elif isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            yield each.target.id
        elif isinstance(each, ast.If | ast.Try):
            yield from _bound(each.body)
            yield from _bound(each.orelse)


def _functions(holder: ast.Module | ast.ClassDef) -> list[_Function]:
    return [
        each for each in holder.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def _members(found: ast.ClassDef) -> set[str]:
    """Fields, methods, and what methods set on self."""
    members = set(_bound(found.body))
    for node in ast.walk(found):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
        ):
            members.add(node.attr)
    return members


def _parameters(function: _Function, *, is_method: bool) -> tuple[str, ...]:
    given = function.args
    names = [each.arg for each in (*given.posonlyargs, *given.args)]
    names = names[1:] if is_method and not _is_static(function) else names
    if given.vararg is not None:
        names.append(f"*{given.vararg.arg}")
    elif given.kwonlyargs:
        names.append("*")
    names += [each.arg for each in given.kwonlyargs]
    return (*names, f"**{given.kwarg.arg}") if given.kwarg is not None else tuple(names)


def _decorators(function: _Function) -> set[str]:
    return {ast.unparse(each).rpartition(".")[2] for each in function.decorator_list}


def _is_static(function: _Function) -> bool:
    return "staticmethod" in _decorators(function)


def _is_abstract(function: _Function) -> bool:
    return "abstractmethod" in _decorators(function)
