"""Where guests come from.

Provider      gives an environment a guest in its initial state
UrlProvider   a guest server that runs already; one per slot
container.py  the other one: a container per slot, made anew for each episode
"""

from __future__ import annotations

from typing import Protocol

from envs.osworld.guest import Address
from envs.pool import ResourcePool


class Provider(Protocol):
    """One slot's source of guests. Not thread-safe."""

    def fresh(self) -> Address:
        """A guest, in its initial state if the provider can reset it. Raises EnvError."""
        ...

    def close(self) -> None:
        """Release the guest; may be called twice."""
        ...


class UrlProvider:
    """A guest that is used as it is: changes of an episode stay."""

    def __init__(self, urls: ResourcePool[Address]) -> None:
        self._urls = urls
        self._address: Address | None = None

    def fresh(self) -> Address:
        """The same guest each time. Raises EnvError if all are in use."""
        if self._address is None:
            self._address = self._urls.take()
        return self._address

    def close(self) -> None:
        """Release the guest."""
        address, self._address = self._address, None
        if address is not None:
            self._urls.give_back(address)
