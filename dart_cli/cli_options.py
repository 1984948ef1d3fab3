"""What several verbs of the command line share: their arguments, and how they read a configuration.

ConfigPath, Overrides, DryRun   arguments and options by type
load_checked   a configuration file, checked for a role
config_of      a configuration file, or a run directory
tell           what `--dry-run` prints
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from bus.messages import Role
    from dart_cli.config import Config

ConfigPath = Annotated[
    Path, typer.Argument(metavar="CONFIG", help="TOML file of the run; `dart init` writes one.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change one key, e.g. --set train.lr=1e-5."),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Check everything, say what would run, start nothing.")
]


def load_checked(path: Path, overrides: list[str] | None, role: Role | None) -> Config:
    """The configuration, checked for `role`. Raises ConfigError."""
    from dart_cli.checks import check_config
    from dart_cli.config import Source, load_config

    config = load_config(path, overrides)
    check_config(config, Source(path, tuple(overrides or ())), role)
    return config


def tell(config: Config, role: Role | None) -> None:
    """What `--dry-run` prints."""
    from dart_cli.plan import describe

    for subject, text in describe(config, role):
        typer.echo(f"{subject + ':':<10} {text}")
    typer.echo("valid; nothing was started")


def config_of(target: Path, overrides: list[str] | None = None) -> Config:
    """The configuration in a file, or the one that a run directory was started with."""
    from dart_cli.config import load_config
    from dart_cli.process import read_run

    return read_run(target) if target.is_dir() else load_config(target, overrides)
