"""A real vLLM that serves the untrained policy, in an event loop of its own; what tests do with it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from dart_cli.config.schema import VllmConfig
from dart_cli.engines.base import GenerateRequest, Generation
from dart_cli.policy.loader import LoadedPolicy, load_policy, weight_tensors
from dart_cli.weights.file import load
from tests.engines.exact import Weights, largest_error, random_versions
from tests.waiting import PATIENCE_S, until
from tests.weights.sets import publish

Asker = Callable[..., GenerateRequest]
T = TypeVar("T")

EXACT = 1e-4  # nats, in float32

CHUNK = 64
CHUNKED: dict[str, Any] = {"enable_chunked_prefill": True, "max_num_batched_tokens": CHUNK}
"""Options of a vLLM that reads prompts in chunks, as it does on a GPU: of 64 tokens in place of 2,048 or more,
so that each prompt here has several, which cut its screens. On a CPU dart has prompts read whole."""


@dataclass
class Served:
    """The engine and the loop that it lives in."""

    engine: Any
    loop: asyncio.AbstractEventLoop
    start: Weights  # what it serves before and after each test
    published: Path

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(self._bounded(work), self.loop).result()

    async def _bounded(self, work: Coroutine[Any, Any, T]) -> T:
        async with asyncio.timeout(PATIENCE_S):
            return await work

    async def generate(self, *requests: GenerateRequest) -> list[Generation]:
        return await asyncio.gather(*(self.engine.generate(request) for request in requests))

    async def take(self, tensors: Weights) -> int:
        """Publish as the next version and serve it."""
        version = self.engine.policy_version + 1
        path = (await asyncio.to_thread(publish, tensors, self.published, version)).path
        await self.engine.update_weights(path, version)
        return int(version)


@contextmanager
def started(
    folder: Path,
    published: Path,
    max_batch: int,
    config: VllmConfig | None = None,
    screen_tokens: int = 0,
) -> Iterator[Served]:
    """An engine over the policy in `folder`; it leaves nothing behind."""
    from dart_cli.engines.vllm.engine import VllmEngine

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    policy = load_policy(folder, weights=False)
    engine = VllmEngine(
        policy, config, load_weights=load, max_batch=max_batch, screen_tokens=screen_tokens
    )
    start = {n: t.clone() for n, t in weight_tensors(load_policy(folder).model).items()}
    served = Served(engine, loop, start, published)
    yield served
    context = engine._llm.engine_core.resources.ctx
    served.run(engine.close())
    assert context.closed
    loop.call_soon_threadsafe(loop.stop)
    thread.join(30)
    loop.close()


def errors(
    policy: LoadedPolicy,
    requests: list[GenerateRequest],
    generations: list[Generation],
    versions: list[Weights],
    temperature: float = 1.0,
) -> float:
    pairs = zip(requests, generations, strict=True)
    return max(largest_error(policy, *pair, versions, temperature) for pair in pairs)


def at(served: Served, weights: Weights, *later: Weights) -> list[Weights]:
    """Weights by version, `weights` the engine's present one."""
    return [weights] * (served.engine.policy_version + 1) + list(later)


def taken_in_flight(
    served: Served, ask: Asker, policy: LoadedPolicy, updates: int, count: int
) -> tuple[list[GenerateRequest], list[Generation], list[Weights]]:
    """Long completions with new weights in their midst."""
    versions = at(served, *random_versions(policy, updates + 1))
    numbers = range(len(versions) - updates, len(versions))
    # Beforehand: the engine would not wait for a slow disk.
    paths = [publish(versions[number], served.published, number).path for number in numbers]
    requests = [ask(i, past_images=i % 3, max_tokens=60) for i in range(count)]

    async def both() -> list[Generation]:
        asking = [asyncio.create_task(served.engine.generate(request)) for request in requests]
        for path, number in zip(paths, numbers, strict=True):
            drawn = served.engine.gauges()["tokens"]
            await until(lambda drawn=drawn: served.engine.gauges()["tokens"] >= drawn + 40)
            await served.engine.update_weights(path, number)
        return await asyncio.gather(*asking)

    return requests, served.run(both()), versions
