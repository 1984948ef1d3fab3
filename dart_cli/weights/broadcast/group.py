"""A process group of the trainer and some workers, by the backend that the run is configured for.

join   makes the group: a GlooGroup (gloo.py) or an NcclGroup (nccl.py)
"""

from __future__ import annotations

from dart_cli.weights.broadcast.gloo import GlooGroup
from dart_cli.weights.broadcast.nccl import NcclGroup
from dart_cli.weights.broadcast.rendezvous import GroupStore
from dart_cli.weights.broadcast.transport import ByteGroup, Member, Transport


def join(transport: Transport, member: Member, store: GroupStore) -> ByteGroup:
    """Return the group, once all of its processes have joined.

    Raises WeightsError if one of them does not join within `JOIN_S`.
    """
    group = NcclGroup if transport.backend == "nccl" else GlooGroup
    return group(transport, member, store)
