"""Arguments and options that several commands have, and how they read a configuration.

ConfigPath, RunTarget, Force, SmokeTest, SmokeTestMinutes, WorkerOption   types of arguments and options
ProcessOrTool  a command that starts a process of the run, and has tools as subcommands
load_checked   reads a configuration file and checks it for a role
config_of      reads the configuration of a file or a run directory
refuse_other   raises the error where a run cannot continue with a configuration
refuse_beside  raises the error for options that have no effect together with another
print_dry_run  prints what `--dry-run` shows
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer
import typer.core

if TYPE_CHECKING:
    from bus.messages import Role
    from dart_cli.config.schema import Config

ConfigPath = Annotated[
    Path, typer.Argument(metavar="CONFIG", help="TOML file of the run; `dart init` writes one.")
]
RunTarget = Annotated[
    Path | None,
    typer.Argument(
        metavar="CONFIG_OR_RUN",
        help="TOML file or run directory; by default the newest run below runs/.",
        show_default=False,
    ),
]
Force = Annotated[
    bool,
    typer.Option(
        "--force",
        help="Continue a run that was started with another suite, model, action parser or coordinates.",
    ),
]
SmokeTest = Annotated[
    bool,
    typer.Option(
        "--smoke-test",
        help="Run a smoke test only: play the run in miniature on this host, in a separate directory "
        "(docs/smoke-test.md).",
    ),
]
SmokeTestMinutes = Annotated[
    float | None,
    typer.Option(
        "--smoke-test-minutes",
        metavar="N",
        min=1,
        max=1440,
        show_default=False,
        help="The smoke test within N minutes, by default 5; parts that do not fit are made smaller or left "
        "out.",
    ),
]
WorkerOption = Annotated[
    str,
    typer.Option(
        "--worker", metavar="NAME", help="Name in the run; by default ROLE-0, ROLE-1, ..."
    ),
]


class ProcessOrTool(typer.core.TyperGroup):
    """`dart COMMAND CONFIG` starts the process; `dart COMMAND TOOL ...` is one of the tools."""

    command: ClassVar[str]
    process: ClassVar[str]  # the subcommand whose name may be left out

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Pass arguments to the process unless they begin with the name of a tool."""
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            self._refuse_misspelt(ctx, args[0])
            args = [self.process, *args]
        return super().parse_args(ctx, args)

    def _refuse_misspelt(self, ctx: typer.Context, first: str) -> None:
        """End with an error for a word that is no file and resembles the name of a tool."""
        if first.startswith("-") or Path(first).exists():
            return
        if close := difflib.get_close_matches(first, self.commands, n=1):
            ctx.fail(
                f"no command and no file {first!r}; did you mean `dart {self.command} {close[0]}`?"
            )


def refuse_beside(option: str, others: Mapping[str, object]) -> None:
    """Raise ConfigError if one of `others` is set: options that have no effect together with `option`."""
    if names := [name for name, value in others.items() if value]:
        from bus.errors import ConfigError

        raise ConfigError(f"{names[0]} means nothing beside {option}; leave one of the two out")


def load_checked(path: Path, overrides: list[str] | None, role: Role | None) -> Config:
    """Return the configuration in a file with its overrides.

    Raises ConfigError unless it is valid for `role`; None stands for all processes of `dart up`.
    """
    from dart_cli.config.load import Source, load_config
    from dart_cli.config.rules.check import check_config

    config = load_config(path, overrides)
    source = Source(path, tuple(overrides or ()))
    check_config(config, source, role)
    if role in (None, "rollout", "eval"):
        from dart_cli.language.shortest_click import refuse_cut_off

        refuse_cut_off(config, source)
    return config


def refuse_other(config: Config, *, force: bool = False) -> None:
    """Raise ConfigError or ModelError if the run cannot continue with `config`.

    Call it before anything starts or is recorded. `force` allows another suite or model, but never a
    checkpoint of another model.
    """
    from dart_cli.runtime.run_dir import refuse_another_run
    from dart_cli.train.checkpoints import identity

    if not force:
        refuse_another_run(config)
    identity.refuse_other(config)


def print_dry_run(
    config: Config,
    role: Role | None,
    details: Mapping[str, str] | None = None,
    *,
    force: bool = False,
    fresh: bool = False,
) -> None:
    """Print what `--dry-run` shows. `details` replaces the texts of some subjects by more exact ones.

    Raises ConfigError where the start would be refused without `force`, and where the run does not fit the
    host. With `fresh` the run begins anew.
    """
    from dart_cli.config.devices import gpus_of
    from dart_cli.config.dry_run import describe
    from dart_cli.doctor.machine import refuse_slots
    from dart_cli.doctor.plan_findings import refuse_misfit
    from dart_cli.runtime.run_dir import refuse_another_run

    if role in (None, "data", "train") and not fresh:
        refuse_other(config, force=force)
    elif role != "eval" and not (force or fresh):
        refuse_another_run(config)

    if role in (None, "env"):
        refuse_slots(config, envs=max(1, config.up.envs) if role is None else 1)
    if role in ("train", "rollout"):
        gpus_of(config, role, role)
    for subject, text in {**dict(describe(config, role)), **(details or {})}.items():
        typer.echo(f"{subject + ':':<10} {text}")
    if role in (None, "train", "rollout"):
        for subject, text in refuse_misfit(config, role):
            typer.echo(f"{subject + ':':<10} {text}")
    typer.echo("valid; nothing was started")


def config_of(target: Path, overrides: list[str] | None = None) -> Config:
    """Return the configuration in a file, or the one with which a run directory was started.

    Raises UserError if there is none or it is invalid, and for overrides of a run directory.
    """
    from dart_cli.config.load import load_config, refuse_overrides
    from dart_cli.runtime.run_dir import read_run, refuse_missing

    refuse_missing(target)
    if not target.is_dir():
        return load_config(target, overrides)
    refuse_overrides(target, overrides or [])
    return read_run(target)
