"""`dart rollout`: one worker process.

    run               connects the parts, and serves until it is stopped or the run is over
    _Service.serve    answers each ActRequest from the Replier with a Completion, by Responder and Engine
    _Service.listen   receives RunStates of the data service: newest weights, suspension, the end of the run
    _Service.watch    ends the worker with an error when its engine is broken
    WeightSync        asks the data service for permits, takes new weights, and reports (sync.py)
    HeartbeatSender   publishes a heartbeat each second: address, version, load, and current waits
    load_model        loads the engine of the configuration
    receiving         opens the worker's end of the weight channel

The worker keeps no state of an episode, so any request may be sent to any worker. It answers no request until
it has taken a published weight set, so every completion carries a version that exists.

While the run is suspended, the completions in progress end with their tokens so far. New requests are held
until the run goes on, for HOLD_S at most; after that they are returned unchanged, and the caller sends them
again. Any worker can continue from there. New weights are taken during a suspension as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import TYPE_CHECKING

from bus.endpoints import DATA, TELEMETRY_IN, TELEMETRY_OUT, TRAIN
from bus.errors import EngineError, EngineGoneError, PromptError, ProtocolError
from bus.heartbeat import HeartbeatSender, Load, awaited
from bus.messages import (
    ActRequest,
    Completion,
    Message,
    Reply,
    Request,
    Role,
    RunState,
)
from bus.packed import int32s
from bus.pubsub import Publisher, Subscriber
from bus.requests import Replier, Requester
from dart_cli.config import endpoints as limits
from dart_cli.config.endpoints import own_address, run_curve, run_endpoints
from dart_cli.config.model_folder import model_folder
from dart_cli.config.schema import MODEL_ENGINES, Config
from dart_cli.config.schema.weights import PERMIT_S
from dart_cli.config.screens import (
    image_cache_bytes,
    run_screen,
    screens_in_play,
    vllm_image_cache_gb,
)
from dart_cli.engines.base import Engine, Model, PromptEncoder, load_own_engine
from dart_cli.engines.completions import unsampled_tokens
from dart_cli.rollout.sync import WeightSync
from dart_cli.runtime.background import (
    StopRequested,
    background,
    in_daemon_thread,
    unless_stopped,
)
from dart_cli.runtime.joining import WHAT as JOINING
from dart_cli.runtime.joining import Joining
from dart_cli.runtime.waits import PREFIX, announced_waits, data_awaited, receive_telemetry
from dart_cli.weights.receiver import FileReceiver, Receiver

if TYPE_CHECKING:
    from dart_cli.policy.loader import LoadedPolicy

log = logging.getLogger(__name__)

WAITING_PER_PLACE = 8
"""Requests that are accepted for each place in a batch; others wait in the socket or at their sender."""
FAULTS_PER_PLACE = 3
"""Requests failed in a row, for each place in a batch, after which the worker ends with an error. Its GPU is
then probably broken, and as the least loaded worker it would attract all requests and fail them."""
HOLD_S = 5.0
"""Longest time in seconds that a request is held while the run is suspended. It is far below all deadlines of
callers."""
DRAIN_S = 2.0
"""Seconds in which requests in progress may still be answered after the end."""
FIRST_WEIGHTS = "the trainer's first weights"
STARTING = f"{PREFIX}starting"
"""The gauge of the seconds before the first weights serve, including those of loading the model."""


async def run(config: Config, worker: str, stop: asyncio.Event) -> None:
    """Serve completions until `stop` is set or the data service announces that the run is over.

    Raises ModelError if the model cannot be loaded, BusError if the address is in use, EngineError if the
    engine no longer answers, and ConfigError if the data service refuses the worker's settings.
    """
    # 1. Connect, and send heartbeats.
    endpoints, curve = run_endpoints(config), run_curve(config)
    name = worker if worker.startswith("rollout-") else f"rollout-{worker}"
    address = endpoints.address(name)
    if config.bus.transport == "tcp":
        address = f"tcp://{own_address(config)}:*"
    async with contextlib.AsyncExitStack() as stack:
        places = WAITING_PER_PLACE * config.rollout.max_batch
        replier = await stack.enter_async_context(
            Replier(address, curve=curve, max_handlers=places)
        )
        publisher = await stack.enter_async_context(
            Publisher(endpoints.address(TELEMETRY_IN), curve=curve)
        )
        states = await stack.enter_async_context(
            Subscriber(endpoints.address(TELEMETRY_OUT), [RunState], curve=curve)
        )
        data_service = await stack.enter_async_context(
            Requester(endpoints.address(DATA), name=worker, peer="dart data", curve=curve)
        )
        joining = Joining(config, "rollout", worker, data_service)
        service = _Service(worker, FAULTS_PER_PLACE * config.rollout.max_batch)
        heartbeat = HeartbeatSender(
            publisher, "rollout", worker, service.load, endpoint=replier.endpoint
        )
        await stack.enter_async_context(heartbeat)

        def awaits() -> str:
            return service.awaits() if data_service.connected else data_awaited(config)

        await stack.enter_async_context(announced_waits(awaits))
        await stack.enter_async_context(background(joining.keep()))
        # 2. Load the model, and join the run.
        try:
            with heartbeat.waiting("the model to load", on="model"):
                model = await unless_stopped(stop, in_daemon_thread(lambda: load_model(config)))
            receiver = await stack.enter_async_context(receiving(config, worker))
            stack.push_async_callback(model.engine.close)
            with heartbeat.waiting(JOINING, on="data"):
                await unless_stopped(stop, joining.joined.wait())
        except StopRequested:
            service.is_stopping = True
            heartbeat.beat()
            return
        # 3. Serve.
        sync = WeightSync(
            model.engine,
            worker,
            data_service,
            heartbeat,
            deadline_s=limits.DEADLINE_S,
            receiver=receiver,
            lora=config.model.lora,
        )
        service.start(model, sync)
        run_states = receive_telemetry(states, config, lambda: data_service.connected)
        async with background(
            service.serve(replier, heartbeat), service.listen(run_states, stop), service.watch()
        ):
            await stop.wait()
            service.is_stopping = True
            heartbeat.beat()
            await replier.close(DRAIN_S)


@contextlib.asynccontextmanager
async def receiving(config: Config, worker: str) -> AsyncIterator[Receiver]:
    """Yield the receiver of weight sets for `worker`. Raises RunDirectoryError, ConfigError."""
    async with contextlib.AsyncExitStack() as stack:
        receiver: Receiver = FileReceiver()
        if config.weights.channel != "file":
            from dart_cli.weights.broadcast.receiver import BroadcastReceiver
            from dart_cli.weights.broadcast.transport import Transport

            address, curve = run_endpoints(config).address(TRAIN), run_curve(config)
            trainer = await stack.enter_async_context(
                Requester(address, name=worker, peer="dart train", curve=curve)
            )
            transport = Transport(
                config.weights.channel, own_address(config), config.rollout.device
            )
            receiver = BroadcastReceiver(
                worker, trainer, config.run.dir / "copies" / worker, transport, PERMIT_S
            )
        stack.callback(receiver.close)
        yield receiver


def load_prompt_encoder(config: Config) -> PromptEncoder:
    """Return the prompt encoder of a configuration's model, without loading its weights.

    Raises ModelError or ConfigError if the model folder or the configuration cannot be used. A user's own
    engine is loaded whole.
    """
    if ":" in config.rollout.engine:
        return load_own_engine(config).responder.prompt_encoder
    if config.rollout.engine not in MODEL_ENGINES:
        from dart_cli.engines.scripted import BytePromptEncoder

        return BytePromptEncoder()
    from dart_cli.engines.responder import PolicyPromptEncoder
    from dart_cli.policy.loader import load_policy
    from dart_cli.policy.prompt import make_renderer

    policy = load_policy(config.model.path, weights=False, pointing=config.policy.pointing)
    renderer = make_renderer(policy, config.policy)
    return PolicyPromptEncoder(policy, renderer, config.policy.coordinates)


def load_model(config: Config) -> Model:
    """Load the engine of a configuration, which can take minutes, and return it with its responder.

    Raises ModelError, MissingPartError, ConfigError, and EngineError if vLLM does not start.
    """
    if ":" in config.rollout.engine:
        return load_own_engine(config)
    if config.rollout.engine == "scripted":
        from dart_cli.engines.scripted import ScriptedEngine, ScriptedResponder, random_clicks

        scripted = ScriptedEngine(random_clicks(config.policy.action_parser), policy_version=-1)
        return Model(scripted, ScriptedResponder(scripted))

    import torch

    from dart_cli.engines.responder import PolicyResponder
    from dart_cli.engines.transformers_engine import TransformersEngine
    from dart_cli.hardware.device import pick_device
    from dart_cli.policy.loader import load_policy
    from dart_cli.policy.prompt import make_renderer
    from dart_cli.weights.file import load

    torch.set_num_threads(config.rollout.threads)
    is_vllm = config.rollout.engine == "vllm"  # vLLM's processes load the weights by themselves
    policy = load_policy(
        config.model.path,
        config.model.dtype,
        "cpu" if is_vllm else pick_device(config.rollout.device),
        weights=not is_vllm,
        lora=config.model.lora,
        pointing=config.policy.pointing,
        adapters="" if is_vllm else config.model.adapters,
    )
    engine: Engine
    if is_vllm:
        engine = _vllm_engine(config, policy)
    else:
        engine = TransformersEngine(
            policy,
            policy_version=-1,
            load_weights=load,
            max_batch=config.rollout.max_batch,
            records_routing=config.train.replay_routing,
        )
    policy.images.cache_bytes = image_cache_bytes(config)
    renderer = make_renderer(policy, config.policy)
    responder = PolicyResponder(policy, engine, renderer, config.policy.coordinates)
    if config.policy.verifier:
        from dart_cli.engines.verified_responder import VerifiedResponder
        from dart_cli.policy.verifier import THRESHOLD, load_verifier

        folder = model_folder(config.policy.verifier)
        verifier = load_verifier(folder, config.model.dtype, policy.device)
        return Model(engine, VerifiedResponder(responder, verifier, THRESHOLD))
    return Model(engine, responder)


def _vllm_engine(config: Config, policy: LoadedPolicy) -> Engine:
    from dart_cli.engines.vllm.engine import VllmEngine
    from dart_cli.language.coordinates import screen_tokens
    from dart_cli.weights.file import load

    sizes = {"mm_processor_cache_gb": vllm_image_cache_gb(config)}
    screen = screen_tokens(run_screen(config), policy.images.screens)
    return VllmEngine(
        policy,
        config.vllm.model_copy(update={"options": sizes | config.vllm.options}),
        policy_version=-1,
        load_weights=load,
        dtype=config.model.dtype,
        device=config.rollout.device,
        threads=config.rollout.threads,
        max_batch=config.rollout.max_batch,
        deadline_s=config.rollout.deadline_s,
        versions=config.data.max_staleness + 1,
        screen_tokens=screens_in_play(config) * screen,
    )


class _Service:
    """The state of a worker, and the tasks that share it: answering, listening, and watching the engine."""

    def __init__(self, worker: str, most_faults: int) -> None:
        self.is_stopping = False
        self._worker = worker
        self._most_faults = most_faults
        self._faults = 0  # requests failed in a row
        self._last_fault = ""
        self._is_broken = asyncio.Event()
        self._began = time.monotonic()
        self._loading_s = 0.0
        self._model: Model | None = None
        self._sync: WeightSync | None = None
        self._may_serve = asyncio.Event()  # cleared while the run is suspended
        self._may_serve.set()
        self._absent: list[Role] = []

    def start(self, model: Model, sync: WeightSync) -> None:
        """Note that the model is loaded, so that weights can be taken from now on."""
        self._model, self._sync = model, sync
        self._loading_s = time.monotonic() - self._began

    async def serve(self, replier: Replier, heartbeat: HeartbeatSender) -> None:
        """Wait for the first weights, then answer requests until the replier is closed."""
        assert self._sync is not None
        async with background(self._sync.follow()):
            with heartbeat.waiting(FIRST_WEIGHTS, on="train"):
                await self._sync.ready.wait()
            log.info("serves v%d at %s", self._version, replier.endpoint)
            heartbeat.beat()
            await replier.serve(self._answer)

    async def listen(self, states: AsyncIterator[Message], stop: asyncio.Event) -> None:
        """Follow the RunStates of the data service, and set `stop` at the end of the run."""
        assert self._sync is not None
        async for state in states:
            assert isinstance(state, RunState)
            self._suspend(state.suspended)
            self._sync.observe(state)
            self._absent = state.absent
            if state.stopping:
                log.info("the run is over: %s", state.reason)
                stop.set()

    async def watch(self) -> None:
        """Raise EngineError once the engine is gone, or too many requests have failed in a row."""
        await self._is_broken.wait()
        raise EngineError(
            f"{self._faults} requests in a row have failed; the last: {self._last_fault}"
        )

    def awaits(self) -> str:
        """Return what the worker waits for before it serves; "" while it loads, and once it serves."""
        if self._sync is None or self._sync.ready.is_set():
            return ""
        return awaited("train") if "train" in self._absent else FIRST_WEIGHTS

    def load(self) -> Load:
        """Return the part of the heartbeat that changes: state, version and gauges."""
        if self._model is None or self._sync is None:
            loading_s = time.monotonic() - self._began
            state = "stopping" if self.is_stopping else "starting"
            return Load(state, gauges={STARTING: loading_s})
        state = "ready" if self._sync.ready.is_set() else "starting"
        if self._sync.is_syncing and state == "ready":
            state = "syncing"
        gauges = self._model.engine.gauges() | asdict(self._sync.totals)
        gauges[STARTING] = gauges.get(STARTING, 0.0) + self._loading_s
        return Load("stopping" if self.is_stopping else state, self._version, gauges)

    @property
    def _version(self) -> int:
        assert self._model is not None
        return self._model.engine.policy_version

    def _suspend(self, is_suspended: bool) -> None:
        """Interrupt the engine when the run is suspended, and serve again when it goes on."""
        assert self._model is not None
        if not is_suspended:
            self._may_serve.set()
        elif self._may_serve.is_set():
            self._may_serve.clear()
            self._model.engine.interrupt()

    async def _is_suspended(self) -> bool:
        """Return False as soon as the run is not suspended, and True if it still is after HOLD_S."""
        try:
            async with asyncio.timeout(HOLD_S):
                await self._may_serve.wait()
        except TimeoutError:
            return True
        return False

    async def _answer(self, _client: str, request: Request) -> Reply:
        if not isinstance(request, ActRequest):
            raise ProtocolError(
                f"a rollout worker answers ActRequest, not {type(request).__name__}"
            )
        assert self._model is not None
        try:
            screens = await self._model.responder.preload_images(request)
            if await self._is_suspended():
                return _suspended_completion(request, self._worker)
            completion = await self._model.responder.answer(request)
            del screens
        except PromptError:
            raise  # the fault of the request, not of the engine
        except EngineError as error:
            self._faults, self._last_fault = self._faults + 1, str(error)
            if self._faults >= self._most_faults or isinstance(error, EngineGoneError):
                self._is_broken.set()
            raise
        self._faults = 0
        return completion.model_copy(update={"worker": self._worker})


def _suspended_completion(request: ActRequest, worker: str) -> Completion:
    """Return the answer to a request that was not started: `suspended`, with its partial's tokens alone."""
    return Completion(
        prompt_token_ids=int32s([]),
        sampled=request.partial or unsampled_tokens([]),
        text="",
        stop="suspended",
        queue_s=0.0,
        engine_s=0.0,
        worker=worker,
        pointed=request.pointed,
    )
