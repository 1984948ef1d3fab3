"""How a process joins a group, by the backend that the run is configured for."""

from __future__ import annotations

from dart_cli.weights.broadcast.gloo import GlooGroup
from dart_cli.weights.broadcast.group import ByteGroup, Member, Transport
from dart_cli.weights.broadcast.rendezvous import GroupStore


def join(transport: Transport, member: Member, store: GroupStore) -> ByteGroup:
    """Meet the others. Raises WeightsError if one does not join within `JOIN_S`."""
    if transport.backend == "nccl":
        from dart_cli.weights.broadcast.nccl import NcclGroup

        return NcclGroup(transport, member, store)
    return GlooGroup(transport, member, store)
