"""What several verbs of the command line share: their arguments, and how they read a configuration.

ConfigPath, RunTarget, Force, SmokeTest, SmokeTestMinutes, WorkerOption   arguments and options by type
ProcessOrTool  a verb that is a process of the run, and has tools beside it
load_checked   a configuration file, checked for a role
config_of      a configuration file, or a run directory
refuse_other   the error where a run cannot go on with this configuration
refuse_beside  the error for options that mean nothing beside another
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
        help="TOML file or run directory; default the run below runs/ that was written to last.",
        show_default=False,
    ),
]
Force = Annotated[
    bool,
    typer.Option(
        "--force",
        help="Go on with a run that was started with another suite, model, action parser or coordinates.",
    ),
]
SmokeTest = Annotated[
    bool,
    typer.Option(
        "--smoke-test",
        help="Only play the run in miniature on this host, in a directory of its own: docs/smoke-test.md.",
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
        help="The same within N minutes, by default 5: what does not fit is played smaller, or not at all.",
    ),
]
WorkerOption = Annotated[
    str, typer.Option("--worker", metavar="NAME", help="Name in the run; default ROLE-0, -1, ...")
]


class ProcessOrTool(typer.core.TyperGroup):
    """`dart VERB CONFIG` starts the process; `dart VERB COMMAND ...` is one of the tools."""

    verb: ClassVar[str]
    process: ClassVar[str]  # the command whose name may be left out

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Arguments that do not begin with a command's name are for the process."""
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            self._refuse_misspelt(ctx, args[0])
            args = [self.process, *args]
        return super().parse_args(ctx, args)

    def _refuse_misspelt(self, ctx: typer.Context, first: str) -> None:
        """End with an error for a word that is no file, and nearly a command's name."""
        if first.startswith("-") or Path(first).exists():
            return
        if close := difflib.get_close_matches(first, self.commands, n=1):
            ctx.fail(
                f"no command and no file {first!r}; did you mean `dart {self.verb} {close[0]}`?"
            )


def refuse_beside(option: str, others: Mapping[str, object]) -> None:
    """Raise ConfigError where one of these options is given, which mean nothing beside `option`."""
    if given := [name for name, value in others.items() if value]:
        from bus.errors import ConfigError

        raise ConfigError(f"{given[0]} means nothing beside {option}; leave one of the two out")


def load_checked(path: Path, overrides: list[str] | None, role: Role | None) -> Config:
    """Return the configuration, checked for `role`. Raises ConfigError."""
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
    """Raise ConfigError or ModelError where the run cannot go on with `config`.

    Before anything starts, or is recorded. `force` lets a run go on with another suite or model, but
    no trainer with a checkpoint of another model.
    """
    from dart_cli.runtime.run_dir import refuse_another_run
    from dart_cli.train.checkpoints import identity

    if not force:
        refuse_another_run(config)
    identity.refuse_other(config)


def print_dry_run(
    config: Config,
    role: Role | None,
    sharper: Mapping[str, str] | None = None,
    *,
    force: bool = False,
    fresh: bool = False,
) -> None:
    """Print what `--dry-run` shows; `sharper` replaces texts of subjects by the verb's own.

    Raises ConfigError where the start would be refused without `force`, and where it cannot fit.
    With `fresh` the run begins anew.
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
    for subject, text in {**dict(describe(config, role)), **(sharper or {})}.items():
        typer.echo(f"{subject + ':':<10} {text}")
    if role in (None, "train", "rollout"):
        for subject, text in refuse_misfit(config, role):
            typer.echo(f"{subject + ':':<10} {text}")
    typer.echo("valid; nothing was started")


def config_of(target: Path, overrides: list[str] | None = None) -> Config:
    """Return the configuration in a file, or the one that a run directory was started with."""
    from dart_cli.config.load import load_config, refuse_overrides
    from dart_cli.runtime.run_dir import read_run, refuse_missing

    refuse_missing(target)
    if not target.is_dir():
        return load_config(target, overrides)
    refuse_overrides(target, overrides or [])
    return read_run(target)
