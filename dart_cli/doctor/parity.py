"""Engine against trainer on a model folder, without a run: `dart doctor --parity`.

    parity   findings: how far the log-probabilities of the same tokens are apart, by screens shown
    judge    the same for tokens that are compared already

The configured engine plays a trial (trial.py) with the model as it comes and is closed; then the
trainer's forward pass scores what it sampled. So two copies of the model are never in memory at once.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Iterator

from bus.errors import DartError
from bus.messages import Batch
from dart_cli.config.schema import MODEL_ENGINES, Config
from dart_cli.doctor.findings import Finding, error, ok, warning
from dart_cli.doctor.play import LOAD_S
from dart_cli.doctor.trial import Trial, play
from dart_cli.engines.responder import PolicyResponder
from dart_cli.evaluation.in_process import loaded_model
from dart_cli.runtime.role import limit_threads
from dart_cli.train.model import TrainModel
from dart_cli.train.parity import LEAST_TOKENS, ComparedTokens, alarm_of, limit_of, rescore

MOST_TOKENS = 64
"""A completion's bound, if rollout.max_tokens is larger: enough to compare."""

_NAMES = {"text": "no screen", "one": "one screen", "several": "several screens"}


def parity(config: Config) -> Iterator[Finding]:
    """Sample with the engine, score with the trainer, compare. Needs no other process."""
    if config.rollout.engine not in MODEL_ENGINES or config.train.learner != "torch":
        yield warning(
            "parity",
            f"nothing to compare: engine {config.rollout.engine}, learner {config.train.learner}",
            'set rollout.engine = "transformers" or "vllm" and train.learner = "torch"',
        )
        return
    limit_threads(config.rollout.threads)
    began = time.monotonic()
    try:
        batch = asyncio.run(sample(config))
        gc.collect()  # the engine's copy of the model
        sampled_s = time.monotonic() - began
        model = TrainModel.load(config)
        compared = rescore(model, batch, config.train.pack_tokens)
    except DartError as fault:
        yield error("parity", str(fault), "fix that, run dart doctor again")
        return
    except TimeoutError:
        yield error(
            "parity",
            f"not over after {time.monotonic() - began:.0f} s",
            "lower rollout.max_tokens, or find out what the engine waits for",
        )
        return
    yield ok(
        "parity",
        f"engine {config.rollout.engine} sampled {compared.engine.size} tokens of {config.model.path} "
        f"in {config.model.dtype} at temperature {config.rollout.temperature:g}, loaded and played in "
        f"{sampled_s:.1f} s",
    )
    yield from judge(compared, limit_of(model))


async def sample(config: Config) -> Batch:
    """What the configured engine samples in a trial."""
    async with loaded_model(config, None, -1, load_s=LOAD_S) as model:
        assert isinstance(model.responder, PolicyResponder)
        trial = Trial(
            temperature=config.rollout.temperature,
            max_tokens=min(config.rollout.max_tokens, MOST_TOKENS),
        )
        return await play(model.responder.policy, model.engine, model.responder, trial)


def judge(compared: ComparedTokens, limit: float) -> Iterator[Finding]:
    """A line for each kind of prompt; one error where the means are beyond `limit`, nats."""
    for kind, each in compared.by_seen().items():
        text = (
            f"{_NAMES[kind]:<16}{each.tokens:>5} tokens  |difference| mean {each.mean:.2e}  half "
            f"<= {each.p50:.2e}  99 % <= {each.p99:.2e}  max {each.max:.2e} nats  k3 KL {each.kl:.2e}"
        )
        beyond = not each.mean <= limit
        few = each.tokens < LEAST_TOKENS
        cure = "see below" if not few else f"too few tokens to judge by: {LEAST_TOKENS} are needed"
        yield Finding("parity", "warning" if beyond else "ok", text, cure if beyond else "")
    alarm = alarm_of(compared, limit)
    if alarm:
        problem, _, cure = alarm.partition(". ")
        yield error("parity", problem, cure)
    else:
        yield ok("parity", f"they agree: every mean is within {limit:g} nats")
