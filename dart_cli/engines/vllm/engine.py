"""An engine over vLLM: continuous batching, exact numbers, weights taken in flight.

    generate        at most `max_batch` requests are in vLLM, the others wait here in order of arrival
    sampling        in vLLM's worker, by the request's seed (sampler.py), whatever else is in the
                    batch, however often it was suspended and whichever engine began it
    update_weights  checks the set, then: halt, four phases of vLLM's transfer, resume
    interrupt       aborts the requests in vLLM; each returns the tokens it has

At an update running requests leave vLLM with the tokens that they have and go on in it under the new weights,
so the numbers of every token are those of a fresh forward pass of the version its span names.

Nothing is flushed: prefixes of older versions are no longer found (cache_salt), and make room as vLLM needs it.
Screens that vLLM has stay, and features of them do where the vision tower is the same, byte for byte.

Adapters of low rank are served beside the weights (set_files.py), where nothing halts and a request
ends under the version that it began with; or, with `vllm.lora = "merged"`, each version is added to
the weights, and all of the above holds.

Temperature 0 is greedy: its log-probabilities and entropies are those of the untempered
distribution. At any temperature the forbidden tokens have probability 0; entropies are exact, over
the whole vocabulary.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bus.errors import EngineError, EngineGoneError, WeightsError
from dart_cli.config.schema import VllmConfig
from dart_cli.engines.base import (
    CLOSED,
    UPDATE_DEADLINE_S,
    CompletionStop,
    GenerateRequest,
    Generation,
    LoadMeter,
    UpdateTiming,
)
from dart_cli.engines.caches import NO_VISION, vision_digest
from dart_cli.engines.completions import CompletionBuilder
from dart_cli.engines.requests import RequestValidator
from dart_cli.engines.vllm import SECTION
from dart_cli.engines.vllm.set_files import LEAST_SLOTS, AdapterVersions, open_files
from dart_cli.engines.vllm.start import SEE_LOG, root_cause, start
from dart_cli.policy.images import PreparedImage
from dart_cli.policy.loader import LoadedPolicy, weight_tensors
from dart_cli.policy.lora import base_of
from dart_cli.policy.weight_set import WeightSet, directory_of

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

    from dart_cli.engines.vllm.prompts import OutputCollector

WeightCheck = Callable[[Path, Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]]
"""Directory and the model's tensors by name -> the set's; raises WeightsError if it does not fit them."""

CLOSE_DEADLINE_S = 20.0
"""Seconds that vLLM's processes may take to exit before they are killed."""

TRIES = 3
"""How often a request is sent to vLLM if its image cache does not match ours."""
DIED = f"vLLM's processes have died; {SEE_LOG}"

_MOVED = "moved"
"""Why a request left vLLM that goes on under newer weights or adapters."""
_STOPS: dict[str, CompletionStop] = {"stop": "end", "length": "length", "abort": "suspended"}


class BatchSlots:
    """Slots of vLLM's batch, and the queue for them: first come, first served. For one event loop."""

    def __init__(self, count: int) -> None:
        self.in_use = 0
        self._count = count
        self._queue: deque[asyncio.Future[bool]] = deque()

    @property
    def waiting(self) -> int:
        """How many callers wait."""
        return len(self._queue)

    async def acquire(self) -> bool:
        """Wait for a slot; False if the caller was turned away."""
        if self.in_use < self._count and not self._queue:
            self.in_use += 1
            return True
        turn: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._queue.append(turn)
        try:
            return await turn
        except asyncio.CancelledError:
            if turn in self._queue:
                self._queue.remove(turn)
            elif turn.done() and not turn.cancelled() and turn.result():
                self.release()  # the slot was given in the moment the caller was cancelled
            raise

    def release(self) -> None:
        """Return a slot: the first waiting caller gets it, if there is one."""
        while self._queue:
            turn = self._queue.popleft()
            if not turn.done():
                turn.set_result(True)
                return
        self.in_use -= 1

    def turn_away(self) -> None:
        """End every wait: `acquire` returns False to each waiting caller."""
        for turn in self._queue:
            if not turn.done():
                turn.set_result(False)
        self._queue.clear()


class VllmEngine:
    """Serves one policy through vLLM. What waits is bounded by its callers: the replier's handlers, a player.

    `policy` needs no weights, vLLM loads its own. `load_weights` checks a published set
    (dart_cli.weights.file.load). A request in vLLM for longer than `deadline_s` is an error. Of
    adapters that are served beside the weights, `versions` can be in use at once (at least two).
    `shown` are the tokens of the screens in play, whose features vLLM keeps where they have room.
    """

    def __init__(
        self,
        policy: LoadedPolicy,
        config: VllmConfig | None = None,
        *,
        policy_version: int = 0,
        load_weights: WeightCheck | None = None,
        dtype: str = "float32",
        device: str = "auto",
        threads: int = 1,
        max_batch: int = 32,
        deadline_s: float = 600.0,
        versions: int = 1,
        shown: int = 0,
    ) -> None:
        """Start vLLM's processes, which takes up to some minutes. Raises MissingPartError, EngineError."""
        self.policy = policy
        self._config = config or VllmConfig()
        self._version = policy_version
        self._load_weights = load_weights
        self._validator = RequestValidator(policy, self._config.max_model_len)
        wanted = getattr(torch, dtype)
        self._expected = {
            name: torch.empty(tensor.shape, dtype=wanted, device="meta")
            for name, tensor in weight_tensors(policy.model).items()
        }
        self._deadline_s = deadline_s
        self._slots = BatchSlots(max_batch)
        self._running: dict[str, OutputCollector] = {}  # by vLLM's request id
        self._interrupted: set[str] = set()
        self._takes_requests = asyncio.Event()  # cleared while weights are updated
        self._takes_requests.set()
        self._interruptions = 0
        self._aborting: set[asyncio.Task[None]] = set()
        self._meter = LoadMeter(max_batch, serves=policy_version >= 0)
        self._tokens = 0  # of requests that have ended
        self._finished = 0
        self._prompt_tokens = 0  # of requests whose prefill is done
        self._cached_tokens = 0  # of these, from vLLM's prefix cache
        self._submitted = 0
        self._fault = ""  # why the engine no longer serves
        self._ended = False
        self._updating = False
        self._base: dict[str, Any] = {}  # what adapters are added to by vLLM's workers
        if policy.lora is not None:
            self._base = base_of(policy.folder, policy.lora)
        self._adapters: AdapterVersions | None = None
        self._moved: set[str] = set()  # to go on under the newest weights or adapters
        self._swaps = 0  # of weights; prefixes are of one of them
        self._vision = None if policy.lora is None else NO_VISION  # digest of what serves
        slots = 0
        if policy.lora is not None and self._config.lora == "adapters":
            slots = max(LEAST_SLOTS, versions)
            self._adapters = AdapterVersions(policy.lora, policy.folder, slots)
        self._llm: AsyncLLM = start(
            policy,
            self._config,
            adapter_slots=slots,
            dtype=dtype,
            max_batch=max_batch,
            device=device,
            threads=threads,
            shown=shown,
        )

    @property
    def policy_version(self) -> int:
        """Version of the weights that serve now."""
        return self._version

    # --- requests -----------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> Generation:
        """Draw one completion.

        Raises EngineError if the prompt does not fit the model or its images, or if vLLM fails; EngineGoneError if it has died. Cancelling the awaiting task frees the
        request's slot.
        """
        arrived = time.monotonic()
        builder, images = (
            CompletionBuilder(request.partial, request.pointed),
            self._validator.prepare(request),
        )
        finished = builder.finished(self.policy.end_token_ids, request.sampling.max_tokens)
        if finished is not None:
            return builder.generation(finished, 0.0, 0.0)
        self._check_serves()
        seen = self._interruptions
        if not await self._slots.acquire():
            return builder.generation("suspended", time.monotonic() - arrived, 0.0)
        started = time.monotonic()
        self._meter.run(self._slots.in_use)
        try:
            async with asyncio.timeout(self._deadline_s):
                stop: CompletionStop = await self._draw(request, builder, images, seen)
        except TimeoutError:
            raise EngineError(
                f"request {request.request_id} was in vLLM for {self._deadline_s:g} s and has not "
                "ended; ask for fewer tokens, or allow more by rollout.deadline_s"
            ) from None
        finally:
            self._slots.release()
            self._meter.run(self._slots.in_use)
        self._finished += stop != "suspended"
        return builder.generation(stop, started - arrived, time.monotonic() - started)

    async def _draw(
        self,
        request: GenerateRequest,
        builder: CompletionBuilder,
        images: list[PreparedImage],
        seen: int,
    ) -> CompletionStop:
        """Fill `builder` until the completion ends, or there are more interruptions than `seen`."""
        tries = TRIES
        while True:
            await self._takes_requests.wait()
            self._check_serves()
            if self._interruptions != seen:
                return "suspended"  # before vLLM had it
            before = len(builder)
            finish = await self._submit(request, builder, images)
            if finish in _STOPS:
                return _STOPS[finish]
            if finish == "error" and len(builder) == before:
                tries -= 1  # vLLM's image cache lacked an image that ours has. It is sent now.
            elif finish != _MOVED:
                tries = 0
            if not tries:
                raise EngineError(
                    f"vLLM ended request {request.request_id}: {finish or 'no reason given'}; {SEE_LOG}"
                )

    async def _submit(
        self, request: GenerateRequest, builder: CompletionBuilder, images: list[PreparedImage]
    ) -> str:
        """Let vLLM go on with a completion; returns why it has ended there."""
        from dart_cli.engines.vllm.prompts import OutputCollector, sampling_params

        params = sampling_params(request.sampling, len(builder), self.policy.end_token_ids)
        prompt = self._input(request.prompt_token_ids + builder.token_ids, images)
        self._submitted += 1
        name = f"{SECTION}-{self._submitted}"
        drawn = self._running[name] = OutputCollector()
        version, adapters = self._version, self._adapters
        lora = adapters.begin(version, name) if adapters else None
        try:
            async for output in self._llm.generate(prompt, params, name, lora_request=lora):
                part = output.outputs[0]
                if adapters or name not in self._moved:  # else drawn again, under newer weights
                    if not drawn.token_ids and part.token_ids:
                        self._prompt_tokens += len(prompt["prompt_token_ids"])
                        self._cached_tokens += output.num_cached_tokens or 0
                    drawn.add(part)
                if name in self._interrupted and part.finish_reason is None:
                    await self._llm.abort(name)  # it was on its way to vLLM at the interruption
        except Exception as error:
            if self._llm.errored:
                self._fault = self._fault or DIED
            self._check_serves()
            raise EngineError(f"vLLM failed: {root_cause(error)}; {SEE_LOG}") from error
        finally:
            self._tokens += len(drawn.token_ids)
            del self._running[name]
            self._interrupted.discard(name)
            is_moved = name in self._moved
            self._moved.discard(name)
            if adapters:
                await adapters.end(version, name)
        if is_moved and (not adapters or drawn.finish == "abort"):
            drawn.finish = _MOVED
        builder.extend(
            drawn.token_ids, drawn.logprobs, drawn.entropies, [version] * len(drawn.token_ids)
        )
        return drawn.finish

    def _input(
        self,
        token_ids: list[int],
        images: list[PreparedImage],
    ) -> Any:
        """Return a prompt for vLLM; images that it has already are sent by hash alone."""
        from dart_cli.engines.vllm.prompts import engine_input, sent_items

        items = sent_items(self._llm.input_processor, images)
        salt = f"{self._swaps}" if self._adapters is None else f"v{self._version}"
        return engine_input(token_ids, images, items, self.policy.image_token_id, salt)

    def interrupt(self) -> None:
        """End every request now; each returns its tokens, as `suspended`, or as ended if it is."""
        self._interruptions += 1
        self._slots.turn_away()
        self._abort(list(self._running))

    def _abort(self, names: list[str]) -> None:
        if names:
            self._interrupted.update(names)
            aborting = asyncio.get_running_loop().create_task(self._llm.abort(names))
            self._aborting.add(aborting)
            aborting.add_done_callback(self._aborting.discard)

    def gauges(self) -> dict[str, float]:
        """Load: in_flight, waiting; counts since the start; LoadMeter's.

        The counts: tokens, finished, and prompt_tokens = prefilled_tokens + cached_tokens. A request
        that goes on under new weights counts again, with its tokens so far; one that vLLM computes again
        for lack of memory, once.
        """
        return {
            "in_flight": float(self._slots.in_use),
            "waiting": float(self._slots.waiting),
            "tokens": float(self._tokens + sum(len(d.token_ids) for d in self._running.values())),
            "finished": float(self._finished),
            "prompt_tokens": float(self._prompt_tokens),
            "prefilled_tokens": float(self._prompt_tokens - self._cached_tokens),
            "cached_tokens": float(self._cached_tokens),
            **self._meter.gauges(),
        }

    def _check_serves(self) -> None:
        if self._fault:
            raise EngineGoneError(self._fault)

    # --- weights ------------------------------------------------------------------------------

    async def update_weights(self, source: WeightSet, policy_version: int) -> UpdateTiming:
        """Load a weight set while requests run; none is lost.

        Raises WeightsError, with the old weights still serving, if the set is incomplete or does
        not fit this model. An error within vLLM is raised as EngineGoneError, and the engine
        closes: its tensors are of two versions.
        """
        started = time.monotonic()
        load = self._load_weights
        if load is None:
            raise EngineError("this engine was started without load_weights; its weights stay")
        self._check_serves()
        if self._updating:
            raise EngineError("another weight update is under way; wait for it")
        self._updating = True
        try:
            if isinstance(source, Path):
                tensors = await asyncio.to_thread(load, source, self._expected)
            else:
                tensors = await asyncio.to_thread(source.load, self._expected)
            vision = await asyncio.to_thread(vision_digest, source)
        except BaseException:
            self._updating = False
            raise
        read_s = time.monotonic() - started
        if self._adapters is not None:
            adding = asyncio.create_task(self._add(self._adapters, tensors, policy_version))
            timing = await asyncio.shield(adding)
            return replace(timing, transfer_s=timing.transfer_s + read_s)
        # Once started it continues, even if the caller is cancelled.
        swap = asyncio.create_task(self._swap(directory_of(source), policy_version, vision))
        return replace(await asyncio.shield(swap), transfer_s=read_s)

    async def _add(
        self, adapters: AdapterVersions, tensors: Mapping[str, torch.Tensor], policy_version: int
    ) -> UpdateTiming:
        """Let new requests have these adapters; the running ones go on with theirs.

        Where there is no room for them, the requests of the oldest version go on with the newest, as
        after an interruption. Raises WeightsError if vLLM refuses them: what served goes on serving.
        """
        try:
            async with asyncio.timeout(UPDATE_DEADLINE_S):
                await adapters.remove_unused(self._llm, self._version)
                while (crowded := adapters.crowded()) is not None:
                    oldest, names = crowded
                    self._moved.update(names)
                    self._abort(list(names))
                    await adapters.unused(oldest)
                    await adapters.remove_unused(self._llm, self._version)
                write_s, halt_s = await adapters.add(self._llm, tensors, policy_version)
        except Exception as error:
            if self._llm.errored:
                self._fault = self._fault or DIED
            self._check_serves()
            raise WeightsError(
                f"vLLM did not take the adapters of v{policy_version}: {root_cause(error)}"
            ) from error
        finally:
            self._updating = False
        self._version = policy_version
        return UpdateTiming(write_s, halt_s)

    async def _swap(self, directory: Path, policy_version: int, vision: str | None) -> UpdateTiming:
        """Put the tensors of a checked set in place, or raise EngineGoneError and close."""
        try:
            with open_files(directory) as files:
                async with asyncio.timeout(UPDATE_DEADLINE_S):
                    return await self._take(files, policy_version, vision)
        except WeightsError:
            raise
        except Exception as error:
            self._fault = (
                f"vLLM did not take weights v{policy_version} and is closed, as its tensors are of "
                f"two versions: {root_cause(error)}"
            )
            await self._end_processes()
            raise EngineGoneError(self._fault) from error
        finally:
            self._updating = False

    async def _take(
        self, files: list[str], policy_version: int, vision: str | None
    ) -> UpdateTiming:
        """Halt, run the four phases of vLLM's weight transfer, resume."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        llm = self._llm
        halted = time.monotonic()
        self._meter.halt()
        self._takes_requests.clear()
        # Explicit, since vLLM clears its caches by default, that of screens among them.
        await llm.pause_generation(mode="keep", clear_cache=False)
        await self._move()
        await llm.start_weight_update()
        update = {"files": files} | self._base
        await llm.update_weights(WeightTransferUpdateRequest(update))
        await llm.finish_weight_update()
        if vision is None or vision != self._vision:
            await llm.reset_encoder_cache()  # its keys are images, without the version
        self._version, self._vision = policy_version, vision
        self._swaps += 1
        self._takes_requests.set()
        await llm.resume_generation()
        self._meter.go()
        return UpdateTiming(0.0, time.monotonic() - halted)

    async def _move(self) -> None:
        """Let the running requests leave vLLM: they go on with the tokens they have, under new weights."""
        names = list(self._running)
        self._moved.update(names)
        self._interrupted.update(names)
        await self._llm.abort(names)

    async def close(self) -> None:
        """Refuse new requests, end the running ones, stop vLLM's processes."""
        self._fault = self._fault or CLOSED
        self._slots.turn_away()
        await self._end_processes()

    async def _end_processes(self) -> None:
        """Stop vLLM, and fail the requests that still wait for it."""
        if self._ended:
            return
        self._ended = True
        if self._adapters is not None:
            self._adapters.close()
        self._takes_requests.set()
        llm = self._llm
        llm.output_processor.propagate_error(EngineGoneError(self._fault))
        if llm.output_handler is not None:
            llm.output_handler.cancel()  # it would log the exit of its processes as an error
        await asyncio.to_thread(llm.shutdown, CLOSE_DEADLINE_S)
        _end_context(llm.engine_core.resources)
        # Its __del__ would call it again at the interpreter's exit, after its modules are unloaded.
        vars(llm)["shutdown"] = lambda timeout=None: None  # noqa: ARG005


def _end_context(resources: Any) -> None:
    """End the ZeroMQ context of an AsyncLLM that has been shut down, which vLLM leaves open."""
    sockets = [getattr(resources, name) for name in vars(resources) if name.endswith("_socket")]
    if all(socket is None or socket.closed for socket in sockets):  # else it would wait for them
        resources.ctx.term()
