"""The checks of scripts/gpu-check of engines and publication.

parity        the transformers engine's log-probabilities against the trainer's, in bfloat16
vllm          vLLM's: as it starts, after weights taken while requests run, and the same with adapters
publication   a 7B's tensors through the file channel
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from benchmarks.gpu.settings import (
    BrokenError,
    Clock,
    Figures,
    MissedError,
    Settings,
    compared_layers,
    config_of,
)

if TYPE_CHECKING:
    from bus.messages import Batch
    from dart_cli.config.schema import Config

CHUNK = 64
"""Tokens that vLLM reads at once on a CPU here, so that it cuts screens as a GPU's engine does."""
SHARE = 0.5
"""Of a GPU's memory for vLLM: the trainer's copy of the model is on the same one."""
PROMPTS_MOST = 32_768
"""Tokens of a sequence that vLLM makes room for."""
NOISE = {"weights": 0.02, "adapters": 0.05}
"""Standard deviation of what is added to the tensors that are taken: it makes another policy of them."""
APART = 10
"""How many times the mean difference of engine and trainer that policy is away from the one before, at least."""


def parity(settings: Settings) -> Figures:
    """Let the engine play and the trainer score: `dart doctor --parity` on the drawn model."""
    from dart_cli.doctor.logprob_check import check_logprobs as compare

    layers = compared_layers(settings)
    clock = Clock(settings.device)
    findings = list(compare(config_of(settings, layers, recompute="none")))
    figures: Figures = {"layers": layers, "seconds_of_it": round(clock.lap(), 2)}
    figures["findings"] = [
        f"{finding.level}: {' '.join(finding.text.split())}" for finding in findings
    ]
    if any(finding.level == "error" for finding in findings):
        raise BrokenError("engine and trainer disagree", figures)
    return figures


def vllm(settings: Settings) -> Figures:
    """Let vLLM play, take other weights meanwhile, and play on; score each token by its weights with the trainer.

    With the whole weights, and then, where there is time for another start, with adapters.
    """
    from dart_cli.config.devices import vllm_problem

    if problem := vllm_problem():
        raise MissedError(problem)
    from dart_cli.config.schema import LoraConfig

    figures: Figures = {}
    for name, lora in (("weights", None), ("adapters", LoraConfig(rank=8))):
        began = time.monotonic()
        if lora is not None and settings.seconds < 2 * figures["weights"]["seconds"]:
            figures[name] = f"not begun: the weights took {figures['weights']['seconds']:.0f} s"
            break
        figures[name], alarm = _swapped(settings, name, lora)
        figures[name]["seconds"] = round(time.monotonic() - began, 1)
        if alarm:
            raise BrokenError(f"{name}: {alarm}", figures)
    return figures


def _swapped(settings: Settings, name: str, lora: Any) -> tuple[Figures, str]:
    """Compare one vLLM with the trainer, before and after other weights; return (figures, what is wrong)."""
    from dart_cli.doctor.logprob_check import compare_with_limit, split_batch
    from dart_cli.policy.loader import weight_tensors
    from dart_cli.train.logprob_check import (
        ComparedTokens,
        alarm_of,
        concatenate,
        limit_of,
        rescore,
    )
    from dart_cli.train.trained_policy import TrainModel
    from dart_cli.weights.file import FileChannel

    config = _of_vllm(settings, lora)
    model = TrainModel.load_frozen(config)
    mine = weight_tensors(model.policy.model)
    torch.manual_seed(2)
    other = {
        key: (tensor + NOISE[name] * torch.randn_like(tensor)).cpu() for key, tensor in mine.items()
    }
    published = FileChannel(settings.scratch / f"vllm-{name}", lora=lora).publish(other, 0)
    before, beside, after, figures = asyncio.run(_served(config, published.path))

    def scored(batch: Batch, version: int = -1) -> ComparedTokens:
        """Score the tokens that `version` drew, with the model as it is now."""
        tokens = rescore(model, batch, config.train.pack_tokens)
        spans = {
            f"step {sample.step} of {sample.trajectory_id}": sample.version_spans
            for sample in batch.samples
        }
        is_of_version = [
            any(
                span.version == version and span.start <= index < span.end
                for span in spans[tokens.steps[place]]
            )
            for index, place in zip(tokens.indices, tokens.places, strict=True)
        ]
        return tokens.only(np.array(is_of_version, dtype=bool))

    figures["longest_prompt"] = max(sample.start for sample in before.samples)
    small, large = map(scored, split_batch(before))
    lines = list(compare_with_limit(small, limit_of(model), large))
    figures["before"] = [f"{line.level}: {' '.join(line.text.split())}" for line in lines]
    of_old = concatenate([scored(batch) for batch in beside])
    for key, tensor in mine.items():
        tensor.copy_(other[key])
    of_new = concatenate([scored(batch, 0) for batch in [*beside, after]])
    figures["moved"] = scored(before).mismatch().mean
    figures["met_the_swap"] = sum(
        len(sample.version_spans) > 1 for batch in beside for sample in batch.samples
    )
    for key, tokens in (("beside", of_old), ("after", of_new)):
        each = tokens.mismatch()
        figures[key] = {"tokens": each.tokens, "mean": each.mean, "max": each.max}
    wrong = [line.text for line in lines if line.level == "error"]
    wrong += [alarm for part in (of_old, of_new) if (alarm := alarm_of(part, limit_of(model)))]
    if not figures["moved"] > APART * max(figures["beside"]["mean"], figures["after"]["mean"]):
        wrong.append("the other weights are nearly the same policy, so nothing was shown")
    return figures, "; ".join(wrong)


def _of_vllm(settings: Settings, lora: Any) -> Config:
    """Return the configuration of vLLM; on a CPU it reads prompts in chunks, as on a GPU."""
    config = config_of(settings, compared_layers(settings), recompute="none")
    on_gpu = settings.device.startswith("cuda")
    options: dict[str, Any] = {}
    if not on_gpu:
        options = {"enable_chunked_prefill": True, "max_num_batched_tokens": CHUNK}
    elif lora is not None:
        options = {"enforce_eager": True}  # what the compiler makes was seen with the weights
    served = {
        "gpu_memory_utilization": SHARE,
        "max_model_len": PROMPTS_MOST if on_gpu else 0,
        "options": options,
    }
    return config.model_copy(
        update={
            "model": config.model.model_copy(update={"lora": lora}),
            "rollout": config.rollout.model_copy(update={"engine": "vllm", "max_batch": 16}),
            "vllm": config.vllm.model_copy(update=served),
        }
    )


async def _served(config: Config, weights: Path) -> tuple[Batch, list[Batch], Batch, Figures]:
    """Play before, beside and after the engine takes `weights` as version 0; return three batches, and figures."""
    from dart_cli.doctor.logprob_check import MOST_TOKENS, RunPrompts, Trial, play_trial
    from dart_cli.doctor.trial_episode import LOAD_S
    from dart_cli.engines.responder import PolicyResponder
    from dart_cli.player.chosen_model import loaded_model

    began = time.monotonic()
    async with loaded_model(config, None, -1, load_s=LOAD_S) as model:
        figures: Figures = {"start_s": round(time.monotonic() - began, 1)}
        responder = model.responder
        assert isinstance(responder, PolicyResponder)

        async def play(seed: int, run: RunPrompts | None = None) -> Batch:
            trial = Trial(1.0, max_tokens=MOST_TOKENS, seed=seed, run=run)
            return await play_trial(responder.policy, model.engine, responder, trial)

        before = await play(0, RunPrompts.of(config))
        taking = asyncio.create_task(model.engine.update_weights(weights, 0))
        beside = []
        while not taking.done():  # by its own deadline at the latest
            beside.append(await play(1 + len(beside)))
        timing = await taking
        figures |= {"taken_in_s": round(timing.transfer_s, 2), "halted_s": round(timing.pause_s, 2)}
        after = await play(1 + len(beside), RunPrompts.of(config))
    return before, beside, after, figures


def publication(settings: Settings) -> Figures:
    """Write tensors of all layers from the device to files and back, and compare them bit for bit."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    from dart_cli.weights.file import FileChannel, load

    with torch.device("meta"):
        shapes = AutoModelForImageTextToText.from_config(
            AutoConfig.from_pretrained(settings.shards, local_files_only=True)
        ).state_dict()
    torch.manual_seed(1)
    tensors = {
        name: torch.randn(spec.shape, device=settings.device, dtype=torch.bfloat16)
        for name, spec in shapes.items()
    }
    gigabytes = sum(tensor.nbytes for tensor in tensors.values()) / 1e9
    channel, clock = FileChannel(settings.scratch / "weights", keep=2), Clock(settings.device)
    published = channel.publish(tensors, 1)
    figures: Figures = {"gb": round(gigabytes, 3), "publish_s": round(clock.lap(), 2)}
    loaded = load(published.path, tensors)
    figures["read_and_check_s"] = round(clock.lap(), 2)
    placed = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    clock.lap()
    for name, each in loaded.items():
        placed[name].copy_(each)
    figures["place_s"] = round(clock.lap(), 2)
    figures["publish_gb_s"] = round(gigabytes / max(figures["publish_s"], 1e-9), 2)
    wrong = [name for name, tensor in placed.items() if not torch.equal(tensor, tensors[name])]
    if wrong:
        raise BrokenError(f"{len(wrong)} tensors came back as others, e.g. {wrong[0]}", figures)
    return figures
