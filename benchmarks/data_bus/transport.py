"""What do request and reply over the bus cost beside raw pyzmq and Ray actor calls: latency, MB/s, CPU?

    python benchmarks/data_bus/transport.py [--rounds 3] [--seconds 1] [--out benchmarks/results/transport.json]
    python benchmarks/data_bus/transport.py --ray-python /tmp/rayvenv/bin/python    the Ray arm has its own Python:
        python -m venv /tmp/rayvenv && /tmp/rayvenv/bin/pip install ray

Two exchanges between two real processes over ipc://: a step with its screenshot is acknowledged
(StepRecord -> Ack), a screen draws a completion (ActRequest -> Completion). Per exchange one
screenshot of 448x336 and one of 1920x1080, with 1 and with 64 requests in flight.

    ours          Requester and Replier: typed, validated on both sides, idempotent ids, deadlines
    zmq_asyncio   pyzmq's asyncio DEALER and ROUTER, msgpack of the same fields, nothing validated
    zmq_blocking  pyzmq without asyncio: the physical floor of ZeroMQ in Python
    ray           an asyncio actor's method called with the same fields as a dict

Arms run one after the other in each round, each in fresh processes; medians over the rounds. CPU
is of all threads of the serving process, per request. A ratio is our figure divided by theirs: of
latencies lower is better, of MB/s higher. The limit is `zmq_blocking`. Building and validating our messages is
counted. The heartbeats of 20 processes through the forwarder are measured apart. The last line is one JSON object.
"""

# The parts of `dart` are imported where they are used: Ray's Python has none of them.
from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.data_bus.transport_meter import Ask, Cell, LatencyMeter, cpu_s, measure  # noqa: E402 - after the path
from benchmarks.data_bus.transport_payload import Fields, payload, write_payload  # noqa: E402

IN_FLIGHT = (1, 64)
DEADLINE_S = 60.0
RAY_STORE_BYTES = 200 * 2**20


# --- ours -----------------------------------------------------------------------------------


async def serve_ours(endpoint: str, sizes: dict[str, dict[str, tuple[Fields, Fields]]]) -> None:
    """Answer every request with the reply of its exchange and size."""
    from bus.messages import Ack, ActRequest, Completion, Reply, Request
    from bus.requests import Replier

    by_width = {
        request["width"]: reply
        for exchanges in sizes.values()
        for request, reply in exchanges.values()
        if "width" in request
    }

    async def handler(client: str, request: Request) -> Reply:  # noqa: ARG001 - as a Handler is
        if isinstance(request, ActRequest):
            return Completion(**by_width[request.width])
        return Ack(accepted=True, note="")

    async with Replier(endpoint) as replier:
        await replier.serve(handler)


@asynccontextmanager
async def ask_ours(endpoint: str) -> AsyncIterator[Callable[[str, Fields], Ask]]:
    """Yield a function from exchange and fields to what asks once."""
    from bus.messages import ActRequest, Request, StepRecord
    from bus.requests import Requester

    types: dict[str, type[Request]] = {
        "StepRecord-Ack": StepRecord,
        "ActRequest-Completion": ActRequest,
    }
    async with Requester(endpoint) as requester:

        def asks(exchange: str, fields: Fields) -> Ask:
            return lambda: requester.request(types[exchange](**fields), DEADLINE_S)

        yield asks


# --- raw pyzmq ------------------------------------------------------------------------------


def to_frames(exchange: str, fields: Fields) -> list[bytes]:
    """Return the kind, the msgpack of all fields but the screenshot, and the screenshot."""
    import msgpack

    rest = {name: value for name, value in fields.items() if name != "screenshot"}
    shot = [fields["screenshot"]] if "screenshot" in fields else []
    return [exchange.encode(), msgpack.packb(rest), *shot]


def from_frames(frames: list[bytes]) -> Fields:
    """Return the fields again."""
    import msgpack

    fields: Fields = msgpack.unpackb(frames[1])
    if len(frames) > 2:
        fields["screenshot"] = frames[2]
    return fields


def raw_answer(frames: list[bytes], replies: dict[tuple[str, int], Fields]) -> list[bytes]:
    """Return what a raw server sends back for `[client, id, kind, header, screenshot]`."""
    exchange = frames[2].decode()
    fields = from_frames(frames[2:])
    return [*frames[:2], *to_frames(exchange, replies[exchange, fields.get("width", 0)])]


def raw_replies(
    sizes: dict[str, dict[str, tuple[Fields, Fields]]],
) -> dict[tuple[str, int], Fields]:
    """Return the reply to each (exchange, width of the screenshot where the request has one)."""
    return {
        (exchange, request.get("width", 0)): reply
        for exchanges in sizes.values()
        for exchange, (request, reply) in exchanges.items()
    }


async def serve_zmq_asyncio(
    endpoint: str, sizes: dict[str, dict[str, tuple[Fields, Fields]]]
) -> None:
    """Serve a ROUTER one request at a time, since no handler here ever waits."""
    import zmq.asyncio

    replies = raw_replies(sizes)
    socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
    socket.bind(endpoint)
    while True:
        frames = await socket.recv_multipart()
        await socket.send_multipart(raw_answer(frames, replies), copy=False)


@asynccontextmanager
async def ask_zmq_asyncio(endpoint: str) -> AsyncIterator[Callable[[str, Fields], Ask]]:
    """Send requests by a DEALER and match the answers by id."""
    import zmq.asyncio

    socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
    socket.connect(endpoint)
    waiting: dict[bytes, asyncio.Future[list[bytes]]] = {}

    async def receive() -> None:
        while True:
            frames = await socket.recv_multipart()
            waiting.pop(frames[0]).set_result(frames[1:])

    def asks(exchange: str, fields: Fields) -> Ask:
        async def ask() -> Fields:
            key = uuid.uuid4().bytes
            waiting[key] = asyncio.get_running_loop().create_future()
            answer = waiting[key]
            await socket.send_multipart([key, *to_frames(exchange, fields)], copy=False)
            return from_frames(await answer)

        return ask

    receiving = asyncio.create_task(receive())
    try:
        yield asks
    finally:
        receiving.cancel()
        socket.close(linger=0)


def serve_zmq_blocking(endpoint: str, sizes: dict[str, dict[str, tuple[Fields, Fields]]]) -> None:
    """Serve a ROUTER in a plain loop."""
    import zmq

    replies = raw_replies(sizes)
    socket = zmq.Context.instance().socket(zmq.ROUTER)
    socket.bind(endpoint)
    while True:
        socket.send_multipart(raw_answer(socket.recv_multipart(), replies), copy=False)


def measure_zmq_blocking(
    endpoint: str, exchange: str, fields: Fields, in_flight: int, meter: LatencyMeter
) -> Cell:
    """Measure a DEALER that keeps a window of requests in flight."""
    import zmq

    asked_at: dict[bytes, float] = {}
    with zmq.Context.instance().socket(zmq.DEALER) as socket:
        socket.connect(endpoint)
        while meter.running or asked_at:
            while meter.running and len(asked_at) < in_flight:
                key = uuid.uuid4().bytes
                asked_at[key] = time.perf_counter()
                socket.send_multipart([key, *to_frames(exchange, fields)], copy=False)
            if asked_at:
                key, *answer = socket.recv_multipart()
                from_frames(answer)
                meter.note(asked_at.pop(key))
    return meter.result()


# --- Ray ------------------------------------------------------------------------------------


async def measure_ray(
    sizes: dict[str, dict[str, tuple[Fields, Fields]]], seconds: float
) -> dict[str, Cell]:
    """Measure all cells against one actor in a separate process, on a Ray cluster of this machine alone."""
    import ray

    ray.init(
        num_cpus=2,
        object_store_memory=RAY_STORE_BYTES,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
    )
    cells: dict[str, Cell] = {}
    try:

        @ray.remote(num_cpus=1, max_concurrency=64)
        class Actor:
            def __init__(self, replies: dict[tuple[str, int], Fields]) -> None:
                self._replies = replies

            async def pid(self) -> int:
                return os.getpid()

            async def answer(self, exchange: str, fields: Fields) -> Fields:
                return self._replies[exchange, fields.get("width", 0)]

        actor = Actor.remote(raw_replies(sizes))
        server = await actor.pid.remote()
        for name, exchange, fields, in_flight in cells_of(sizes):
            meter = LatencyMeter(seconds, server, len(fields["screenshot"]))

            async def ask(exchange: str = exchange, fields: Fields = fields) -> Fields:
                answer: Fields = await actor.answer.remote(exchange, fields)
                return answer

            if in_flight == 1:  # its quickest way: no event loop at the asker
                while meter.running:
                    asked_at = time.perf_counter()
                    ray.get(actor.answer.remote(exchange, fields))
                    meter.note(asked_at)
                cells[name] = meter.result()
            else:
                cells[name] = await measure(ask, in_flight, meter)
    finally:
        ray.shutdown()
    return cells


# --- processes ------------------------------------------------------------------------------


def cells_of(
    sizes: dict[str, dict[str, tuple[Fields, Fields]]],
) -> Iterator[tuple[str, str, Fields, int]]:
    """Yield the name, exchange, request fields and requests in flight of each cell."""
    for size, figures in sizes.items():
        for exchange, (request, _) in figures.items():
            for in_flight in IN_FLIGHT:
                yield f"{exchange} {size} x{in_flight}", exchange, request, in_flight


@contextmanager
def server_of(arm: str, endpoint: str, payload_at: Path) -> Iterator[int]:
    """Start the serving process of an arm and yield its pid."""
    command = [sys.executable, __file__, "--serve", arm, "--at", endpoint]
    with subprocess.Popen([*command, "--payload", str(payload_at)]) as process:
        try:
            yield process.pid
        finally:
            process.kill()


async def ask_all(arm: str, payload_at: Path, seconds: float) -> dict[str, Cell]:
    """Ask all cells of an arm, one after the other; this runs in the asking process."""
    sizes = payload(payload_at)
    if arm == "ray":
        return await measure_ray(sizes, seconds)
    endpoint = f"ipc://{payload_at.parent}/{arm}.ipc"
    cells: dict[str, Cell] = {}
    with server_of(arm, endpoint, payload_at) as server:
        if arm == "zmq_blocking":
            for name, exchange, fields, in_flight in cells_of(sizes):
                meter = LatencyMeter(seconds, server, len(fields["screenshot"]))
                cells[name] = measure_zmq_blocking(endpoint, exchange, fields, in_flight, meter)
            return cells
        async with (ask_ours if arm == "ours" else ask_zmq_asyncio)(endpoint) as asks:
            for name, exchange, fields, in_flight in cells_of(sizes):
                ask = asks(exchange, fields)
                await ask()  # the server has started
                meter = LatencyMeter(seconds, server, len(fields["screenshot"]))
                cells[name] = await measure(ask, in_flight, meter)
    return cells


def serve(arm: str, endpoint: str, payload_at: Path) -> None:
    """Run the serving process of an arm, until it is killed."""
    sizes = payload(payload_at)
    if arm == "zmq_blocking":
        serve_zmq_blocking(endpoint, sizes)
    asyncio.run((serve_ours if arm == "ours" else serve_zmq_asyncio)(endpoint, sizes))


def run_arm(arm: str, python: str, payload_at: Path, seconds: float) -> dict[str, Cell]:
    """Run one arm once, in fresh processes."""
    command = [python, __file__, "--ask", arm, "--payload", str(payload_at)]
    process = subprocess.run(
        [*command, "--seconds", str(seconds)], check=True, stdout=subprocess.PIPE, text=True
    )
    cells: dict[str, Cell] = json.loads(process.stdout.splitlines()[-1])
    return cells


def has_ray(python: str) -> bool:
    """Return True if that Python can import ray."""
    probe = "import importlib.util as u; raise SystemExit(u.find_spec('ray') is None)"
    return subprocess.run([python, "-c", probe], check=False).returncode == 0


# --- heartbeats -----------------------------------------------------------------------------


async def measure_heartbeats(folder: Path, workers: int = 20, each: int = 200) -> Cell:
    """Return the CPU microseconds of publishing, forwarding and reading one heartbeat, all in one process.

    They are sent as fast as they are read, so that the cost is of the heartbeats and not of the waiting.
    """
    from bus.heartbeat import HeartbeatSender, Liveness, Load
    from bus.messages import Heartbeat
    from bus.pubsub import Forwarder, Publisher, Subscriber

    inlet, outlet = f"ipc://{folder}/in.ipc", f"ipc://{folder}/out.ipc"
    gauges = {f"gauge_{i}": 1.5 * i for i in range(12)}
    leases = [uuid.uuid4().hex for _ in range(16)]
    liveness = Liveness()
    with Forwarder(inlet, outlet):
        async with Subscriber(outlet, [Heartbeat]) as subscriber:
            publishers = [Publisher(inlet) for _ in range(workers)]
            senders = [
                HeartbeatSender(
                    publisher, "env", f"env-{i}", lambda: Load("ready", 3, gauges, leases)
                )
                for i, publisher in enumerate(publishers)
            ]
            await asyncio.sleep(0.5)  # connections take a moment to stand
            before = cpu_s(os.getpid())
            for _ in range(each):
                for sender in senders:
                    sender.beat()
                for _ in senders:
                    heartbeat = await asyncio.wait_for(subscriber.next(), DEADLINE_S)
                    assert isinstance(heartbeat, Heartbeat)
                    liveness.observe(heartbeat)
            cost = 1e6 * (cpu_s(os.getpid()) - before) / (workers * each)
            for publisher in publishers:
                publisher.close()
    return {"cpu_us": cost, "core_share_at_20_per_s": 20 * cost / 1e6}


# --- main -----------------------------------------------------------------------------------


def medians(rounds: list[dict[str, Cell]]) -> dict[str, Cell]:
    """Return the median of each figure over the rounds."""
    return {
        cell: {
            figure: round(statistics.median(each[cell][figure] for each in rounds), 2)
            for figure in figures
        }
        for cell, figures in rounds[0].items()
    }


def ratios(cells_by_arm: dict[str, dict[str, Cell]]) -> dict[str, dict[str, dict[str, float]]]:
    """Return our figures divided by theirs, by arm, figure and cell."""
    return {
        arm: {
            figure: {
                cell: round(cells_by_arm["ours"][cell][figure] / cells[cell][figure], 2)
                for cell in cells
            }
            for figure in ("p50_us", "p99_us", "mb_s")
        }
        for arm, cells in cells_by_arm.items()
        if arm != "ours"
    }


def main() -> None:
    """Measure, print a table, and end in one JSON line."""
    parser = argparse.ArgumentParser(description="Benchmark of the bus.")
    parser.add_argument("--arms", default="ours,zmq_asyncio,zmq_blocking,ray")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each cell")
    parser.add_argument("--ray-python", default=sys.executable, help="a Python that has ray")
    parser.add_argument("--out", type=Path, help="also write the result here")
    for internal in ("--serve", "--at", "--ask"):
        parser.add_argument(internal, help=argparse.SUPPRESS)
    parser.add_argument("--payload", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve, arguments.at, arguments.payload)
        return
    if arguments.ask:
        cells = asyncio.run(ask_all(arguments.ask, arguments.payload, arguments.seconds))
        print(json.dumps(cells))
        return

    arms = arguments.arms.split(",")
    pythons = {arm: arguments.ray_python if arm == "ray" else sys.executable for arm in arms}
    if "ray" in arms and not has_ray(arguments.ray_python):
        print(
            f"no arm `ray`: {arguments.ray_python} has none. Make it one: "
            "python -m venv /tmp/rayvenv && /tmp/rayvenv/bin/pip install ray, "
            "then --ray-python /tmp/rayvenv/bin/python"
        )
        arms.remove("ray")
    rounds: dict[str, list[dict[str, Cell]]] = {arm: [] for arm in arms}
    with tempfile.TemporaryDirectory(prefix="dart-bus-") as folder:
        payload_at = Path(folder) / "payload.json"
        write_payload(payload_at)
        shots = {
            size: len(exchanges["StepRecord-Ack"][0]["screenshot"])
            for size, exchanges in payload(payload_at).items()
        }
        for _ in range(arguments.rounds):
            for arm in arms:
                cells = run_arm(arm, pythons[arm], payload_at, arguments.seconds)
                rounds[arm].append(cells)
        heartbeats = asyncio.run(measure_heartbeats(Path(folder)))
    cells_by_arm = {arm: medians(each) for arm, each in rounds.items()}
    print(f"{'':38} {'arm':12} {'p50 us':>8} {'p99 us':>8} {'per s':>8} {'MB/s':>8} {'CPU us':>7}")
    for cell in cells_by_arm[arms[0]]:
        for arm in arms:
            row = cells_by_arm[arm][cell]
            print(
                f"{cell:38} {arm:12} {row['p50_us']:8.0f} {row['p99_us']:8.0f} "
                f"{row['per_s']:8.0f} {row['mb_s']:8.1f} {row['server_cpu_us']:7.0f}"
            )
    result = {
        "benchmark": "transport",
        "unit": "microseconds; MB of screenshots a second; CPU of the serving process a request",
        "screenshot_bytes": shots,
        "rounds": arguments.rounds,
        "heartbeat": heartbeats,
        "arms": cells_by_arm,
        "ratios": ratios(cells_by_arm) if "ours" in arms else {},
    }
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
