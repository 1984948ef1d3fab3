"""The verbs of `dart` that are no process of a run: they look at one, judge one, or prepare one.

view          web pages of a run
export        a run's weights as a Hugging Face folder
doctor        whether this host has what a run needs
init, keys    a starter configuration; keys for tcp
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
            help="TOML file, run directory, a folder of runs, or of an exploration; default the run below "
            "runs/ that was written to last.",
            show_default=False,
        ),
    ] = None,
    overrides: Overrides = None,
    port: Annotated[
        int | None,
        typer.Option(
            min=0, max=65535, show_default=False, help="0 for any; default the first from 8470 on."
        ),
    ] = None,
    host: Annotated[
        str,
        typer.Option(help="Address to serve on; beyond loopback with a token, which is printed."),
    ] = "127.0.0.1",
    token: Annotated[
        bool,
        typer.Option(
            "--token", help="Ask for a token on loopback, too: for a machine that others use."
        ),
    ] = False,
    export: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.html",
            callback=check_out,
            help="Write one self-contained page instead of serving any.",
        ),
    ] = None,
    trajectory: Annotated[
        str,
        typer.Option(metavar="ID", help="--export: the page of this trajectory, not of the run."),
    ] = "",
) -> None:
    """Serve pages to look into a run: curves, tasks, groups, trajectories as filmstrips.

    Of a folder of runs: their list, and those that you mark side by side, with the settings that differ.
    Of an exploration: its graph as a picture that one can walk. Evaluations have pages of their own,
    also where nothing was trained.

    Also of a live run, which is not disturbed. On loopback unless --host names another address; to
    reach a remote machine, prefer a tunnel: ssh -L 8470:localhost:8470 HOST.

    Example: dart view runs/quickstart

    Example: dart view runs

    Example: dart view runs/quickstart --export film.html --trajectory g000001-00
    """
    from bus.errors import ConfigError, MissingPartError

    if trajectory and export is None:
        raise ConfigError("--trajectory chooses what --export writes: add --export FILE.html")
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
    explored = target is not None and is_graph(target)
    if export is None and target is not None:
        # Where nothing was trained, evaluations are all that there is.
        evaluated = target if target.is_dir() else config_of(target, overrides).run.dir
        if not is_run(evaluated) and has_evaluations(evaluated):
            run_view(evaluated, host=host, port=port, guarded=token)
            return
    if export is None:
        several = target is not None and target.is_dir() and (explored or bool(runs_in(target)))
        place = (
            target if target and several and not overrides else find_run(target, overrides or [])
        )
        run_view(place, host=host, port=port, guarded=token)
        return
    run_dir = target if target and explored else find_run(target, overrides or [])
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
        typer.Option(min=0, show_default=False, help="The published version; default the newest."),
    ] = None,
    checkpoint: Annotated[
        bool,
        typer.Option(
            "--checkpoint", help="The newest checkpoint instead, which may be newer or older."
        ),
    ] = False,
    merge: Annotated[
        bool,
        typer.Option(
            "--merged", help="With model.lora: the whole model, its adapters in its weights."
        ),
    ] = False,
) -> None:
    """Write a run's weights as a Hugging Face folder, with a model card of how they were trained.

    Whole weights in safetensors (in shards above 5 GB), configuration, tokenizer, chat template and
    image processor: transformers, vLLM and `model.path` load it. With `model.lora` the adapters alone,
    which peft and vLLM load, or with --merged the whole model. The run may be live.

    Example: dart export runs/quickstart exported --version 20
    """
    from bus.errors import UserError

    if checkpoint and version is not None:
        raise UserError("--version names a published version: leave it out with --checkpoint")
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
            help="TOML file, run directory or model folder; without one, only the host is examined.",
            show_default=False,
        ),
    ] = None,
    overrides: Overrides = None,
    play: Annotated[
        bool, typer.Option("--play", help="Play one episode end to end, in this process.")
    ] = False,
    parity: Annotated[
        bool,
        typer.Option(
            "--parity", help="Compare the log-probabilities of engine and trainer, in this process."
        ),
    ] = False,
    values: Annotated[
        bool, typer.Option("--values", help="Read every weight, too: is any NaN or infinite?")
    ] = False,
    steps: Annotated[
        int | None,
        typer.Option(
            "--steps",
            metavar="N",
            min=1,
            max=10_000,
            show_default=False,
            help="Plan with episodes of N steps; default what the training tasks allow, on average.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the findings as one line of JSON.")
    ] = False,
    smoke_test: SmokeTest = False,
    smoke_test_minutes: SmokeTestMinutes = None,
) -> None:
    """Examine this host for a run: packages, GPUs, programs, limits, disk, configuration, tasks.

    Of a model: whether its folder is whole, and fits; no code of it is run.

    Of a configuration: memory of each trainer rank and engine, main memory, disk (docs/hardware.md).

    Each line is ok, a warning or an error with its cure. Ends with 0 where a run can work, with 2 where
    it does not fit this host, else 1.

    Example: dart doctor configs/quickstart.toml --play

    Example: dart doctor configs/ui-tars-7b.toml --steps 30

    Example: dart doctor models/ui-tars --values --parity --set model.dtype=bfloat16
    """
    from bus.errors import ConfigError
    from dart_cli.config.model_folder import BUILTIN, is_model_folder
    from dart_cli.doctor.examine import run_doctor

    if (play or parity or values or steps) and target is None:
        given = {"--play": play, "--parity": parity, "--values": values, "--steps": steps}
        asked = next(name for name, value in given.items() if value)
        raise ConfigError(f"{asked} needs to know what: add the TOML file of a run")
    if target is not None and not target.exists():
        shipped = "; a model that ships is examined with the TOML file of a run that names it"
        raise ConfigError(
            f"no such file or folder: {target}; name a TOML file, a run directory or a model folder"
            f"{shipped if str(target) in BUILTIN else ''}"
        )
    if smoke_test or smoke_test_minutes is not None:
        if target is None or target.is_dir():
            raise ConfigError("--smoke-test plays the run of a TOML file: name one")
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
        typer.Argument(metavar="DIR", callback=check_folder, help="Folder; made if need be."),
    ],
    template: Annotated[
        Literal["tiny", "own-env", "7b"],
        typer.Option(
            help="`tiny`: the tiny model on multi-step tasks, learns in minutes on a CPU. `own-env`: a "
            "small model that reads, on an environment of your own, my_env.py. `7b`: UI-TARS-1.5-7B on GPUs."
        ),
    ] = "tiny",
    full: Annotated[
        bool, typer.Option("--full", help="Write every key, with its meaning as a comment.")
    ] = False,
) -> None:
    """Write a starter configuration that learns: some 20 lines, with what one must know.

    Nothing is overwritten.

    Example: dart init my-run && dart up my-run/dart.toml
    """
    from dart_cli.config.template import CONFIG_NAME, write_starter

    written = write_starter(folder, template, full=full)
    path = folder / CONFIG_NAME
    typer.echo(f"wrote {', '.join(map(str, written))}; edit, then: dart up {path}")
    if template == "own-env":
        typer.echo(
            "from an environment of your own to a policy, step by step: docs/your-application.md"
        )


@tools.command(hidden=True)
def keys(
    folder: Annotated[
        Path,
        typer.Argument(metavar="DIR", callback=check_folder, help="Folder; made if need be."),
    ],
) -> None:
    """Make the CURVE keys of a run over tcp; copy the folder to every host and set bus.keys.

    Any process that has the file can take part in the run. Nothing is overwritten.

    Example: dart keys keys && scp -pr keys gpu-box:
    """
    from bus.endpoints import make_private_dir, write_key_pair
    from dart_cli.config.endpoints import KEY_FILE

    write_key_pair(make_private_dir(folder) / KEY_FILE)
    typer.echo(f'wrote {folder / KEY_FILE}; set bus.keys = "{folder}" on every host')
