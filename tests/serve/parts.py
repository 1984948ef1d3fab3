"""The endpoint over a policy and a data service that answer at once, and a client, for the endpoint's tests."""

from __future__ import annotations

import asyncio
import base64
import http.client
import io
import json
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

from PIL import Image

from bus.errors import DeadlineError, TaskError
from bus.heartbeat import HeartbeatSender, Load
from bus.messages import Ack, ActRequest, Completion, Lease, LeaseRequest, Message, TrajectoryEnd
from dart_cli.config.schema import Config
from dart_cli.env.data_client import DataClient, LeaseWaitStats
from dart_cli.env.episode import Policy
from dart_cli.env.router import RolloutRouter, RoutingStats
from dart_cli.runtime.http_server import make_server
from dart_cli.serve.app import make_app
from dart_cli.serve.sessions import RunPeers, Sessions, action_language
from envs.contract.registry import find_task
from tests.env.parts import Memory, Says, lease
from tests.waiting import PATIENCE_S

BODY_BYTES = 2**20


class Data(Memory):
    """As much of a DataClient as sessions use: leases one after the other, a sink in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.leases = LeaseWaitStats()
        self.requests: list[LeaseRequest] = []
        self.given_back: list[TrajectoryEnd] = []
        self.refusal = ""
        self.max_steps = 8  # 0: the task's own
        self.sampling_seed = 1000
        self.tasks: list[str] = []  # that are leased first
        self.away = asyncio.Event()  # set: it answers nothing
        self.back = asyncio.Event()

    async def lease(self, request: LeaseRequest, seconds: float) -> Lease:
        self.requests.append(request)
        if self.refusal:
            raise DeadlineError(
                f"waited {seconds:g} s for a lease from the data service: {self.refusal}"
            )
        if request.task == "mini/none":
            raise TaskError("no training task 'mini/none' in this run")
        task = request.task or (self.tasks.pop(0) if self.tasks else "mini/menu")
        steps = self.max_steps or find_task("mini", task).max_steps
        new_lease = lease(task, seed=len(self.requests), max_steps=steps)
        sampling = new_lease.sampling.model_copy(update={"seed": self.sampling_seed})
        return new_lease.model_copy(update={"sampling": sampling})

    async def step(self, record: Any) -> Ack:
        if self.away.is_set():
            await self.back.wait()
        return await super().step(record)

    async def end(self, end: TrajectoryEnd) -> Ack:
        if self.away.is_set():
            await self.back.wait()
        return await super().end(end)

    async def give_back(self, end: TrajectoryEnd) -> None:
        self.given_back.append(end)


class Router:
    """A router to one policy in this process."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.routed = RoutingStats()
        self.ready = asyncio.Event()
        self.ready.set()

    async def act(self, request: ActRequest) -> Completion:
        return await self.policy.act(request)

    async def wait_ready(self) -> None:
        await self.ready.wait()

    def missing(self) -> str:
        return "a rollout worker: start `dart rollout`"

    def forget(self, trajectory_id: str) -> None:
        assert trajectory_id


class GatedPolicy(Says):
    """A policy that answers with its texts once `may` is set."""

    def __init__(self, *texts: str) -> None:
        super().__init__(*texts)
        self.may = asyncio.Event()

    async def act(self, request: ActRequest) -> Completion:
        self.requests.append(request)
        await self.may.wait()
        self.requests.pop()
        return await super().act(request)


class Silence:
    """A publisher that drops all heartbeats."""

    def publish(self, message: Message) -> None:
        pass


@dataclass
class Reply:
    status: int
    body: dict[str, Any]
    headers: Mapping[str, str]
    text: str = ""

    @property
    def error(self) -> str:
        return str(self.body["error"]["message"])

    @property
    def code(self) -> str:
        return str(self.body["error"]["code"])

    @property
    def content(self) -> str:
        return str(self.body["choices"][0]["message"]["content"])


@dataclass
class Endpoint:
    """The endpoint on a socket, and what is behind it."""

    port: int
    data: Data
    sessions: Sessions
    router: Router
    headers: dict[str, str] = field(default_factory=dict)

    async def call(
        self, method: str, path: str, body: object = None, headers: Mapping[str, str] | None = None
    ) -> Reply:
        """Send one request in a thread, and return the reply. A body that is not bytes is sent as JSON."""
        return await asyncio.to_thread(self._call, method, path, body, headers or {})

    def _call(self, method: str, path: str, body: object, headers: Mapping[str, str]) -> Reply:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        content_type = {"content-type": "application/json"} if body is not None else {}
        try:
            connection.request(method, path, data, {**content_type, **self.headers, **headers})
            answer = connection.getresponse()
            text = answer.read().decode()
        finally:
            connection.close()
        reply_headers = {key.lower(): value for key, value in answer.getheaders()}
        is_json = reply_headers.get("content-type") == "application/json"
        body = json.loads(text) if is_json else {}
        return Reply(answer.status, cast("dict[str, Any]", body), reply_headers, text)

    async def open(self, **fields: object) -> str:
        """Open a session and return its id."""
        reply = await self.call("POST", "/v1/sessions", fields)
        assert reply.status == 201, reply
        return str(reply.body["id"])

    async def chat(
        self,
        session: str,
        messages: list[Any],
        headers: Mapping[str, str] | None = None,
        **fields: object,
    ) -> Reply:
        """Ask for a completion in a session."""
        body = {"model": "dart", "messages": messages, **fields}
        return await self.call("POST", f"/v1/sessions/{session}/chat/completions", body, headers)

    async def end(self, session: str, **fields: object) -> Reply:
        """End a session with a verdict."""
        return await self.call("POST", f"/v1/sessions/{session}/end", fields)


@asynccontextmanager
async def endpoint(
    policy: Policy | None = None,
    *,
    host: str = "127.0.0.1",
    token: str = "",
    idle_s: float = 600.0,
    lease_wait_s: float = 30.0,
    alone: bool = False,
    **serve: object,
) -> AsyncIterator[Endpoint]:
    """Yield the endpoint over `policy`, in this loop, of a run or `alone`; `serve` are settings of [serve]."""
    config = Config.model_validate(
        {
            "serve": {"sessions": 3, **serve},
            "rollout": {"max_tokens": 16, "temperature": 1.0},
        }
    )

    def load() -> Load:
        return sessions.load()

    data, router = Data(), Router(policy or Says("click(500,500)"))
    heartbeat = HeartbeatSender(Silence(), "serve", "serve-0", load)
    run = RunPeers("serve-0", cast("DataClient", data), cast("RolloutRouter", router), heartbeat)
    sessions = Sessions(
        config,
        router,
        None if alone else run,
        action_language=action_language(config),
        idle_s=idle_s,
        lease_wait_s=lease_wait_s,
    )
    listener = socket.create_server(("127.0.0.1", 0))
    server = make_server(
        make_app(sessions, host=host, token=token, body_bytes=BODY_BYTES), 64, signals=False
    )
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    watching = asyncio.create_task(sessions.watch())
    try:
        yield Endpoint(listener.getsockname()[1], data, sessions, router)
    finally:
        heartbeat.beat()  # the gauges can be sent
        server.should_exit = True
        watching.cancel()
        await serving
        listener.close()


def picture(shade: int, width: int = 84, height: int = 56) -> bytes:
    """Return a PNG of one colour."""
    into = io.BytesIO()
    Image.new("RGB", (width, height), (shade, 90, 200)).save(into, "PNG")
    return into.getvalue()


def url(image: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(image).decode()}"


def image_part(image: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url(image)}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def first(shade: int = 1) -> list[dict[str, Any]]:
    """Return the messages of a first step."""
    return [user(image_part(picture(shade)), text("pick red"))]
