"""Sampling of pointers in a running batch: the tokens that they force, and the patch drawn with `end`.

    PointerSampler   returns the forced tokens of the rows of a pass
    pointer_map      makes the map of a pointer from the probabilities of its patches

The token `start` forces `pad`, and `pad` forces `end`. With `end` a patch of the prompt's last screenshot is
drawn, from the head's softmax at the row's temperature and with the row's uniform number for that position.
At temperature 0 it is the patch with the centre of the best region. Log-probability and entropy of `end` are
those of the patch; those of `pad` are 0. See docs/pointing.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from bus.errors import EngineError
from bus.messages import PointerCandidate, PointerMap
from dart_cli.algo.regions import regions
from dart_cli.engines.caches import FeatureCache
from dart_cli.engines.completions import DrawnToken
from dart_cli.engines.requests import ActiveRequest
from dart_cli.engines.sampling import sample
from dart_cli.language.pointer_text import Cells
from dart_cli.policy.loader import LoadedPolicy

CANDIDATES = 3
"""The most regions of a pointer's map, as published (arXiv 2506.03143)."""


class PointerSampler:
    """Samples the forced tokens of a policy's rows; there are none if it does not point. For one thread."""

    def __init__(self, policy: LoadedPolicy, features: FeatureCache) -> None:
        self._policy = policy
        self._features = features
        self._tokens = policy.pointer if policy.pointing == "pointer" else None

    def sample_forced(
        self, jobs: Sequence[ActiveRequest], hidden: torch.Tensor
    ) -> Mapping[int, DrawnToken]:
        """Return the next token of each row in which it is forced; `hidden` [rows, H] is after the norm.

        Raises EngineError if the head's logits are not finite.
        """
        if self._tokens is None:
            return {}
        tokens: dict[int, DrawnToken] = {}
        pointing: dict[str, list[int]] = {}  # rows that draw a patch, by their screen
        for row, job in enumerate(jobs):
            last = job.builder.token_ids[-1] if len(job.builder) else -1
            token = self._tokens.forced_after(last)
            if token == self._tokens.end:
                pointing.setdefault(job.images[-1].key, []).append(row)
            elif token is not None:
                tokens[row] = DrawnToken(token)
        for rows in pointing.values():
            tokens |= zip(rows, self._draw([jobs[row] for row in rows], hidden[rows]), strict=True)
        return tokens

    def _draw(self, jobs: Sequence[ActiveRequest], hidden: torch.Tensor) -> list[DrawnToken]:
        """Draw the `end` of pointers [N] into one screen, from the hidden states [N, H] at their `pad`."""
        assert self._tokens is not None
        head = self._policy.pointer_head
        assert head is not None
        image = jobs[0].images[-1]
        [visual] = self._features.of_images(self._policy, [image]).embeds
        values = head.logits(hidden, head.keys(visual))  # [N, P]
        if not bool(torch.isfinite(values).all()):
            raise EngineError("the pointer head's logits are not numbers; are its weights finite?")
        merge = self._policy.images.merge
        grid = image.grid[1] // merge, image.grid[2] // merge
        shares = values.double().softmax(dim=-1).cpu().numpy()
        maps = [
            pointer_map(len(job.builder), share.reshape(grid))
            for job, share in zip(jobs, shares, strict=True)
        ]
        cells = Cells(*grid)
        centres = [pointed.candidates[0] for pointed in maps]
        best = [cells.at(centre.x, centre.y) for centre in centres]
        patches = sample(
            values,
            [job.next_uniform for job in jobs],
            [job.request.sampling.temperature for job in jobs],
            torch.empty(0, dtype=torch.long, device=values.device),
            torch.tensor(best),
        )
        return [
            DrawnToken(self._tokens.end, patch.logprob, patch.entropy, patch.token, pointed)
            for patch, pointed in zip(patches, maps, strict=True)
        ]


def pointer_map(position: int, probabilities: NDArray[np.float64]) -> PointerMap:
    """Return the map of a pointer with `end` at `position`, from untempered probabilities [rows, columns]."""
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
