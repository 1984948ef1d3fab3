"""Adapters over the real vLLM on this machine: beside the weights, and merged into them.

Beside them prompts are read in chunks, as on a GPU; the engine of the merged ones reads them whole, as on a CPU.
"""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from bus.errors import WeightsError
from dart_cli.config.schema import LoraConfig, VllmConfig
from dart_cli.engines.base import GenerateRequest, Generation
from dart_cli.policy.loader import LoadedPolicy, load_policy, weight_tensors
from dart_cli.weights.file import load
from dart_cli.weights.manifest import WEIGHTS
from tests.engines.exact import Weights, drawn_by_transformers, random_versions
from tests.engines.served import CHUNKED
from tests.engines.test_vllm_engine import MAX_BATCH, Served, errors
from tests.waiting import until
from tests.weights.sets import publish

Asker = Callable[..., GenerateRequest]

pytestmark = [
    pytest.mark.skipif(
        find_spec("vllm") is None, reason="vLLM is not installed: scripts/setup-vllm"
    ),
    pytest.mark.filterwarnings("ignore"),  # vLLM's own
    pytest.mark.slow,
]

EXACT = 1e-4  # nats, in float32
VERSIONS = 3  # at once
LONG = 3000  # tokens: far more than are drawn during the updates
LORA = {
    "adapters": LoraConfig(rank=5, alpha=9.0),
    "merged": LoraConfig(rank=5, alpha=9.0),
}


@pytest.fixture(scope="module", params=["adapters", "merged"])
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=["tiny", "qwen3_5"])
def untrained_folder(
    request: pytest.FixtureRequest, untrained_folder: Path, family: Callable[[str], Path]
) -> Path:
    """The model: one with attention alone, and one with recurrent layers."""
    return untrained_folder if request.param == "tiny" else family(request.param)


@pytest.fixture(scope="module")
def alive(
    mode: str, untrained_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    from dart_cli.engines.vllm.engine import VllmEngine

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    policy = load_policy(untrained_folder, weights=False, lora=LORA[mode])
    options = CHUNKED if mode == "adapters" else {}
    config = VllmConfig(lora=mode, options=options)  # type: ignore[arg-type]
    engine = VllmEngine(policy, config, load_weights=load, max_batch=MAX_BATCH, versions=VERSIONS)
    start = weight_tensors(load_policy(untrained_folder, lora=LORA[mode]).model)
    served = Served(engine, loop, start, tmp_path_factory.mktemp("weights"))
    yield served
    folder = getattr(engine._adapters, "_folder", None)
    context = engine._llm.engine_core.resources.ctx
    served.run(engine.close())
    assert context.closed
    assert folder is None or not Path(folder.name).exists()
    loop.call_soon_threadsafe(loop.stop)
    thread.join(30)
    loop.close()
    del served.engine, engine
    gc.collect()  # vLLM's sockets warn as they go, here and not at pytest's end


@pytest.fixture
def served(alive: Served) -> Iterator[Served]:
    ends = alive.engine.policy.end_token_ids
    yield alive
    alive.engine.policy.end_token_ids = ends


@pytest.fixture
def policy(mode: str, untrained_folder: Path) -> LoadedPolicy:
    return load_policy(untrained_folder, lora=LORA[mode])


def further(policy: LoadedPolicy, count: int, seed: int) -> list[Weights]:
    """Adapters that change much, each otherwise."""
    generator = torch.Generator().manual_seed(seed)
    return [
        {n: 0.2 * torch.randn(t.shape, generator=generator) for n, t in weights.items()}
        for weights in random_versions(policy, count)
    ]


def by_number(served: Served, *weights: Weights) -> list[Weights]:
    """Weights by version; `weights` are the present one's and later ones'."""
    return [weights[0]] * served.engine.policy_version + list(weights)


def test_the_first_version_is_the_base_and_each_later_one_its_adapters(
    served: Served, policy: LoadedPolicy, ask: Asker, untrained_folder: Path
) -> None:
    requests = [ask(i, past_images=i % 3) for i in range(12)]
    if served.engine.policy_version == 0:
        generations = served.run(served.generate(*requests))
        base = load_policy(untrained_folder)
        start = weight_tensors(base.model)
        assert errors(base, requests, generations, [start]) < EXACT
    for weights in further(policy, 2, seed=1):
        version = served.run(served.take(weights))
        generations = served.run(served.generate(*requests))
        assert {s.version for g in generations for s in g.sampled.version_spans} == {version}
        assert errors(policy, requests, generations, by_number(served, weights)) < EXACT


def test_both_engines_draw_the_same_tokens(
    served: Served, policy: LoadedPolicy, ask: Asker
) -> None:
    [weights] = further(policy, 1, seed=2)
    served.run(served.take(weights))
    for name, tensor in weight_tensors(policy.model).items():
        tensor.copy_(weights[name])
    requests = [ask(i, past_images=i % 3) for i in range(12)]
    ours = served.run(served.generate(*requests))
    for one, other in zip(ours, drawn_by_transformers(policy, requests), strict=True):
        assert (one.sampled.token_ids, one.stop) == (other.sampled.token_ids, other.stop)
        assert one.sampled.behaviour_logprobs == pytest.approx(
            other.sampled.behaviour_logprobs, abs=EXACT
        )


def taken_in_flight(
    served: Served, policy: LoadedPolicy, ask: Asker, updates: int
) -> tuple[list[GenerateRequest], list[Generation], list[Weights]]:
    """Long completions with new adapters in their midst, and shorter ones that begin after each.

    The long ones are interrupted some tokens after the last update.
    """
    served.engine.policy.end_token_ids = ()
    first, *later = further(policy, updates + 1, seed=3)
    served.run(served.take(first))
    versions = by_number(served, first, *later)
    numbers = range(len(versions) - updates, len(versions))
    paths = [publish(versions[number], served.published, number).path for number in numbers]
    requests = [ask(i, past_images=i % 3, max_tokens=LONG) for i in range(MAX_BATCH - 2)]
    short = [replace(ask(50 + i, max_tokens=4), request_id=f"short-{i}") for i in range(updates)]

    async def both() -> list[Generation]:
        asking = [asyncio.create_task(served.engine.generate(request)) for request in requests]
        found = []
        for path, number, request in zip(paths, numbers, short, strict=True):
            drawn = served.engine.gauges()["tokens"]
            await until(lambda drawn=drawn: served.engine.gauges()["tokens"] >= drawn + 20)
            await served.engine.update_weights(path, number)
            found.append(await served.engine.generate(request))
        drawn = served.engine.gauges()["tokens"]
        await until(lambda: served.engine.gauges()["tokens"] >= drawn + 20 * len(requests))
        served.engine.interrupt()
        return [*await asyncio.gather(*asking), *found]

    return requests + short, served.run(both()), versions


def test_a_request_ends_under_the_adapters_that_it_began_with(
    served: Served, policy: LoadedPolicy, ask: Asker, mode: str
) -> None:
    requests, generations, versions = taken_in_flight(served, policy, ask, VERSIONS - 1)
    newest = served.engine.policy_version
    began = newest - (VERSIONS - 1)
    assert errors(policy, requests, generations, versions) < EXACT
    long = generations[: -(VERSIONS - 1)]
    spans = [[span.version for span in each.sampled.version_spans] for each in long]
    if mode == "adapters":
        assert spans == [[began]] * len(long)
        assert set(served.engine._adapters._versions) == {began, began + 1, newest}
    else:
        assert all(each == list(range(began, newest + 1)) for each in spans)
    for number, each in enumerate(generations[len(long) :], start=began + 1):
        assert [span.version for span in each.sampled.version_spans] == [number]


def test_interrupted_a_completion_goes_on_under_the_newest(
    served: Served, policy: LoadedPolicy, ask: Asker
) -> None:
    served.engine.policy.end_token_ids = ()
    first, second = further(policy, 2, seed=4)
    served.run(served.take(first))
    request = ask(7, max_tokens=60)

    async def interrupted() -> Generation:
        asking = asyncio.create_task(served.engine.generate(request))
        await until(
            lambda: any(len(drawn.token_ids) > 5 for drawn in served.engine._running.values())
        )
        served.engine.interrupt()
        return await asking

    half = served.run(interrupted())
    assert half.stop == "suspended"
    versions = by_number(served, first, second)
    served.run(served.take(second))
    [whole] = served.run(served.generate(replace(request, partial=half.sampled)))
    spans = [span.version for span in whole.sampled.version_spans]
    assert spans == [served.engine.policy_version - 1, served.engine.policy_version]
    assert errors(policy, [request], [whole], versions) < EXACT


def test_a_damaged_set_is_refused_and_the_old_adapters_go_on_serving(
    served: Served, policy: LoadedPolicy, ask: Asker
) -> None:
    [weights] = further(policy, 1, seed=5)
    version = served.run(served.take(weights))
    damaged = publish(weights, served.published / "damaged", version + 1).path
    data = bytearray((damaged / WEIGHTS).read_bytes())
    data[-1] ^= 1
    (damaged / WEIGHTS).write_bytes(data)
    with pytest.raises(WeightsError):
        served.run(served.engine.update_weights(damaged, version + 1))
    whole = weight_tensors(load_policy(policy.folder).model)
    other = publish(whole, served.published / "whole", version + 1).path
    with pytest.raises(WeightsError, match=r"lacks .*lora"):
        served.run(served.engine.update_weights(other, version + 1))
    requests = [ask(i) for i in range(4)]
    generations = served.run(served.generate(*requests))
    assert errors(policy, requests, generations, by_number(served, weights)) < EXACT


def test_adapters_that_vllm_refuses_leave_those_that_serve(
    served: Served, policy: LoadedPolicy, ask: Asker, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if mode == "merged":
        pytest.skip("an error within a transfer ends the engine: tests/engines/test_vllm_engine.py")
    from dart_cli.engines.vllm import set_files

    [weights] = further(policy, 1, seed=6)
    version = served.run(served.take(weights))
    given: dict[str, Any] = {"r": 600}
    monkeypatch.setattr(set_files, "peft_config", lambda *_: {"peft_type": "LORA", **given})
    again = publish(weights, served.published, version + 1).path
    with pytest.raises(WeightsError, match=f"vLLM did not take the adapters of v{version + 1}"):
        served.run(served.engine.update_weights(again, version + 1))
    monkeypatch.undo()
    requests = [ask(i) for i in range(4)]
    generations = served.run(served.generate(*requests))
    assert errors(policy, requests, generations, by_number(served, weights)) < EXACT
    served.run(served.engine.update_weights(again, version + 1))
    assert served.engine.policy_version == version + 1
