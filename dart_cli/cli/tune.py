"""`dart tune`: supervised training of a model folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dart_cli.runtime.options import DryRun, Overrides

tuning = typer.Typer()


@tuning.command()
def tune(
    config_path: Annotated[
        Path | None,
        typer.Argument(
            metavar="CONFIG",
            help="TOML file with a section [tune]; without one, the defaults.",
            show_default=False,
        ),
    ] = None,
    overrides: Overrides = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATH",
            help="Training data (tune.data); may be repeated.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str,
        typer.Option(metavar="PATH", help="Model to begin with (model.path).", show_default=False),
    ] = "",
    out: Annotated[
        str,
        typer.Option(metavar="FOLDER", help="Folder to make (tune.out).", show_default=False),
    ] = "",
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Begin anew, and discard a training that was stopped.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as one line of JSON.")
    ] = False,
    dry_run: DryRun = False,
) -> None:
    """Run supervised fine-tuning (SFT) of a model folder, on recorded episodes or grounding sets.

    From grounding sets, a model learns to write coordinates, to point, or to verify. The training is one
    process on one device; no other process is needed. It shows the loss, measurements on held-out rows and
    the time left, and reports at the end what the model has learned on these rows. The new folder appears
    when the training is over, with its curve in tune.json, and can be named wherever a model is.

    A training that is stopped (Ctrl-C, SIGTERM) prints what it has so far, and continues with the same
    command.

    The settings are in section [tune]; of [train], the keys of the optimizer, device, threads, pack_tokens
    and recompute apply, too. Learning rates, batch and epochs that are unset follow from the rows and the
    size of the model. tune.max_minutes limits the time.

    Example: dart tune --data successes --model builtin:tiny --out runs/models/begun

    Example: dart tune --data runs/quickstart --out runs/models/imitates --set tune.max_minutes=10

    Example: dart tune configs/tune.toml

    Example: dart tune --data sets/made/train --model builtin:tiny --out runs/models/text

    Example: dart tune --data sets/made/train --model runs/models/tiny-pointer --out runs/models/pointing --set policy.pointing=pointer
    """
    from dart_cli.config.load import DEFAULTS, Source, default_config, load_config
    from dart_cli.config.rules.check import check_config
    from dart_cli.config.rules.learning import read_by_tune
    from dart_cli.config.values import to_toml

    shortcuts = {"tune.data": data or [], "model.path": model, "tune.out": out}
    changes = [*(overrides or [])]
    changes += [f"{key}={to_toml(value)}" for key, value in shortcuts.items() if value]
    source = Source(config_path or DEFAULTS, tuple(changes))
    config = load_config(config_path, changes) if config_path else default_config(changes)
    config = read_by_tune(config)
    check_config(config, source, "tune")
    if not fresh:
        from dart_cli.tune.settings import refuse_changed

        refuse_changed(config)
    from dart_cli.runtime.role import end_with_parent, limit_threads

    limit_threads(config.train.threads)
    end_with_parent()
    from dart_cli.tune.tuning import run_tune

    run_tune(config, fresh=fresh, as_json=as_json, dry_run=dry_run)
