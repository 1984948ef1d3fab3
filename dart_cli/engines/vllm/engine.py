"""An engine over vLLM, with continuous batching, exact log-probabilities, and weights taken in flight.

    generate        passes at most `max_batch` requests to vLLM; the others wait here in order of arrival
    update_weights  checks the set, halts vLLM, runs the four phases of vLLM's weight transfer, and resumes
    interrupt       aborts the requests in vLLM; each returns its tokens so far

Tokens are drawn in vLLM's worker by the request's seed (sampler.py). They do not depend on the rest of the
batch, on suspensions, or on the engine that began the completion.

At an update all running requests leave vLLM with their tokens so far, and are sent again under the new
weights. So the log-probability and the entropy of every token are those of a fresh forward pass of the
version that its span names.

No cache is flushed. Prefixes of older versions no longer match (`cache_salt`), and vLLM evicts them when it
needs room. Screens stay in vLLM's cache, and so do their features if the vision tower is the same, byte for
byte.

Adapters of low rank are served beside the weights (set_files.py): nothing halts, and a request ends under the
version that it began with. With `vllm.lora = "merged"` each version of the adapters is added to the weights
instead, and everything above applies.

Temperature 0 is greedy: log-probabilities and entropies are then those of the untempered distribution. At any
temperature the forbidden tokens have probability 0. Entropies are exact, over the whole vocabulary.
"""

from __future__ import annotations

import asyncio
import time
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
from dart_cli.engines.vllm.batch_slots import BatchSlots
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
"""Takes a directory and the model's tensors by name, and returns the set's; raises WeightsError if they
differ."""

CLOSE_DEADLINE_S = 20.0
"""Seconds that vLLM's processes may take to exit before they are killed."""

TRIES = 3
"""How often a request is sent to vLLM if vLLM's image cache differs from ours."""
DIED = f"vLLM's processes have died; {SEE_LOG}"

_MOVED = "moved"
"""The reason for which a request left vLLM if it goes on under newer weights or adapters."""
_STOPS: dict[str, CompletionStop] = {"stop": "end", "length": "length", "abort": "suspended"}


class VllmEngine:
    """An Engine that serves one policy through vLLM.

    The queue is bounded by the callers: the handlers of a Replier, or a player. `policy` needs no weights,
    since vLLM loads its own. `load_weights` checks a published set (dart_cli.weights.file.load). A request
    that is in vLLM for more than `deadline_s` seconds is an error. Of adapters that are served beside the
    weights, `versions` can be in use at once (at least two). `screen_tokens` is the number of tokens of the
    screens in play; vLLM keeps their features as far as there is room.
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
        screen_tokens: int = 0,
    ) -> None:
        """Start vLLM's processes, which can take some minutes. Raises MissingPartError, EngineError."""
        self.policy = policy
        self._config = config or VllmConfig()
        self._version = policy_version
        self._load_weights = load_weights
        self._validator = RequestValidator(policy, self._config.max_model_len)
        weight_dtype = getattr(torch, dtype)
        self._expected = {
            name: torch.empty(tensor.shape, dtype=weight_dtype, device="meta")
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
        self._fault = ""  # why the engine no longer serves; "" while it does
        self._has_ended = False
        self._updating = False
        self._base: dict[str, Any] = {}  # with which vLLM's workers merge adapters
        if policy.lora is not None:
            self._base = base_of(policy.folder, policy.lora)
        self._adapters: AdapterVersions | None = None
        self._moved: set[str] = set()  # requests that go on under the newest weights or adapters
        self._swaps = 0  # swaps of weights so far; a cached prefix belongs to one count
        # Digest of the vision tower that serves; None if it is not known.
        self._vision = None if policy.lora is None else NO_VISION
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
            screen_tokens=screen_tokens,
        )

    @property
    def policy_version(self) -> int:
        """The version of the weights that serve now."""
        return self._version

    # --- requests -----------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one completion.

        Raises EngineError if the prompt does not fit the model or its images, or if vLLM fails. Raises
        EngineGoneError if vLLM's processes have died. Cancelling the awaiting task frees the request's slot.
        """
        arrived = time.monotonic()
        builder = CompletionBuilder(request.partial, request.pointed)
        images = self._validator.prepare(request)
        end = builder.finished(self.policy.end_token_ids, request.sampling.max_tokens)
        if end is not None:  # the partial is complete already
            return builder.generation(end, 0.0, 0.0)
        self._check_serves()
        interruptions = self._interruptions
        if not await self._slots.acquire():
            return builder.generation("suspended", time.monotonic() - arrived, 0.0)
        started = time.monotonic()
        self._meter.run(self._slots.in_use)
        try:
            async with asyncio.timeout(self._deadline_s):
                stop = await self._draw(request, builder, images, interruptions)
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
        interruptions: int,
    ) -> CompletionStop:
        """Extend `builder` until the completion ends, or the count of `interruptions` has changed."""
        tries = TRIES
        while True:
            await self._takes_requests.wait()
            self._check_serves()
            if self._interruptions != interruptions:
                return "suspended"  # interrupted while it was not in vLLM
            before = len(builder)
            finish = await self._submit(request, builder, images)
            if finish in _STOPS:
                return _STOPS[finish]
            if finish == "error" and len(builder) == before:
                tries -= 1  # vLLM's image cache lacked an image; the next try sends it
            elif finish != _MOVED:
                tries = 0
            if not tries:
                raise EngineError(
                    f"vLLM ended request {request.request_id}: {finish or 'no reason given'}; {SEE_LOG}"
                )

    async def _submit(
        self, request: GenerateRequest, builder: CompletionBuilder, images: list[PreparedImage]
    ) -> str:
        """Let vLLM continue a completion, and return the reason for which vLLM ended it."""
        from dart_cli.engines.vllm.prompts import OutputCollector, sampling_params

        params = sampling_params(request.sampling, len(builder), self.policy.end_token_ids)
        prompt = self._input(request.prompt_token_ids + builder.token_ids, images)
        self._submitted += 1
        name = f"{SECTION}-{self._submitted}"
        collector = self._running[name] = OutputCollector()
        version, adapters = self._version, self._adapters
        lora = adapters.begin(version, name) if adapters else None
        try:
            async for output in self._llm.generate(prompt, params, name, lora_request=lora):
                part = output.outputs[0]
                # Tokens of a moved request are drawn again under the newer weights.
                if adapters or name not in self._moved:
                    if not collector.token_ids and part.token_ids:
                        self._prompt_tokens += len(prompt["prompt_token_ids"])
                        self._cached_tokens += output.num_cached_tokens or 0
                    collector.add(part)
                # A request that was on its way to vLLM at the interruption is aborted when it arrives.
                if name in self._interrupted and part.finish_reason is None:
                    await self._llm.abort(name)
        except Exception as error:
            if self._llm.errored:
                self._fault = self._fault or DIED
            self._check_serves()
            raise EngineError(f"vLLM failed: {root_cause(error)}; {SEE_LOG}") from error
        finally:
            self._tokens += len(collector.token_ids)
            del self._running[name]
            self._interrupted.discard(name)
            is_moved = name in self._moved
            self._moved.discard(name)
            if adapters:
                await adapters.end(version, name)
        if is_moved and (not adapters or collector.finish == "abort"):
            collector.finish = _MOVED
        builder.extend(
            collector.token_ids,
            collector.logprobs,
            collector.entropies,
            [version] * len(collector.token_ids),
        )
        return collector.finish

    def _input(
        self,
        token_ids: list[int],
        images: list[PreparedImage],
    ) -> Any:
        """Return a prompt for vLLM. Images that vLLM has already are sent by hash alone."""
        from dart_cli.engines.vllm.prompts import engine_input, sent_items

        items = sent_items(self._llm.input_processor, images)
        salt = f"{self._swaps}" if self._adapters is None else f"v{self._version}"
        return engine_input(token_ids, images, items, self.policy.image_token_id, salt)

    def interrupt(self) -> None:
        """End every request now; each returns its tokens, as `suspended` unless it is complete."""
        self._interruptions += 1
        self._slots.turn_away()
        self._abort(list(self._running))

    def _abort(self, names: list[str]) -> None:
        """Begin to abort requests in vLLM, without waiting for it."""
        if names:
            self._interrupted.update(names)
            aborting = asyncio.get_running_loop().create_task(self._llm.abort(names))
            self._aborting.add(aborting)
            aborting.add_done_callback(self._aborting.discard)

    def gauges(self) -> dict[str, float]:
        """Return the load (in_flight, waiting), counts since the start, and LoadMeter's gauges.

        The counts are tokens, finished, and prompt_tokens = prefilled_tokens + cached_tokens. The prompt of a
        request that goes on under new weights counts again, with its tokens so far. A request that vLLM
        computes again for lack of memory counts once.
        """
        return {
            "in_flight": float(self._slots.in_use),
            "waiting": float(self._slots.waiting),
            "tokens": float(
                self._tokens + sum(len(output.token_ids) for output in self._running.values())
            ),
            "finished": float(self._finished),
            "prompt_tokens": float(self._prompt_tokens),
            "prefilled_tokens": float(self._prompt_tokens - self._cached_tokens),
            "cached_tokens": float(self._cached_tokens),
            **self._meter.gauges(),
        }

    def _check_serves(self) -> None:
        """Raise EngineGoneError, with the reason, if the engine no longer serves."""
        if self._fault:
            raise EngineGoneError(self._fault)

    # --- weights ------------------------------------------------------------------------------

    async def update_weights(self, source: WeightSet, policy_version: int) -> UpdateTiming:
        """Load a weight set while requests run, without losing one.

        Raises WeightsError if the set is incomplete or does not fit this model, and EngineError while another
        update is under way; the old weights then continue to serve. An error within vLLM is raised as
        EngineGoneError, and the engine closes, because its tensors belong to two versions.
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
        # A swap that has started continues even if the caller is cancelled.
        swap = asyncio.create_task(self._swap(directory_of(source), policy_version, vision))
        return replace(await asyncio.shield(swap), transfer_s=read_s)

    async def _add(
        self, adapters: AdapterVersions, tensors: Mapping[str, torch.Tensor], policy_version: int
    ) -> UpdateTiming:
        """Serve new requests with these adapters, while running requests go on with their version.

        If vLLM has no room for another version, the requests of the oldest one are moved to the newest, as
        after an interruption. Raises WeightsError if vLLM refuses the adapters; those that served before
        continue to serve.
        """
        try:
            async with asyncio.timeout(UPDATE_DEADLINE_S):
                await adapters.remove_unused(self._llm, self._version)
                while (oldest := adapters.oldest_if_full()) is not None:
                    names = adapters.requests_of(oldest)
                    self._moved.update(names)
                    self._abort(list(names))
                    await adapters.wait_until_unused(oldest)
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
        """Load the tensors of a checked set into vLLM, or raise EngineGoneError and close the engine."""
        try:
            with open_files(directory) as files:
                async with asyncio.timeout(UPDATE_DEADLINE_S):
                    return await self._transfer(files, policy_version, vision)
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

    async def _transfer(
        self, files: list[str], policy_version: int, vision: str | None
    ) -> UpdateTiming:
        """Halt vLLM, run the four phases of its weight transfer, and resume."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        llm = self._llm
        halted = time.monotonic()
        self._meter.halt()
        self._takes_requests.clear()
        # By default vLLM would clear its caches, among them the one of screens.
        await llm.pause_generation(mode="keep", clear_cache=False)
        await self._move()
        await llm.start_weight_update()
        update = {"files": files} | self._base
        await llm.update_weights(WeightTransferUpdateRequest(update))
        await llm.finish_weight_update()
        if vision is None or vision != self._vision:
            await llm.reset_encoder_cache()  # its keys are images and do not contain the version
        self._version, self._vision = policy_version, vision
        self._swaps += 1
        self._takes_requests.set()
        await llm.resume_generation()
        self._meter.go()
        return UpdateTiming(0.0, time.monotonic() - halted)

    async def _move(self) -> None:
        """Abort the running requests in vLLM; they go on under new weights with their tokens so far."""
        names = list(self._running)
        self._moved.update(names)
        self._interrupted.update(names)
        await self._llm.abort(names)

    async def close(self) -> None:
        """Refuse new requests, end the running ones, and stop vLLM's processes."""
        self._fault = self._fault or CLOSED
        self._slots.turn_away()
        await self._end_processes()

    async def _end_processes(self) -> None:
        """Stop vLLM, and fail the requests that still wait for it."""
        if self._has_ended:
            return
        self._has_ended = True
        if self._adapters is not None:
            self._adapters.close()
        self._takes_requests.set()
        llm = self._llm
        llm.output_processor.propagate_error(EngineGoneError(self._fault))
        if llm.output_handler is not None:
            llm.output_handler.cancel()  # it would log the exit of vLLM's processes as an error
        await asyncio.to_thread(llm.shutdown, CLOSE_DEADLINE_S)
        _end_context(llm.engine_core.resources)
        # vLLM's __del__ would call `shutdown` again at the interpreter's exit, without its modules.
        vars(llm)["shutdown"] = lambda timeout=None: None  # noqa: ARG005


def _end_context(resources: Any) -> None:
    """End the ZeroMQ context of an AsyncLLM that has been shut down, which vLLM leaves open."""
    sockets = [getattr(resources, name) for name in vars(resources) if name.endswith("_socket")]
    # Ending the context would wait for an open socket.
    if all(socket is None or socket.closed for socket in sockets):
        resources.ctx.term()
