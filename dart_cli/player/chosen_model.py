"""The model that plays in this process.

loaded_model      loads the configured engine with the weights to play
chosen_weights    returns the directory and version of these weights
newest_announced  returns the run's newest version, according to its database
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from bus.errors import RunDirectoryError, StoreError, UserError
from dart_cli.config.endpoints import weights_dir
from dart_cli.config.schema import Config
from dart_cli.runtime.waits import OpenWaits

if TYPE_CHECKING:
    from bus.messages import ActRequest, Completion
    from dart_cli.engines.base import Model, PromptEncoder, Responder
    from dart_cli.weights.manifest import Published


@contextlib.asynccontextmanager
async def loaded_model(
    config: Config,
    directory: Path | None,
    version: int,
    *,
    load_s: float | None = None,
    waits: OpenWaits | None = None,
) -> AsyncIterator[Model]:
    """Yield the configured engine with the weights in `directory`, or with the model folder's if it is None.

    Adapters are served with the settings that are stored with them. The engine is closed at the end. `waits`
    reports the loading, and the wait for each answer. Raises ModelError, WeightsError, MissingPartError,
    UserError for adapters that the engine cannot serve, and TimeoutError if loading takes longer than
    `load_s` seconds.
    """
    from dart_cli.rollout.worker import load_model  # late: loads the engine's parts
    from dart_cli.weights.manifest import read_manifest

    if directory is not None and (lora := read_manifest(directory).lora) is not None:
        stored = config.model.model_copy(update={"lora": lora, "adapters": ""})
        config = config.model_copy(update={"model": stored})
    if directory is None and config.model.adapters and config.rollout.engine == "vllm":
        raise UserError(
            'model.adapters are served by rollout.engine = "vllm" from a run\'s first version on; set '
            '"transformers", or merge them into a model folder'
        )
    reports = waits or OpenWaits()
    with reports.waiting("the model to load", load_s):
        async with asyncio.timeout(load_s):
            model = await asyncio.to_thread(load_model, config)
    try:
        if directory is not None:
            with reports.waiting(f"the engine to take the weights in {directory}"):
                await model.engine.update_weights(directory, version)
        yield replace(model, responder=_Reporting(model.responder, waits)) if waits else model
    finally:
        await model.engine.close()


class _Reporting:
    """A Responder that reports the wait for each answer to `waits`."""

    def __init__(self, responder: Responder, waits: OpenWaits) -> None:
        self._responder, self._waits = responder, waits

    @property
    def prompt_encoder(self) -> PromptEncoder:
        """See Responder."""
        return self._responder.prompt_encoder

    async def preload_images(self, request: ActRequest) -> object:
        """See Responder."""
        return await self._responder.preload_images(request)

    async def answer(self, request: ActRequest) -> Completion:
        """See Responder."""
        what = f"the model to answer step {request.step} of {request.trajectory_id}"
        with self._waits.waiting(what):
            return await self._responder.answer(request)


def chosen_weights(config: Config, weights: Path | None) -> tuple[Path | None, int]:
    """Return (directory, version) of the weight set to play; (None, -1) if the run has none yet.

    Raises UserError if the directory does not exist, WeightsError if it has no weights.
    """
    from dart_cli.weights.manifest import newest_version, read_manifest

    if weights is not None:
        newest = newest_version(weights)
        if newest is not None:
            return newest.path, newest.policy_version
        if not weights.is_dir():
            raise UserError(f"--weights {weights}: no such directory; a run's are in RUN/weights")
        return weights, read_manifest(weights).policy_version
    newest = newest_announced(config)
    return (None, -1) if newest is None else (newest.path, newest.policy_version)


def newest_announced(config: Config) -> Published | None:
    """Return the run's newest version that is on disk; None if the run has none yet.

    The newest version that the trainer announced is preferred, because the run has no record of the updates
    in a later one. If there is no database, as on another host, or none of its versions is on disk, the
    newest of all is returned.
    """
    from dart_cli.data.store.open import open_reader  # late: sqlite
    from dart_cli.weights.manifest import newest_version

    directory = weights_dir(config)
    try:
        with open_reader(config.run.dir) as reader:
            announced = {row.policy_version: row.digest for row in reader.versions()}
    except (RunDirectoryError, StoreError):
        announced = {}
    return newest_version(directory, announced) or newest_version(directory)
