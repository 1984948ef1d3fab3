"""`dart serve`: serves the policy of a run, or a model alone, as a chat endpoint for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dart_cli.cli.options import Force, WorkerOption, load_checked, print_dry_run, refuse_beside
from dart_cli.runtime.options import DryRun, Overrides

if TYPE_CHECKING:
    import asyncio

    from dart_cli.config.schema import Config

serving = typer.Typer()


@serving.command()
def serve(
    config_path: Annotated[
        Path | None,
        typer.Argument(
            metavar="CONFIG",
            show_default=False,
            help="TOML file of the run; not needed with --model.",
        ),
    ] = None,
    model: Annotated[
        str,
        typer.Option(
            metavar="FOLDER",
            help="Serve this model without a run, e.g. a folder of `dart export`, or builtin:tiny.",
        ),
    ] = "",
    overrides: Overrides = None,
    port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            show_default=False,
            help="Port; 0 takes any. By default serve.port, 8480.",
        ),
    ] = None,
    token: Annotated[
        bool,
        typer.Option(
            "--token", help="Require a token on loopback, too; for a machine that others use."
        ),
    ] = False,
    worker: WorkerOption = "",
    force: Force = False,
    dry_run: DryRun = False,
) -> None:
    """Serve the policy as an OpenAI-compatible chat endpoint, and train on the episodes of its clients.

    It takes the place of `dart env` in a run. A client, which is an agent of another program, opens a
    session, which is one episode of a task, asks for completions with screenshots as data URLs, acts in its
    own environment, and submits a reward:

    curl --json '{"task": "mini/click"}' localhost:8480/v1/sessions

    curl --json '{"model": "dart", "messages": [...]}' localhost:8480/v1/sessions/ID/chat/completions

    curl --json '{"reward": 1}' localhost:8480/v1/sessions/ID/end

    The endpoint is on loopback unless serve.host names another address. Beyond loopback, clients need a token
    as API key: the value of the environment variable DART_SERVE_TOKEN, or a random one that is printed.
    docs/serve.md has the rest.

    With --model, no other process is needed, requests need no session, and nothing is trained. A CONFIG
    beside it sets how the model is loaded and how it writes actions.

    Example: dart up my.toml --set up.serve=true --set up.envs=0

    Example: dart serve my.toml --port 8481

    Example: dart serve --model exported
    """
    overrides = [*(overrides or []), *([] if port is None else [f"serve.port={port}"])]
    _check_packages()
    if model:
        refuse_beside("--model", {"--worker": worker, "--force": force})
        _serve_model(model, config_path, overrides, guarded=token, dry_run=dry_run)
        return
    if config_path is None:
        raise typer.BadParameter(
            "missing; name the TOML file of a run, or a model with --model FOLDER",
            param_hint="CONFIG",
        )
    config = load_checked(config_path, overrides, "serve")
    if dry_run:
        print_dry_run(config, "serve", force=force)
        return
    from dart_cli.runtime.role import run_role

    async def play(name: str, stop: asyncio.Event) -> None:
        from dart_cli.serve.worker import run

        await run(config, name, stop, guarded=token)

    raise typer.Exit(
        run_role("serve", config, play, worker=worker, force=force, overrides=overrides or [])
    )


def _serve_model(
    model: str, config_path: Path | None, overrides: list[str], *, guarded: bool, dry_run: bool
) -> None:
    """Serve a model without a run. Raises UserError for a model or settings that cannot be used."""
    from dart_cli.config.values import to_toml
    from dart_cli.serve.sessions import action_language
    from dart_cli.serve.standalone import model_settings, refuse_no_model, serve_model

    config: Config
    if config_path is None:
        config, language = model_settings(Path(model), overrides)
    else:
        config = load_checked(config_path, [*overrides, f"model.path={to_toml(model)}"], "rollout")
        language = action_language(config)
    refuse_no_model(config)
    if dry_run:
        serve = config.serve
        typer.echo(f"model:     {config.model.path} by the engine {config.rollout.engine}")
        typer.echo(f"serves:    {serve.host}:{serve.port}, {serve.sessions} requests at once")
        typer.echo("valid; nothing was started")
        return
    serve_model(config, language, guarded=guarded)


def _check_packages() -> None:
    """Raise MissingPartError if a package that the endpoint needs is missing."""
    from bus.errors import MissingPartError

    try:
        import starlette
        import uvicorn
    except ModuleNotFoundError as error:
        raise MissingPartError(
            f"`dart serve` needs the package {error.name}: pip install -e '.[view]' in dart's folder"
        ) from None
    del starlette, uvicorn
