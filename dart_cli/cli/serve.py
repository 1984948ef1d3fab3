"""`dart serve`: the policy as a chat endpoint, a process of a run in the place of `dart env`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from dart_cli.cli.options import (
    ConfigPath,
    Force,
    WorkerOption,
    load_checked,
    print_dry_run,
)
from dart_cli.runtime.options import DryRun, Overrides

if TYPE_CHECKING:
    import asyncio

serving = typer.Typer()


@serving.command()
def serve(
    config_path: ConfigPath,
    overrides: Overrides = None,
    port: Annotated[
        int | None,
        typer.Option(
            min=0, max=65535, show_default=False, help="0 for any; default serve.port, 8480."
        ),
    ] = None,
    token: Annotated[
        bool,
        typer.Option(
            "--token", help="Ask for a token on loopback, too: for a machine that others use."
        ),
    ] = False,
    worker: WorkerOption = "",
    force: Force = False,
    dry_run: DryRun = False,
) -> None:
    """Serve the policy as an OpenAI-compatible chat endpoint to agents of other programs, and train on what they play.

    A process of a run in the place of `dart env`. An agent opens a session, which is one episode of a task,
    asks for completions with screenshots as data URLs, acts in its own environment, and hands in a reward:

    curl --json '{"task": "mini/click"}' localhost:8480/v1/sessions

    curl --json '{"model": "dart", "messages": [...]}' localhost:8480/v1/sessions/ID/chat/completions

    curl --json '{"reward": 1}' localhost:8480/v1/sessions/ID/end

    On loopback unless serve.host names another address; beyond it with a token, the API key, from the
    environment variable DART_SERVE_TOKEN or else drawn and printed. docs/serve.md has the rest.

    Example: dart up my.toml --set up.serve=true --set up.envs=0

    Example: dart serve my.toml --port 8481
    """
    config = load_checked(config_path, overrides, "serve")
    if port is not None:
        served = config.serve.model_copy(update={"port": port})
        config = config.model_copy(update={"serve": served})
    _check_packages()
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


def _check_packages() -> None:
    """Raise MissingPartError where a package is missing."""
    from bus.errors import MissingPartError

    try:
        import starlette
        import uvicorn
    except ModuleNotFoundError as error:
        raise MissingPartError(
            f"`dart serve` needs the package {error.name}: pip install -e '.[view]' in dart's folder"
        ) from None
    del starlette, uvicorn
