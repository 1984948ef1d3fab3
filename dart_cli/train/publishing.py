"""The trainer's publications: begun after an update, complete beside what follows.

make_channel   the weight channel that a configuration asks for
Publications   one at a time: holds the next change of the weights back until they are copied, and
               announces a version once it is complete

The trainer stands still while a publication begins, where the copy is not over before the next optimizer
step (torchtitan's rule), and where the version before is not complete and announced when the next one
begins. Digests, files and announcement take place beside training. So versions are announced in order,
each once, and none before it is whole.
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
    """Return the weight channel that a configuration asks for. Raises RunDirectoryError, ConfigError."""
    weights = config.weights
    directory, shared = weights_dir(config).absolute(), weights.directory is None
    lora = config.model.lora
    if weights.channel == "file":
        return FileChannel(directory, weights.keep, shared=shared, lora=lora)
    transport = Transport(weights.channel, own_address(config), config.train.device)
    return BroadcastChannel(directory, transport, weights.keep, shared=shared, lora=lora)


class Publications:
    """Those of one trainer. For its event loop, but for `before_change`."""

    def __init__(self, announce: Announce, enter: Callable[[str], None]) -> None:
        """`enter` enters a phase of the process: "publishing", and "training" again."""
        self._announce = announce
        self._enter = enter
        self._loop = asyncio.get_running_loop()
        self._publication: Publication | None = None
        self._following: asyncio.Task[None] | None = None
        self._took_s = self._stalled_s = 0.0  # since `times` was asked

    async def announce(self, published: Published, updates: int) -> None:
        """Tell data of a complete version, whose weights hold so many updates."""
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
        """Wait until there is no publication on its way. Raises WeightsError, and what data refuses with."""
        if self._following is not None:
            with self._standing_still():
                await self._following
            self._following = self._publication = None

    def raise_failed(self) -> None:
        """Raise the error of a publication that has failed, before anything waits for it."""
        if self._following is not None and self._following.done():
            self._following.result()

    def before_change(self) -> None:
        """For torch's thread, which is about to change the weights: wait until they are copied.

        Raises WeightsError.
        """
        publication = self._publication
        if publication is None:
            return
        if publication.is_copied:
            publication.copied()  # raises what has failed
            return
        self._loop.call_soon_threadsafe(self._enter, "publishing")
        try:
            with self._standing_still():
                publication.copied()
        finally:
            self._loop.call_soon_threadsafe(self._enter, "training")

    def times(self) -> dict[str, float]:
        """Metrics, of publications since the last call: seconds of those that are complete, of standstill."""
        found = {"publish_s": self._took_s, "publish_stall_s": self._stalled_s}
        self._took_s = self._stalled_s = 0.0
        return found

    async def close(self) -> None:
        """Announce no more; what is on its way is the channel's to end."""
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
