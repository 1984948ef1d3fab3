"""How tokens are sampled in vLLM's worker: by seed and position, with exact numbers.

    Draws          the request of each row of the batch; vLLM updates it as rows come and go
    ExactSampler   logits -> one token per row, with forbidden tokens excluded and the temperature
                   applied, its log-probability and the entropy of the whole distribution

vLLM's own sampler seeds its random numbers by request too, but cannot continue in the middle of a
completion, and gives entropies only by sending the whole vocabulary. Here its `logprobs` have two
columns: the drawn token's log-probability and minus the entropy.

A token's place is the length of its request's list. With asynchronous scheduling the host is a step ahead of
the device, and vLLM appends a placeholder for each token that it has not read yet, so the length is right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor.interface import (
    BatchUpdate,
    LogitsProcessor,
    MoveDirectionality,
)
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler

from dart_cli.engines.sampling import draw, entropies, uniform_numbers
from dart_cli.engines.vllm import SECTION
from dart_cli.hardware import accelerator

COLUMNS = 2
"""Numbers returned for each token: its log-probability, and minus the entropy."""
NO_TOKEN = -1
"""The token id of the second column. vLLM merges columns of the same token."""


@dataclass(frozen=True)
class _RequestState:
    """One request of the batch."""

    uniform: NDArray[np.float64]  # for each position of its completion, the partial's included
    first: int  # tokens of its partial
    drawn: Sequence[int]  # tokens after these; vLLM appends to it, a placeholder for one on its way

    @property
    def next_uniform(self) -> float:
        """The number for the next token. A row in mid-prefill draws too; its token is not read."""
        return float(self.uniform[min(self.first + len(self.drawn), len(self.uniform) - 1)])


class Draws(LogitsProcessor):
    """The rows of the present batch, for ExactSampler. It changes no logits."""

    def __init__(
        self,
        vllm_config: Any,
        device: torch.device,
        is_pin_memory: bool,  # noqa: ARG002 (vLLM's signature)
    ) -> None:
        forbidden = vllm_config.additional_config[SECTION]["forbidden"]
        self.forbidden = torch.tensor(forbidden, dtype=torch.long, device=device)  # [K]
        self._rows: dict[int, _RequestState] = {}

    def is_argmax_invariant(self) -> bool:
        """Return True: the processor changes no logits."""
        return True

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits as they are."""
        return logits

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Rows removed, added and moved, in this order."""
        if batch_update is None:
            return
        for index in batch_update.removed:
            self._rows.pop(index, None)
        for index, params, _, drawn in batch_update.added:
            options = params.extra_args[SECTION]
            count = options["first"] + params.max_tokens
            self._rows[index] = _RequestState(
                uniform_numbers(options["seed"], count), options["first"], drawn
            )
        for source, target, direction in batch_update.moved:
            row, replaced = self._rows.pop(source, None), self._rows.pop(target, None)
            if row is not None:
                self._rows[target] = row
            if replaced is not None and direction == MoveDirectionality.SWAP:
                self._rows[source] = replaced

    def uniform(self, rows: int, device: torch.device) -> torch.Tensor:
        """Return the number [rows] with which each row draws now."""
        numbers = [self._rows[i].next_uniform if i in self._rows else 0.0 for i in range(rows)]
        # Without waiting for the device, which still computes the step before.
        held = torch.tensor(numbers, dtype=torch.float64)
        if accelerator.is_gpu(device):
            held = accelerator.in_pinned(held)
        return held.to(device, non_blocking=True)


class ExactSampler(Sampler):
    """Replaces vLLM's sampler for our batches; vLLM's own dry runs use the original."""

    def forward(
        self,
        logits: torch.Tensor,  # [B, V]
        sampling_metadata: SamplingMetadata,
        predict_bonus_token: bool = False,
        logprobs_mode_override: Any = None,
    ) -> SamplerOutput:
        """Draw a token for each row."""
        ours = [each for each in sampling_metadata.logitsprocs.all if isinstance(each, Draws)]
        if not ours:
            return super().forward(
                logits, sampling_metadata, predict_bonus_token, logprobs_mode_override
            )
        [draws] = ours
        values = logits.float().index_fill(-1, draws.forbidden, float("-inf"))
        greedy = None
        temperature = sampling_metadata.temperature  # [B]; None where all rows are greedy
        if temperature is not None:
            greedy = temperature == 0
            values.div_(torch.where(greedy, 1.0, temperature)[:, None])
        logprobs = values.log_softmax(dim=-1)
        del values  # [B, V], as the two below
        probabilities = logprobs.exp()
        likeliest = logprobs.argmax(dim=-1)
        if greedy is None:
            drawn = likeliest
        else:
            uniform = draws.uniform(len(logprobs), logprobs.device)
            drawn = torch.where(greedy, likeliest, draw(probabilities, uniform))
        picked = logprobs.gather(1, drawn[:, None])[:, 0]
        entropy = entropies(probabilities, logprobs).float()
        numbers = torch.stack([picked, -entropy], dim=1)  # [B, 2]
        tokens = drawn.to(torch.int32)[:, None]
        return SamplerOutput(
            sampled_token_ids=tokens,
            logprobs_tensors=LogprobsTensors(
                logprob_token_ids=F.pad(tokens, (0, COLUMNS - 1), value=NO_TOKEN),
                logprobs=numbers,
                selected_token_ranks=torch.zeros_like(drawn),
            ),
        )
