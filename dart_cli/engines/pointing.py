"""Pointers in a running batch: the tokens that they force, and the patch that is drawn with the last of them.

    Forced      a token that follows from the one before, and the patch that came with it
    Pointing    the forced tokens of the rows of a pass

After `start` comes `pad`, after `pad` comes `end`, and with `end` a patch of the prompt's last screenshot: drawn
from the head's softmax at the row's temperature by the row's number for that position, or at temperature 0 the
one with the centre of the best region. Log-probability and entropy of `end` are the patch's; those of `pad`
are 0. See docs/pointing.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from bus.errors import EngineError
from bus.messages import PointerCandidate, PointerMap
from dart_cli.algo.regions import regions
from dart_cli.engines.caches import FeatureCache
from dart_cli.engines.requests import ActiveRequest
from dart_cli.engines.sampling import draw, entropies
from dart_cli.policy.forward import masked_logprobs
from dart_cli.policy.model import LoadedPolicy
from dart_cli.policy.pointer.text import Cells

CANDIDATES = 3
"""Regions that a pointer's map has at most, as published (arXiv 2506.03143)."""


@dataclass(frozen=True)
class Forced:
    """The next token of a row whose last one forces it."""

    token: int
    logprob: float = 0.0  # nats, of the patch
    entropy: float = 0.0  # nats, of the patch's distribution
    patch: int = -1
    pointed: PointerMap | None = None  # where there is a patch


class Pointing:
    """The forced tokens of a policy's rows; none where it does not point. Used by one thread."""

    def __init__(self, policy: LoadedPolicy, features: FeatureCache) -> None:
        self._policy = policy
        self._features = features
        self._tokens = policy.pointer if policy.pointing == "pointer" else None

    def forced(self, jobs: Sequence[ActiveRequest], hidden: torch.Tensor) -> Mapping[int, Forced]:
        """By row, the next tokens that are not drawn from the vocabulary; `hidden` [rows, H] is behind the norm.

        Raises EngineError for a head whose logits are not finite.
        """
        if self._tokens is None:
            return {}
        found: dict[int, Forced] = {}
        pointing: dict[str, list[int]] = {}  # rows that draw a patch, by their screen
        for row, job in enumerate(jobs):
            last = job.builder.token_ids[-1] if len(job.builder) else -1
            token = self._tokens.forced_after(last)
            if token == self._tokens.end:
                pointing.setdefault(job.images[-1].key, []).append(row)
            elif token is not None:
                found[row] = Forced(token)
        for rows in pointing.values():
            found |= zip(rows, self._draw([jobs[row] for row in rows], hidden[rows]), strict=True)
        return found

    def _draw(self, jobs: Sequence[ActiveRequest], hidden: torch.Tensor) -> list[Forced]:
        """The ends of pointers [N] into one screen, for hidden states [N, H] of their `pad`."""
        assert self._tokens is not None
        head = self._policy.pointer_head
        assert head is not None
        image = jobs[0].images[-1]
        [visual] = self._features.of_images(self._policy, [image]).embeds
        values = head.logits(hidden, head.keys(visual))  # [N, P]
        if not bool(torch.isfinite(values).all()):
            raise EngineError("the pointer head's logits are not numbers; are its weights finite?")
        grid = (
            image.grid[1] // self._policy.images.merge,
            image.grid[2] // self._policy.images.merge,
        )
        temperature = torch.tensor([job.request.sampling.temperature for job in jobs])
        divisor = torch.where(temperature == 0, 1.0, temperature).to(values.device)[:, None]
        nothing = torch.empty(0, dtype=torch.long, device=values.device)
        logprobs = masked_logprobs(values, nothing, divisor)
        probabilities = logprobs.exp()
        uniform = torch.tensor(
            [float(job.uniform[len(job.builder)]) for job in jobs],
            dtype=torch.float64,
            device=values.device,
        )
        patches = draw(probabilities, uniform).tolist()
        shares = values.double().softmax(dim=-1).cpu().numpy()
        maps = [
            pointer_map(len(job.builder), share.reshape(grid))
            for job, share in zip(jobs, shares, strict=True)
        ]
        for nth, (job, pointed) in enumerate(zip(jobs, maps, strict=True)):
            if job.request.sampling.temperature == 0:
                best = pointed.candidates[0]
                patches[nth] = Cells(*grid).at(best.x, best.y)
        drawn = torch.tensor(patches, device=values.device)[:, None]
        return [
            Forced(self._tokens.end, *numbers)
            for numbers in zip(
                logprobs.gather(1, drawn)[:, 0].tolist(),
                entropies(probabilities, logprobs).tolist(),
                patches,
                maps,
                strict=True,
            )
        ]


def pointer_map(position: int, probabilities: NDArray[np.float64]) -> PointerMap:
    """The map of a pointer whose `end` is at `position`, of probabilities [rows, columns] that are not tempered."""
    rows, columns = probabilities.shape
    heat = np.rint(255 * probabilities / probabilities.max()).astype(np.uint8)
    return PointerMap(
        position=position,
        rows=rows,
        columns=columns,
        heat=heat.tobytes(),
        candidates=[
            PointerCandidate(x=region.x, y=region.y, score=region.score)
            for region in regions(probabilities, top=CANDIDATES)
        ],
    )
