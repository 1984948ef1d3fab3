"""The sampler in vLLM's worker: it draws tokens by seed and position, with exact log-probabilities.

    Draws          holds the request of each row; vLLM updates it as rows join and leave the batch
    ExactSampler   draws a token for each row, and returns its log-probability and the exact entropy

vLLM's own sampler also seeds its random numbers by request, but it cannot continue in the middle of a
completion, and entropies could only be computed from the log-probabilities of the whole vocabulary. Here
vLLM's `logprobs` have two columns: the log-probability of the drawn token, and minus the entropy.

The position of a token is the length of its request's list of tokens. With asynchronous scheduling the host
is a step ahead of the device. vLLM appends a placeholder for each token that it has not read yet, so the
length is right.
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
"""The numbers that are returned for each token: its log-probability, and minus the entropy."""
NO_TOKEN = -1
"""The token id of the second column; vLLM would merge columns with the same token."""


@dataclass(frozen=True)
class _RequestState:
    """One request of the batch."""

    uniform: NDArray[np.float64]  # for each position of its completion, the partial's included
    first: int  # tokens of its partial
    output: Sequence[int]  # vLLM's list of the tokens after these, with placeholders

    @property
    def next_uniform(self) -> float:
        """The uniform number for the next token.

        A row in the middle of its prefill draws, too, but its token is not used.
        """
        return float(self.uniform[min(self.first + len(self.output), len(self.uniform) - 1)])


class Draws(LogitsProcessor):
    """A logits processor that changes no logits, but keeps the rows of the present batch for ExactSampler."""

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
        """Return True, since the processor changes no logits."""
        return True

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits unchanged."""
        return logits

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Remove, add and move rows, in this order."""
        if batch_update is None:
            return
        for index in batch_update.removed:
            self._rows.pop(index, None)
        for index, params, _, output in batch_update.added:
            options = params.extra_args[SECTION]
            count = options["first"] + params.max_tokens
            self._rows[index] = _RequestState(
                uniform_numbers(options["seed"], count), options["first"], output
            )
        for source, target, direction in batch_update.moved:
            row, replaced = self._rows.pop(source, None), self._rows.pop(target, None)
            if row is not None:
                self._rows[target] = row
            if replaced is not None and direction == MoveDirectionality.SWAP:
                self._rows[source] = replaced

    def uniform(self, rows: int, device: torch.device) -> torch.Tensor:
        """Return the uniform numbers [rows] with which the rows draw now."""
        numbers = torch.tensor(
            [self._rows[i].next_uniform if i in self._rows else 0.0 for i in range(rows)],
            dtype=torch.float64,
        )
        # Pinned, so that the copy does not wait for the device, which still computes the previous step.
        if accelerator.is_gpu(device):
            numbers = accelerator.in_pinned(numbers)
        return numbers.to(device, non_blocking=True)


class ExactSampler(Sampler):
    """The sampler for our batches; vLLM's own dry runs still use vLLM's sampler."""

    def forward(
        self,
        logits: torch.Tensor,  # [B, V]
        sampling_metadata: SamplingMetadata,
        predict_bonus_token: bool = False,
        logprobs_mode_override: Any = None,
    ) -> SamplerOutput:
        """Draw a token for each row."""
        processors = sampling_metadata.logitsprocs.all
        ours = [processor for processor in processors if isinstance(processor, Draws)]
        if not ours:
            return super().forward(
                logits, sampling_metadata, predict_bonus_token, logprobs_mode_override
            )
        [draws] = ours
        values = logits.float().index_fill(-1, draws.forbidden, float("-inf"))
        greedy = None
        temperature = sampling_metadata.temperature  # [B]; None if all rows are greedy
        if temperature is not None:
            greedy = temperature == 0
            values.div_(torch.where(greedy, 1.0, temperature)[:, None])
        logprobs = values.log_softmax(dim=-1)
        del values  # frees [B, V], as large as each of the two below
        probabilities = logprobs.exp()
        likeliest = logprobs.argmax(dim=-1)
        if greedy is None:
            tokens = likeliest
        else:
            uniform = draws.uniform(len(logprobs), logprobs.device)
            tokens = torch.where(greedy, likeliest, draw(probabilities, uniform))
        token_logprobs = logprobs.gather(1, tokens[:, None])[:, 0]
        entropy = entropies(probabilities, logprobs).float()
        numbers = torch.stack([token_logprobs, -entropy], dim=1)  # [B, 2]
        token_ids = tokens.to(torch.int32)[:, None]
        return SamplerOutput(
            sampled_token_ids=token_ids,
            logprobs_tensors=LogprobsTensors(
                logprob_token_ids=F.pad(token_ids, (0, COLUMNS - 1), value=NO_TOKEN),
                logprobs=numbers,
                selected_token_ranks=torch.zeros_like(tokens),
            ),
        )
