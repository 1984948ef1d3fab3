"""The trainer's publications: each begins after an update and is completed beside the following ones.

make_channel   makes the weight channel that a configuration names
Publications   publishes one version at a time: the next change of the weights waits until they are copied,
               and a version is announced once it is complete

The trainer stands still in three cases: while a publication begins; until the copy is complete, before the
optimizer changes the weights (torchtitan's rule); and until the version before is complete and announced,
when the next publication begins. Digests, files and the announcement take place beside training. So
versions are announced in order, each once, and none before it is whole.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from bus.weights import WeightsPublished
from dart_cli.config.endpoints import own_address, weights_dir
from dart_cli.config.schema import Config
from dart_cli.weights.broadcast.channel import BroadcastChannel
from dart_cli.weights.broadcast.transport import Transport
from dart_cli.weights.file import FileChannel, Publication
from dart_cli.weights.manifest import Published

Announce = Callable[[WeightsPublished], Awaitable[None]]


def make_channel(config: Config) -> FileChannel:
    """Return the weight channel that a configuration names. Raises RunDirectoryError, ConfigError."""
    weights = config.weights
    directory, shared = weights_dir(config).absolute(), weights.directory is None
    lora = config.model.lora
    if weights.channel == "file":
        return FileChannel(directory, weights.keep, shared=shared, lora=lora)
    transport = Transport(weights.channel, own_address(config), config.train.device)
    return BroadcastChannel(directory, transport, weights.keep, shared=shared, lora=lora)


class Publications:
    """The publications of one trainer. Its event loop calls the methods, except for `before_change`."""

    def __init__(self, announce: Announce, enter: Callable[[str], None]) -> None:
        """`announce` sends an announcement to the data service, and waits until it is accepted.

        `enter` begins a phase of the process, "publishing" or "training".
        """
        self._announce = announce
        self._enter = enter
        self._loop = asyncio.get_running_loop()
        self._publication: Publication | None = None
        self._following: asyncio.Task[None] | None = None
        self._took_s = self._stalled_s = 0.0  # since the last call of `times`

    async def announce(self, published: Published, updates: int) -> None:
        """Announce a complete version, whose weights contain `updates` updates, to the data service."""
        await self._announce(
            WeightsPublished(
                policy_version=published.policy_version,
                path=str(published.path),
                digest=published.digest,
                updates=updates,
            )
        )

    async def begin(self, begin: Callable[[], Awaitable[Publication]], updates: int) -> None:
        """Begin a publication, once the one before is complete and announced. Raises its errors."""
        await self.complete()
        with self._standing_still():
            self._publication = await begin()
        self._following = asyncio.create_task(self._follow(self._publication, updates))

    async def complete(self) -> None:
        """Wait until no publication is under way. Raises WeightsError, and errors of the data service."""
        if self._following is not None:
            with self._standing_still():
                await self._following
            self._following = self._publication = None

    def raise_failed(self) -> None:
        """Raise the error of a publication that has failed, before anything waits for it."""
        if self._following is not None and self._following.done():
            self._following.result()

    def before_change(self) -> None:
        """Wait until the weights are copied; the torch thread calls this before it changes them.

        Raises WeightsError.
        """
        publication = self._publication
        if publication is None:
            return
        if publication.is_copied:
            publication.wait_until_copied()  # raises the error of a publication that failed
            return
        self._loop.call_soon_threadsafe(self._enter, "publishing")
        try:
            with self._standing_still():
                publication.wait_until_copied()
        finally:
            self._loop.call_soon_threadsafe(self._enter, "training")

    def times(self) -> dict[str, float]:
        """Return metrics since the last call: seconds of complete publications, and seconds of standstill."""
        metrics = {"publish_s": self._took_s, "publish_stall_s": self._stalled_s}
        self._took_s = self._stalled_s = 0.0
        return metrics

    async def close(self) -> None:
        """Announce nothing any more. The channel ends a publication that is under way."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)
            self._following = self._publication = None

    async def _follow(self, publication: Publication, updates: int) -> None:
        published = await asyncio.to_thread(publication.result)
        self._took_s += publication.seconds
        await self.announce(published, updates)

    @contextmanager
    def _standing_still(self) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self._stalled_s += time.monotonic() - began
