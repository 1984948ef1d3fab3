"""`dart serve --model DIR`: the chat endpoint of one model, without a run; nothing is stored or trained on.

model_settings   returns the configuration for a model folder, and the model's action language
refuse_no_model  raises an error for an engine that has no model
serve_model      loads the model in this process and answers requests until a signal ends it
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from bus.errors import ConfigError
from dart_cli.config.families import FAMILIES, recognise
from dart_cli.config.load import Source, config_of_model
from dart_cli.config.model_folder import BUILTIN, model_folder, model_problem
from dart_cli.config.rules.check import check_config
from dart_cli.config.schema import MODEL_ENGINES, Config
from dart_cli.player.chosen_model import loaded_model
from dart_cli.player.episodes import InProcessPolicy
from dart_cli.runtime.background import run_until_stopped
from dart_cli.runtime.http_server import address, listen, make_server
from dart_cli.runtime.role import end_with_parent, limit_threads
from dart_cli.runtime.waits import OpenWaits
from dart_cli.serve.app import make_app
from dart_cli.serve.sessions import Sessions, action_language
from dart_cli.serve.worker import SPARE, STOPPED, say_address, token_for

MAX_TOKENS = 1024
"""Most tokens of a completion whose request sets no limit. A configuration file sets `rollout.max_tokens`."""


def model_settings(model: Path, overrides: list[str]) -> tuple[Config, Mapping[str, str | int]]:
    """Return (configuration, action language) for a model folder, without a configuration file.

    The action language is taken from the folder's family; it is {} if no family is recognised. Raises
    ConfigError for wrong overrides and for a folder that cannot be loaded.
    """
    if problem := model_problem(str(model)):
        raise ConfigError(f"--model {problem}")
    changes = [f"rollout.max_tokens={MAX_TOKENS}", *overrides]
    config = config_of_model(model, changes)
    check_config(config, Source(model, tuple(changes)), "rollout")
    names = {override.partition("=")[0].strip() for override in overrides}
    if config.model.path in BUILTIN or "policy.action_parser" in names or "policy.family" in names:
        return config, action_language(config)
    try:
        family = FAMILIES[recognise(model_folder(config.model.path)).name]
    except ConfigError:
        return config, {}
    return config, {"action_parser": family.action_parser, "coordinates": family.coordinates}


def refuse_no_model(config: Config) -> None:
    """Raise ConfigError for an engine that has no model."""
    if config.rollout.engine not in MODEL_ENGINES and ":" not in config.rollout.engine:
        raise ConfigError(
            f"rollout.engine = {config.rollout.engine!r} has no model; use transformers or vllm"
        )


def serve_model(config: Config, language: Mapping[str, str | int], *, guarded: bool) -> None:
    """Load the model and serve it until a signal arrives; pending requests then have a moment to end.

    With `guarded`, requests from loopback need the token as well. Raises UserError if the address cannot be
    used, ModelError and MissingPartError if the model cannot be loaded.
    """
    limit_threads(config.rollout.threads)
    end_with_parent()
    waits = OpenWaits()
    run_until_stopped(_serve(config, language, waits, guarded=guarded), waits, lambda: None)


async def _serve(
    config: Config, language: Mapping[str, str | int], waits: OpenWaits, *, guarded: bool
) -> None:
    serve = config.serve
    token = token_for(serve.host, guarded=guarded)
    with closing(listen(serve.host, serve.port, 0, ("serve.host", "serve.port"))) as listener:
        endpoint = address(serve.host, listener.getsockname()[1]) + "v1"
        sys.stderr.write(f"loading {config.model.path}\n")
        sys.stderr.flush()
        async with loaded_model(config, None, -1, waits=waits) as model:
            policy = InProcessPolicy(model.responder)
            sessions = Sessions(config, policy, None, action_language=language)
            app = make_app(sessions, host=serve.host, token=token)
            server = make_server(app, serve.sessions + SPARE, signals=False)
            serving = asyncio.create_task(server.serve(sockets=[listener]), name="server")
            watching = asyncio.create_task(sessions.watch(), name="watch")
            say_address(config.model.path, endpoint, token)
            try:
                await asyncio.wait([serving, watching], return_when=asyncio.FIRST_COMPLETED)
            finally:
                await sessions.give_back(STOPPED)
                server.should_exit = True
                watching.cancel()
                results = await asyncio.gather(serving, watching, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception):
            raise result
