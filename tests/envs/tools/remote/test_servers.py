"""Slots are spread over servers; one that is down comes last."""

import pytest

from envs.contract.queueing import GivenUpError, PendingCall, SharedWait, answering
from envs.tools.remote.servers import LONGEST_PAUSE_S, Address, Retry, SharedServers

A, B, C = (Address("box", port) for port in (1, 2, 3))


def test_slots_are_spread_over_the_servers():
    servers = SharedServers([A, B, C])
    addresses = []
    for _ in range(6):
        addresses.append(servers.in_order()[0])
        servers.took(addresses[-1])
    assert sorted(addresses, key=lambda each: each.port) == [A, A, B, B, C, C]
    servers.gave_back(B)
    assert servers.in_order()[0] == B


def test_a_server_that_failed_comes_last_until_it_serves_again():
    servers = SharedServers([A, B])
    first = servers.in_order()[0]
    servers.failed(first)
    assert servers.in_order()[1] == first
    servers.took(first)
    servers.gave_back(first)
    servers.failed(B if first == A else A)
    assert servers.in_order()[0] == first


def test_a_pause_is_a_wait_in_a_queue_which_ends_with_its_slot():
    waits = []
    call = PendingCall(waits.append)
    retry = Retry(1000)
    with answering(call):
        call.given_up.set()
        with pytest.raises(GivenUpError):
            retry.again()
        call.given_up.clear()
        assert Retry(0.01).again()
    assert waits == [SharedWait("a server that is down or full", 0.01), None]


def test_pauses_grow_to_a_bound_and_end():
    pauses = []
    retry = Retry(1000, pauses.append)
    for _ in range(8):
        assert retry.again()
    assert pauses[:3] == [0.2, 0.4, 0.8]
    assert max(pauses) == LONGEST_PAUSE_S
    assert not Retry(0, pauses.append).again()
