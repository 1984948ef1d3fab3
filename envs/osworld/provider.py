"""Where guests come from.

Provider      what an environment asks for a guest in its first state
UrlProvider   a guest server that someone else started; `Urls` deals them out, one a slot
container.py  has the other one: a container for each slot, made anew for each episode
"""

from __future__ import annotations

from typing import Protocol

from envs.osworld.guest import Address
from envs.pool import ResourcePool


class Provider(Protocol):
    """One slot's source of guests. Not thread-safe."""

    def fresh(self) -> Address:
        """A guest in its first state, where the provider can make one. Raises EnvError."""
        ...

    def close(self) -> None:
        """Give back what it holds; may be called twice."""
        ...


class UrlProvider:
    """A guest that is used as it is found: what an episode did to it stays."""

    def __init__(self, urls: ResourcePool[Address]) -> None:
        self._urls = urls
        self._address: Address | None = None

    def fresh(self) -> Address:
        """The same guest each time. Raises EnvError where all are in use."""
        if self._address is None:
            self._address = self._urls.take()
        return self._address

    def close(self) -> None:
        """Leave the guest to others."""
        address, self._address = self._address, None
        if address is not None:
            self._urls.give_back(address)
