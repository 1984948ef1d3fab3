"""Which version of the adapters a request has in vLLM: our engine over a stand-in for AsyncLLM.

The real one is in test_vllm_lora.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from bus.messages import Sampling
from dart_cli.config.schema import LoraConfig
from dart_cli.engines.base import GenerateRequest, Generation
from dart_cli.policy.loader import load_policy, weight_tensors
from dart_cli.weights.file import load
from tests.waiting import until
from tests.weights.sets import publish

pytestmark = [
    pytest.mark.skipif(
        find_spec("vllm") is None, reason="vLLM is not installed: scripts/setup-vllm"
    ),
    pytest.mark.filterwarnings("ignore"),  # vLLM's own
]

LORA = LoraConfig(rank=2)
VERSIONS = 3


class StandIn:
    """Draws token 9 for every request, each time it is told to, until the request is aborted."""

    errored = False
    output_handler = None
    input_processor = SimpleNamespace(renderer=SimpleNamespace(mm_processor_cache=None))

    def __init__(self) -> None:
        self.held: dict[int, Path] = {}  # adapters by identifier
        self.under: dict[str, int] = {}  # identifier of each request in work
        self.most = 0
        self._aborted: set[str] = set()
        self._tick = asyncio.Condition()
        self.output_processor = SimpleNamespace(propagate_error=lambda _: None)
        resources = SimpleNamespace(ctx=zmq.Context(), input_socket=None)
        self.engine_core = SimpleNamespace(resources=resources)

    async def generate(
        self, _prompt: object, params: Any, name: str, lora_request: Any
    ) -> AsyncIterator[SimpleNamespace]:
        self.under[name] = lora_request.lora_int_id
        assert self.under[name] in self.held
        assert (self.held[self.under[name]] / "adapter_config.json").exists()
        left = params.max_tokens
        try:
            while left:
                async with self._tick:
                    await self._tick.wait()
                if name in self._aborted:
                    yield _output([], "abort")
                    return
                left -= 1
                yield _output([9], None if left else "length")
        finally:
            del self.under[name]

    async def draw(self) -> None:
        async with self._tick:
            self._tick.notify_all()
        await asyncio.sleep(0)

    async def abort(self, names: str | Iterable[str]) -> None:
        self._aborted.update([names] if isinstance(names, str) else names)
        await self.draw()

    async def add_lora(self, request: Any) -> bool:
        self.held[request.lora_int_id] = Path(request.lora_path)
        self.most = max(self.most, len(self.held))
        return True

    async def remove_lora(self, number: int) -> bool:
        assert number not in self.under.values(), "a version in use was removed"
        del self.held[number]
        return True

    async def update_weight_version(self, _: str) -> None:
        """Not read."""

    def shutdown(self, _: float) -> None:
        """Nothing to end."""


def _output(token_ids: list[int], finish: str | None) -> SimpleNamespace:
    numbers = SimpleNamespace(logprobs=[-1.0, -2.0] * len(token_ids))
    one = SimpleNamespace(
        token_ids=token_ids, logprobs=numbers, finish_reason=finish, weight_versions=None
    )
    return SimpleNamespace(outputs=[one], num_cached_tokens=0)


def spans(generation: Generation) -> list[int]:
    return [span.version for span in generation.sampled.version_spans]


async def test_requests_keep_their_version_while_there_is_room_and_then_go_on_under_a_newer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dart_cli.engines.vllm import engine as module

    llm = StandIn()
    monkeypatch.setattr(module, "start", lambda *_, **__: llm)
    policy = load_policy("builtin:tiny", weights=False, lora=LORA)
    engine = module.VllmEngine(policy, policy_version=-1, load_weights=load, versions=VERSIONS)
    tensors = weight_tensors(load_policy("builtin:tiny", lora=LORA).model)
    asking: list[asyncio.Task[Generation]] = []

    async def take(version: int) -> None:
        path = publish(tensors, tmp_path, version).path
        await engine.update_weights(path, version)

    async def begin(number: int) -> None:
        sampling = Sampling(temperature=1.0, max_tokens=100, seed=number)
        request = GenerateRequest(f"r{number}", [300, 301], [], sampling)
        asking.append(asyncio.create_task(engine.generate(request)))
        await until(lambda: len(llm.under) == number + 1)

    async def everyone_draws() -> None:
        before = {name: len(each.token_ids) for name, each in engine._running.items()}
        while any(len(engine._running[name].token_ids) <= n for name, n in before.items()):
            await llm.draw()

    for version in range(3):
        await take(version)
        await begin(version)
        await everyone_draws()
    assert sorted(llm.under.values()) == [1, 2, 3]  # identifiers are one more
    await take(3)  # no room: what began with 0 goes on under 2
    await until(lambda: sorted(llm.under.values()) == [2, 3, 3])
    assert set(llm.held) == {2, 3, 4}
    await begin(3)
    await everyone_draws()
    await take(5)  # a worker may skip versions; what began with 1 goes on under 3
    await until(lambda: sorted(llm.under.values()) == [3, 3, 4, 4])
    await everyone_draws()
    engine.interrupt()
    found = await asyncio.gather(*asking)
    assert [each.stop for each in found] == ["suspended"] * 4
    assert [spans(each) for each in found] == [[0, 2], [1, 3], [2], [3]]
    assert all(set(each.sampled.token_ids) == {9} for each in found)
    assert llm.most <= VERSIONS
    await take(6)  # nothing is in use
    assert set(llm.held) == {6, 7}
    folder = next(iter(llm.held.values())).parent
    assert {path.name for path in folder.iterdir()} == {"5", "6", "lock"}
    await engine.close()
    assert not folder.exists()
