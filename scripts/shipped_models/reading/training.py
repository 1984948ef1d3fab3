"""Training in stages; a build that was killed goes on where it was.

    Stage           what is drawn, for how many CPU seconds
    Trainer         model, dense heads, optimizers and their state on disk
    answer_chances  the exact probability of the right answer, by kind

Matrices are trained by Muon (orthogonalised momentum), the rest by AdamW: letters came to a recall of
0.84 in 243 CPU seconds, with AdamW alone to 0.76.

Under `torchrun` each process draws its own sheets, and gradients are averaged; the first one reports and saves.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from bus.errors import UserError
from dart_cli.policy.forward import ImageFeatures, image_features
from dart_cli.policy.loader import LoadedPolicy
from dart_cli.policy.packed import packed_hidden
from scripts import tiny_model as tiny
from scripts.shipped_models.build_tiny import Packer
from scripts.shipped_models.reading.muon import Muon
from scripts.shipped_models.reading.sheets import DenseHeads, ReadSheet, dense_loss, letters_recall

TOKENS = 1300
"""Image tokens of one update: 16 screens of 126x126, 8 of 160x210."""

SHEETS = 17
"""Most sheets of one update."""

SAVE_S = 60.0
"""CPU seconds between two states on disk."""

DRAWN_ANSWERS = ("page:", "mini idle")
"""Beginnings of kinds whose answers are drawn at random, where several would do: they are no hits."""

DENSE = 2.0
"""Weight of the dense loss beside the loss of answers."""

TEST_S, GLANCED = 420.0, 48
"""CPU seconds between two lines with tests, and the sheets of each test that such a line is of."""

Source = Callable[[Random], ReadSheet]
"""Draws one sheet; all sheets of a source have the same size."""


@dataclass(frozen=True)
class Stage:
    """One part of the training."""

    name: str
    seconds: float  # of CPU
    draws: Mapping[str, float]  # source -> weight
    answers: bool = True  # or only what image tokens show
    answer_every: int = 1  # updates between two that train answers; the others are cheap
    falls: bool = False  # whether the rate falls to 0.02 of it, from 50 % of the stage on
    rate: float = 1.0  # factor of both rates
    log_tests: Sequence[str] = field(default=())  # test sets of its log


class Trainer:
    """A trainer of `policy`, in place; its state lies in `folder`."""

    def __init__(
        self,
        policy: LoadedPolicy,
        folder: Path,
        sources: Mapping[str, Source],
        tests: Mapping[str, Sequence[ReadSheet]],
        *,
        seed: int,
        rate: float = 2e-3,
        matrix_rate: float = 4e-3,
    ) -> None:
        self._policy = policy
        self._folder = folder
        self._sources = sources
        self.tests = tests
        self._seed = seed
        self._packer = Packer(policy.tokenizer, policy.image_token_id, policy.images.merge)
        model: Any = policy.model
        self._zero = policy.tokenizer.convert_tokens_to_ids("0")
        self._heads = DenseHeads(model.config.text_config.hidden_size)
        rows = {id(model.get_input_embeddings().weight), id(model.model.visual.pos_embed.weight)}
        matrices = [p for p in model.parameters() if p.ndim == 2 and id(p) not in rows]
        matrix_ids = {id(p) for p in matrices}
        others = [
            p for p in (*model.parameters(), *self._heads.parameters()) if id(p) not in matrix_ids
        ]
        self._parameters = [*matrices, *others]
        self._optimizers = (
            (
                Muon(matrices, lr=matrix_rate),
                matrix_rate,
            ),
            (torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.99), weight_decay=0.01), rate),
        )
        self.total = 0.0  # CPU seconds of training, all stages
        self.step = 0
        self._last_test = 0.0

    def run(self, stage: Stage) -> Iterator[str]:
        """Train one stage, from where an earlier run of it stopped; yield lines of progress.

        Raises UserError where the corpus lacks what the stage draws.
        """
        if missing := [name for name in stage.draws if name not in self._sources]:
            raise UserError(
                f"stage {stage.name} draws {', '.join(missing)}, of which the corpus has none; "
                "make them with python -m scripts.shipped_models.reading.corpus"
            )
        seconds = self._restore(stage)
        rng = Random(f"small/{self._seed}/{stage.name}/{self.step}/{rank()}")
        saved, told_at, started_at = seconds, seconds, self.step
        while seconds < stage.seconds:
            began = time.process_time()
            loss = self._update(stage, rng, seconds / stage.seconds, self.step - started_at)
            seconds += (spent := summed(time.process_time() - began))
            self.total += spent
            self.step += 1
            if rank():
                continue
            if seconds - told_at > 60 or seconds >= stage.seconds:
                told_at = seconds
                yield self._line(stage, seconds, loss)
            if seconds - saved > SAVE_S:
                saved = seconds
                self._save(f"state-{stage.name}.pt", stage, seconds)
        if not rank():
            self._save(f"state-{stage.name}.pt", stage, seconds)
            self.save(self._folder / stage.name, {"stage": stage.name})

    def save(self, folder: Path, build: dict[str, Any]) -> None:
        """Write the model as a Hugging Face folder."""
        policy = self._policy
        build = {"cpu_seconds": round(self.total), "updates": self.step, **build}
        model: Any = policy.model
        tiny.save(folder, model, policy.tokenizer, policy.images.processor, build)  # type: ignore[arg-type]

    def _restore(self, stage: Stage) -> float:
        path = self._folder / f"state-{stage.name}.pt"
        if not path.is_file():
            return 0.0
        state = torch.load(path, weights_only=True)
        self._policy.model.load_state_dict(state["model"])
        self._heads.load_state_dict(state["heads"])
        for (optimizer, _), optimizer_state in zip(
            self._optimizers, state["optimizers"], strict=True
        ):
            optimizer.load_state_dict(optimizer_state)
        self.total, self.step = state["total"], state["step"]
        return float(state["done"])

    def _save(self, name: str, stage: Stage, seconds: float) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        state = {
            "model": self._policy.model.state_dict(),
            "heads": self._heads.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer, _ in self._optimizers],
            "total": self.total,
            "step": self.step,
            "stage": stage.name,
            "done": seconds,
        }
        part = self._folder / f"{name}.part"
        torch.save(state, part)
        part.replace(self._folder / name)

    def _update(self, stage: Stage, rng: Random, share: float, since: int) -> float:
        model: Any = self._policy.model
        factor = stage.rate * min(1.0, (since + 1) / 50)
        if stage.falls and share > 0.5:
            factor *= 0.02 + 0.98 * (1 - share) / 0.5
        for optimizer, rate in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
        model.train()
        sheets = self._batch(stage, rng)
        features = image_features(model, [sheet.image for sheet in sheets])
        loss = torch.zeros(())
        answers = stage.answers and self.step % stage.answer_every == 0
        if answers and any(sheet.questions for sheet in sheets):
            loss = self._packer.answers_loss(model, self._packer.pack(sheets, rng), features)
        loss = loss + DENSE * self._dense_loss(features, sheets)
        for optimizer, _ in self._optimizers:
            optimizer.zero_grad(set_to_none=True)
        loss.backward()
        average_gradients(self._parameters)
        torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        for optimizer, _ in self._optimizers:
            optimizer.step()
        return float(loss.item())

    def _dense_loss(self, features: ImageFeatures, sheets: Sequence[ReadSheet]) -> torch.Tensor:
        model: Any = self._policy.model
        numbers = model.lm_head.weight[self._zero : self._zero + tiny.NUMBERS]
        return dense_loss(self._heads, features, sheets, numbers)

    def _batch(self, stage: Stage, rng: Random) -> list[ReadSheet]:
        name = rng.choices(list(stage.draws), list(stage.draws.values()))[0]
        sheets: list[ReadSheet] = []
        while not sheets or (
            len(sheets) < SHEETS and len(sheets) * sheets[0].image.tokens < TOKENS
        ):
            sheets.append(self._sources[name](rng))
        return sheets

    def _line(self, stage: Stage, seconds: float, loss: float) -> str:
        line: dict[str, Any] = {
            "stage": stage.name,
            "done_s": round(seconds),
            "cpu_s": round(self.total),
            "step": self.step,
            "loss": round(loss, 3),
        }
        if (
            seconds - self._last_test > TEST_S
            or seconds >= stage.seconds
            or seconds < self._last_test
        ):
            self._last_test = seconds
            for name in stage.log_tests:
                if name in self.tests:
                    line[name] = self.score(name, stage.answers, GLANCED)
        text = json.dumps(line)
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / "log.jsonl").open("a", encoding="utf-8") as log:
            log.write(text + "\n")
        return text

    def score(self, name: str, answers: bool = True, most: int | None = None) -> dict[str, float]:
        """Return letters and the probability of right answers, by kind, on a test set or its first part."""
        sheets = self.tests[name][:most]
        model: Any = self._policy.model.eval()
        counts = [0, 0, 0]
        with torch.inference_mode():
            for start in range(0, len(sheets), 16):
                part = sheets[start : start + 16]
                features = image_features(model, [sheet.image for sheet in part])
                counts = [
                    a + b
                    for a, b in zip(
                        counts, letters_recall(self._heads, features, part), strict=True
                    )
                ]
        right, predicted, present = counts
        result = {
            "letters_recall": round(right / max(1, present), 3),
            "letters_precision": round(right / max(1, predicted), 3),
        }
        if answers:
            chances = answer_chances(self._policy, self._packer, sheets)
            result |= {kind: round(value, 3) for kind, (value, _) in sorted(chances.items())}
        return result


def rank() -> int:
    """Return the number of this process in the build."""
    return dist.get_rank() if dist.is_initialized() else 0


def summed(value: float) -> float:
    """Return the sum of the processes' values."""
    if not dist.is_initialized():
        return value
    dist.all_reduce(total := torch.tensor(value, dtype=torch.float64))
    return float(total)


def average_gradients(parameters: Sequence[torch.nn.Parameter]) -> None:
    """Replace each gradient by its mean over the processes of the build."""
    if not dist.is_initialized():
        return
    gradients = []
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradients.append(parameter.grad)
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    parts = flat.split([gradient.numel() for gradient in gradients])
    for gradient, mean in zip(gradients, parts, strict=True):
        gradient.copy_(mean.view_as(gradient))


@torch.inference_mode()
def answer_chances(
    policy: LoadedPolicy, packer: Packer, sheets: Sequence[ReadSheet], batch: int = 16
) -> dict[str, tuple[float, int]]:
    """Return the mean probability of the right answer and the number of questions, by kind and over `all`.

    `hit` is over the questions that one press answers, but those of DRAWN_ANSWERS.
    Of an answer with points it is the probability that each x falls inside its box, times that for y
    given an x within it, times the probability of the words around them.
    """
    model: Any = policy.model.eval()
    rng = Random("evaluate")
    zero = policy.tokenizer.convert_tokens_to_ids("0")
    at = (torch.arange(tiny.NUMBERS) + 0.5) / tiny.NUMBERS
    by_kind: dict[str, list[float]] = defaultdict(list)
    asking = [sheet for sheet in sheets if sheet.questions]
    for start in range(0, len(asking), batch):
        part = asking[start : start + batch]
        packed = packer.pack(part, rng)
        hidden = packed_hidden(model, packed.inputs)
        weight = model.lm_head.weight
        places = torch.cat([packed.tokens[:, 0], packed.clicks])
        logprobs = F.log_softmax(hidden[places] @ weight.T, dim=-1)
        words = logprobs[: len(packed.tokens)].gather(1, packed.tokens[:, 1:])[:, 0]
        numbers = logprobs[len(packed.tokens) :, zero : zero + tiny.NUMBERS].exp()
        inside = (at >= packed.spans[:, :1]) & (at <= packed.spans[:, 1:])
        points = (numbers * inside).sum(dim=1).clamp_min(1e-9).log()
        parents = packed.inputs.layout.parents
        total = torch.zeros(len(parents))
        total.index_add_(0, packed.nodes[places], torch.cat([words, points]))
        chances = iter(total[torch.tensor(parents) >= 0].exp().tolist())
        for sheet in part:
            for question, chance in zip(sheet.questions, chances, strict=False):
                by_kind["all"].append(chance)
                if question.answer.endswith("click({})") and not question.kind.startswith(
                    DRAWN_ANSWERS
                ):
                    by_kind["hit"].append(chance)
                by_kind[question.kind].append(chance)
    return {kind: (sum(values) / len(values), len(values)) for kind, values in by_kind.items()}
