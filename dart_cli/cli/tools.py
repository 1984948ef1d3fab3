"""Commands that start no process of a run: they show one, export one, or prepare one.

view     serves web pages of a run
export   writes a run's weights as a Hugging Face folder
doctor   checks whether this host has what a run needs
init     writes a starter configuration
keys     makes the keys of a run over tcp
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from dart_cli.cli.options import (
    SmokeTest,
    SmokeTestMinutes,
    config_of,
    refuse_beside,
)
from dart_cli.runtime.options import Overrides, check_folder, check_out

tools = typer.Typer()


@tools.command()
def view(
    target: Annotated[
        Path | None,
        typer.Argument(
            metavar="CONFIG_OR_RUN",
            help="TOML file, run directory, folder of runs, or folder of an exploration; by default the newest run "
            "below runs/.",
            show_default=False,
        ),
    ] = None,
    overrides: Overrides = None,
    port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            show_default=False,
            help="Port; 0 takes any. By default the first free one from 8470 on.",
        ),
    ] = None,
    host: Annotated[
        str,
        typer.Option(
            help="Address to serve on. Beyond loopback a token is required, which is printed."
        ),
    ] = "127.0.0.1",
    token: Annotated[
        bool,
        typer.Option(
            "--token", help="Require a token on loopback, too; for a machine that others use."
        ),
    ] = False,
    export: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.html",
            callback=check_out,
            help="Write one self-contained page to this file instead of serving pages.",
        ),
    ] = None,
    trajectory: Annotated[
        str,
        typer.Option(
            metavar="ID", help="With --export: the page of this trajectory instead of the run's."
        ),
    ] = "",
) -> None:
    """Show a run in the browser: curves, tasks, groups, trajectories as filmstrips, evaluations.

    For a folder of runs, show a list, and compare the runs that you mark, with the settings that differ. For
    an exploration, show its graph as a picture to walk through. A live run can be viewed; it is not
    disturbed.

    The pages are on loopback unless --host names another address. To view a run on a remote machine, use a
    tunnel: ssh -L 8470:localhost:8470 HOST.

    Example: dart view runs/quickstart

    Example: dart view runs

    Example: dart view runs/quickstart --export film.html --trajectory g000001-00
    """
    from bus.errors import ConfigError, MissingPartError

    if trajectory and export is None:
        raise ConfigError("--trajectory chooses the page of --export; add --export FILE.html")
    from dart_cli.inspection.run_lookup import find_run

    try:
        from dart_cli.view.server import (
            has_evaluations,
            is_graph,
            is_run,
            run_view,
            runs_in,
            write_file,
        )
    except ModuleNotFoundError as error:
        if error.name not in ("jinja2", "markupsafe", "starlette", "uvicorn"):
            raise
        raise MissingPartError(
            f"`dart view` needs the package {error.name}: pip install -e '.[view]' in dart's folder"
        ) from None
    is_exploration = target is not None and is_graph(target)
    if export is None and target is not None:
        # A directory in which nothing was trained may still have evaluations.
        folder = target if target.is_dir() else config_of(target, overrides).run.dir
        if not is_run(folder) and has_evaluations(folder):
            run_view(folder, host=host, port=port, guarded=token)
            return
    if export is None:
        is_shown_whole = (
            target is not None and target.is_dir() and (is_exploration or bool(runs_in(target)))
        )
        if target is None or not is_shown_whole or overrides:
            target = find_run(target, overrides or [])
        run_view(target, host=host, port=port, guarded=token)
        return
    run_dir = target if target and is_exploration else find_run(target, overrides or [])
    size = write_file(run_dir, export, trajectory)
    typer.echo(f"{export}: {size / 2**20:.1f} MiB, open it in a browser")


@tools.command()
def export(
    target: Annotated[
        Path, typer.Argument(metavar="CONFIG_OR_RUN", help="TOML file or run directory.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to make.")],
    overrides: Overrides = None,
    version: Annotated[
        int | None,
        typer.Option(
            min=0, show_default=False, help="The published version; by default the newest."
        ),
    ] = None,
    checkpoint: Annotated[
        bool,
        typer.Option(
            "--checkpoint",
            help="Export the newest checkpoint instead, which may be newer or older.",
        ),
    ] = False,
    merge: Annotated[
        bool,
        typer.Option(
            "--merged",
            help="With model.lora: export the whole model, with the adapters in its weights.",
        ),
    ] = False,
) -> None:
    """Write a run's weights as a Hugging Face folder, with a model card about their training.

    The folder has the weights in safetensors (in shards above 5 GB), configuration, tokenizer, chat template
    and image processor; transformers, vLLM and `model.path` load it. With `model.lora` it has the adapters
    alone, which peft and vLLM load, or with --merged the whole model. The run may be live.

    Example: dart export runs/quickstart exported --version 20
    """
    from bus.errors import UserError

    if checkpoint and version is not None:
        raise UserError("--version names a published version; leave it out with --checkpoint")
    config = config_of(target, overrides)
    from dart_cli.config.rules.machine import refuse_out

    refuse_out(out)
    from dart_cli.export.folder import export_folder  # it brings torch

    trained = export_folder(config, out, version=version, checkpoint=checkpoint, merge=merge)
    typer.echo(f"{out}: {trained.name} of {config.run.dir}")


@tools.command()
def doctor(
    target: Annotated[
        Path | None,
        typer.Argument(
            metavar="CONFIG_RUN_OR_MODEL",
            help="TOML file, run directory or model folder; without one, only the host is checked.",
            show_default=False,
        ),
    ] = None,
    overrides: Overrides = None,
    play: Annotated[
        bool, typer.Option("--play", help="Also play one episode end to end, in this process.")
    ] = False,
    parity: Annotated[
        bool,
        typer.Option(
            "--parity",
            help="Also compare the log-probabilities of engine and trainer, in this process.",
        ),
    ] = False,
    values: Annotated[
        bool,
        typer.Option("--values", help="Also read every weight, to find NaN and infinite ones."),
    ] = False,
    steps: Annotated[
        int | None,
        typer.Option(
            "--steps",
            metavar="N",
            min=1,
            max=10_000,
            show_default=False,
            help="Plan with episodes of N steps; by default the mean step limit of the training tasks.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the findings as one line of JSON.")
    ] = False,
    smoke_test: SmokeTest = False,
    smoke_test_minutes: SmokeTestMinutes = None,
) -> None:
    """Check whether a run can work on this host: packages, GPUs, limits, disk, configuration, tasks.

    For a configuration, it also plans the memory of each trainer rank and engine, main memory and disk
    (docs/hardware.md). For a model folder, it checks that the folder is complete and that the model fits; no
    code of the folder is run.

    Each line is ok, or a warning or error with its fix. The command ends with 0 if the run can work, with 2
    if it does not fit this host, and otherwise with 1.

    Example: dart doctor configs/quickstart.toml --play

    Example: dart doctor configs/ui-tars-7b.toml --steps 30

    Example: dart doctor models/ui-tars --values --parity --set model.dtype=bfloat16
    """
    from bus.errors import ConfigError
    from dart_cli.config.model_folder import BUILTIN, is_model_folder
    from dart_cli.doctor.examine import run_doctor

    if (play or parity or values or steps) and target is None:
        options = {"--play": play, "--parity": parity, "--values": values, "--steps": steps}
        option = next(name for name, value in options.items() if value)
        raise ConfigError(f"{option} needs a run; add its TOML file")
    if target is not None and not target.exists():
        shipped = (
            "; a model that ships with dart is checked with the TOML file of a run that names it"
        )
        raise ConfigError(
            f"no such file or folder: {target}; name a TOML file, a run directory or a model folder"
            f"{shipped if str(target) in BUILTIN else ''}"
        )
    if smoke_test or smoke_test_minutes is not None:
        if target is None or target.is_dir():
            raise ConfigError("--smoke-test plays the run of a TOML file; name one")
        others = {"--play": play, "--parity": parity, "--values": values, "--steps": steps}
        refuse_beside("--smoke-test", others | {"--json": as_json})
        from dart_cli.smoke_test.run_smoke_test import run_smoke_test

        raise typer.Exit(run_smoke_test(target, overrides or [], smoke_test_minutes))
    if play and target is not None and is_model_folder(target):
        raise ConfigError(f"--play needs the tasks of a TOML file, {target} is a model folder")
    if steps and target is not None and is_model_folder(target):
        raise ConfigError(f"--steps plans the run of a TOML file, {target} is a model folder")
    raise typer.Exit(
        run_doctor(
            target,
            overrides or [],
            plays_episode=play,
            compares_logprobs=parity,
            reads_values=values,
            steps=steps,
            in_json=as_json,
        )
    )


@tools.command()
def init(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="DIR", callback=check_folder, help="Folder of the new file; made if need be."
        ),
    ],
    template: Annotated[
        Literal["tiny", "own-env", "web", "9b", "7b"],
        typer.Option(
            help="`tiny`: the tiny model on multi-step tasks; learns in minutes on a CPU. `own-env`: a small model "
            "that can read, on an environment of your own, my_env.py. `web`: the same model on a web application. `9b`: Qwen3.5-9B on GPUs. `7b`: UI-TARS-1.5-7B on GPUs."
        ),
    ] = "tiny",
    full: Annotated[
        bool, typer.Option("--full", help="Write every key, with its meaning as a comment.")
    ] = False,
) -> None:
    """Write a starter configuration of some 20 lines, which learns as it is.

    No file is overwritten.

    Example: dart init my-run && dart up my-run/dart.toml
    """
    from dart_cli.config.template import CONFIG_NAME, write_starter

    paths = write_starter(folder, template, full=full)
    path = folder / CONFIG_NAME
    typer.echo(f"wrote {', '.join(map(str, paths))}; edit, then: dart up {path}")
    if template == "own-env":
        typer.echo("docs/your-application.md leads from your environment to a policy, step by step")
    if template == "web":
        typer.echo("docs/environments/web.md says how to put your application in its place")


@tools.command(hidden=True)
def keys(
    folder: Annotated[
        Path,
        typer.Argument(metavar="DIR", callback=check_folder, help="Folder; made if need be."),
    ],
) -> None:
    """Make the CURVE keys of a run over tcp; then copy the folder to every host and set bus.keys.

    Any process that has the file can take part in the run. No file is overwritten.

    Example: dart keys keys && scp -pr keys gpu-box:
    """
    from bus.endpoints import make_private_dir, write_key_pair
    from dart_cli.config.endpoints import KEY_FILE

    write_key_pair(make_private_dir(folder) / KEY_FILE)
    typer.echo(f'wrote {folder / KEY_FILE}; set bus.keys = "{folder}" on every host')
