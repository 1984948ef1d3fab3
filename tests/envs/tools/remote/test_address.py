"""Addresses, tokens and certificates are refused before anything starts where they cannot be right."""

import pytest

from bus.errors import TaskError
from envs.tools.remote.servers import Access, Address, read_access, read_address, read_addresses


@pytest.mark.parametrize(
    ("url", "http", "websocket"),
    [
        ("http://box", "http://box:8000", "ws://box:8000"),
        ("ws://box:9/", "http://box:9", "ws://box:9"),
        ("https://box/space/", "https://box:443/space", "wss://box:443/space"),
        ("wss://[::1]:7", "https://[::1]:7", "wss://[::1]:7"),
    ],
)
def test_an_address_is_read(url, http, websocket):
    address = read_address(url, 8000)
    assert (address.http, address.websocket) == (http, websocket)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("box:8000", "url must be http"),
        ("ftp://box", "url must be http"),
        ("http://box:0x", "url must be http"),
        ("http://box?token=1", "url must be http"),
        ("http://me:secret@box", "token_env"),
    ],
)
def test_what_is_no_address_says_why_and_never_the_password(url, why):
    with pytest.raises(TaskError, match=why) as error:
        read_address(url, 1)
    assert "secret" not in str(error.value)


@pytest.mark.parametrize("url", ["", [], 5, ["http://a", "http://a:8000/"], [1]])
def test_lists_name_each_server_once(url):
    with pytest.raises(TaskError, match="url"):
        read_addresses(url, 8000)


def test_a_token_is_read_from_the_environment_and_never_shown(monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "hush")
    access = read_access("MY_TOKEN", "", [Address("box", 1, secure=True)])
    assert access.headers == {"Authorization": "Bearer hush"}
    assert "hush" not in repr(access)


def test_a_token_never_leaves_this_machine_unencrypted(monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "hush")
    assert read_access("MY_TOKEN", "", [Address("127.0.0.1", 1)]).token == "hush"
    with pytest.raises(TaskError, match="https"):
        read_access("MY_TOKEN", "", [Address("box", 1)])


def test_a_token_that_is_not_set_and_a_file_that_is_not_there_are_named(tmp_path, monkeypatch):
    monkeypatch.delenv("MY_TOKEN", raising=False)
    with pytest.raises(TaskError, match="MY_TOKEN"):
        read_access("MY_TOKEN", "", [])
    with pytest.raises(TaskError, match="ca_file"):
        read_access("", str(tmp_path / "ca.pem"), [])
    assert Access().headers == {}
