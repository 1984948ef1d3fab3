"""Options of commands as the fields of a dataclass: told once, with their help, where they are used.

command_of          a function of such options -> a command that typer reads
check_out, check_folder   callbacks of options that name what is written
read_options        the keyword options of an environment, from EnvOptions
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
        help="Of the environment, e.g. size=448x336; may be given again.",
    ),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Check everything, print what would run, start nothing.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as one line of JSON.")]


def command_of(kind: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a function whose last argument is of the dataclass `kind`.

    The command has the fields of `kind` in the place of that argument.
    """
    hints = get_type_hints(kind, include_extras=True)
    chosen = [
        inspect.Parameter(
            each.name,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=inspect.Parameter.empty if each.default is MISSING else each.default,
            annotation=hints[each.name],
        )
        for each in fields(kind)
    ]

    def command_with(work: Callable[..., None]) -> Callable[..., None]:
        *first, _options = inspect.signature(work, eval_str=True).parameters.values()

        def command(**given: Any) -> None:
            own = [given.pop(each.name) for each in first]
            work(*own, kind(**given))

        command.__doc__, command.__name__ = work.__doc__, work.__name__
        command.__annotations__ = {}
        command.__signature__ = inspect.Signature([*first, *chosen])  # type: ignore[attr-defined]
        return command

    return command_with


def check_out(param: typer.CallbackParam, out: Path | None) -> Path | None:
    """Check an option: raise UserError where `out` cannot be a file, before anything is played or read."""
    from dart_cli.config.rules.machine import no_file

    return _checked(param, out, no_file)


def check_folder(param: typer.CallbackParam, out: Path | None) -> Path | None:
    """Check an option as `check_out` does: raise UserError where `out` cannot be a folder.

    Whether a folder that is there may be used is for the command to say.
    """
    from dart_cli.config.rules.machine import no_folder

    return _checked(param, out, no_folder)


def _checked(
    param: typer.CallbackParam, out: Path | None, problem: Callable[[Path], str]
) -> Path | None:
    if out is not None and (why := problem(out)):
        from bus.errors import UserError

        option = next((f"{each} " for each in param.opts if each.startswith("--")), "")
        raise UserError(f"{option}{out}: {why}")
    return out


def read_options(pairs: Sequence[str] | None) -> dict[str, Any]:
    """Keyword options of an environment from KEY=VALUE texts, values as in TOML."""
    from bus.errors import UserError
    from dart_cli.config.values import read_value

    options: dict[str, Any] = {}
    for pair in pairs or ():
        key, equals, text = pair.partition("=")
        if not equals or not key.strip():
            raise UserError(f"--option {pair!r}: want KEY=VALUE, e.g. --option size=448x336")
        options[key.strip()] = read_value(text)
    return options
