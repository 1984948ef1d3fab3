"""Options of commands as the fields of a dataclass, so that each is written once, with its help.

command_of                turns a function of such options into a command that typer reads
check_out, check_folder   callbacks of options that name an output file or folder
read_options              reads the keyword options of an environment from EnvOptions
Overrides, EnvOptions, DryRun, AsJson   options that several commands have
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change one key, e.g. --set train.lr=1e-5."),
]
EnvOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        metavar="KEY=VALUE",
        help="An option of the environment, e.g. size=448x336; may be given again.",
    ),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Check everything, print what would run, start nothing.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as one line of JSON.")]


def command_of(kind: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator for a function whose last argument is an instance of the dataclass `kind`.

    The resulting command has the fields of `kind` in place of that argument.
    """
    hints = get_type_hints(kind, include_extras=True)
    option_parameters = [
        inspect.Parameter(
            option.name,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=inspect.Parameter.empty if option.default is MISSING else option.default,
            annotation=hints[option.name],
        )
        for option in fields(kind)
    ]

    def command_with(work: Callable[..., None]) -> Callable[..., None]:
        *first, _options = inspect.signature(work, eval_str=True).parameters.values()

        def command(**values: Any) -> None:
            own = [values.pop(parameter.name) for parameter in first]
            work(*own, kind(**values))

        command.__doc__, command.__name__ = work.__doc__, work.__name__
        command.__annotations__ = {}
        command.__signature__ = inspect.Signature([*first, *option_parameters])  # type: ignore[attr-defined]
        return command

    return command_with


def check_out(param: typer.CallbackParam, out: Path | None) -> Path | None:
    """Return `out`. Raises UserError if it cannot be a file, before anything is played or read."""
    from dart_cli.config.rules.machine import no_file

    return _checked(param, out, no_file)


def check_folder(param: typer.CallbackParam, out: Path | None) -> Path | None:
    """Return `out`. Raises UserError if it cannot be a folder.

    The command itself decides whether a folder that exists may be used.
    """
    from dart_cli.config.rules.machine import no_folder

    return _checked(param, out, no_folder)


def _checked(
    param: typer.CallbackParam, out: Path | None, problem: Callable[[Path], str]
) -> Path | None:
    """Return `out`. Raises UserError, with the option's name, if `problem` returns a text for it."""
    if out is not None and (why := problem(out)):
        from bus.errors import UserError

        option = next((f"{name} " for name in param.opts if name.startswith("--")), "")
        raise UserError(f"{option}{out}: {why}")
    return out


def read_options(pairs: Sequence[str] | None) -> dict[str, Any]:
    """Return the keyword options of an environment from KEY=VALUE texts; values are as in TOML.

    Raises UserError.
    """
    from bus.errors import UserError
    from dart_cli.config.values import read_value

    options: dict[str, Any] = {}
    for pair in pairs or ():
        key, equals, text = pair.partition("=")
        if not equals or not key.strip():
            raise UserError(f"--option {pair!r}: want KEY=VALUE, e.g. --option size=448x336")
        options[key.strip()] = read_value(text)
    return options
