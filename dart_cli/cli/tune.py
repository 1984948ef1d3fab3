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
            help="TOML file with a section tune; without one the defaults, e.g. for a first try.",
            show_default=False,
        ),
    ] = None,
    overrides: Overrides = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATH",
            help="What is learned from (tune.data); may be given several times.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str,
        typer.Option(
            metavar="PATH", help="The model to begin with (model.path).", show_default=False
        ),
    ] = "",
    out: Annotated[
        str,
        typer.Option(metavar="FOLDER", help="The folder to make (tune.out).", show_default=False),
    ] = "",
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Begin anew where a training was stopped.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as one line of JSON.")
    ] = False,
    dry_run: DryRun = False,
) -> None:
    """Supervised fine-tuning (SFT) of a model folder on recorded episodes.

    Also on places: to write coordinates, to point, to verify. Needs no other process. Progress shows the loss,
    what held-out rows say, and the time left. A training that was stopped (Ctrl-C, SIGTERM) says what it has,
    and goes on with the same command; the new folder is there when it is over, with its curve in tune.json,
    and loads wherever a model is named. Section tune has the settings; of train the optimizer's, device, threads
    and recompute hold, too. Rates, batch and epochs that are unset follow from the rows and the model's size.
    tune.max_minutes bounds the time. At the end stands what was learned, on rows that were held out. One
    process, one device.

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
