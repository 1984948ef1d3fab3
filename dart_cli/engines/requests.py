"""Requests before they become rows of a batch: whether they can be served, and when they join.

RequestValidator   checks a request before it waits
ActiveRequest      a request that passed the check, and that waits or is a row of the batch
JoinPolicy         decides when waiting requests join a running batch
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from bus.errors import PromptError
from bus.messages import SampledTokens
from dart_cli.engines.base import CompletionStop, GenerateRequest, Generation
from dart_cli.engines.caches import BlockKeys
from dart_cli.engines.completions import CompletionBuilder
from dart_cli.engines.sampling import uniform_numbers
from dart_cli.policy.images import PreparedImage, with_hashes
from dart_cli.policy.loader import LoadedPolicy

PREFILL_ITERATIONS = 2
"""The iterations that a prefill costs each row that it delays, beside the work for the prompts themselves."""


class RequestValidator:
    """Checks requests to one policy.

    A request has at most `max_model_len` tokens; 0 is the model's own limit.
    """

    def __init__(self, policy: LoadedPolicy, max_model_len: int = 0) -> None:
        self._policy = policy
        self._absent = policy.absent_token_ids
        self._max_length = min(max_model_len or policy.max_positions, policy.max_positions)
        is_limited = self._max_length < policy.max_positions
        self._fix = "show fewer past screens or turns, leave texts out of env.observe" + (
            ", or raise vllm.max_model_len" if is_limited else ""
        )
        self._pointer = policy.pointer if policy.pointing == "pointer" else None
        self._vocabulary = int(policy.model.get_input_embeddings().weight.shape[0])

    def prepare(self, request: GenerateRequest) -> list[PreparedImage]:
        """Return the prepared images [I] of a valid request. Raises PromptError for an invalid one."""
        length = len(request.prompt_token_ids) + request.sampling.max_tokens
        if not request.prompt_token_ids:
            raise PromptError(f"request {request.request_id} has an empty prompt")
        if length > self._max_length:
            raise PromptError(
                f"request {request.request_id} needs {length} positions, the model has "
                f"{self._max_length}; {self._fix}"
            )
        partial_ids = request.partial.token_ids if request.partial is not None else []
        if any(not 0 <= token < self._vocabulary or token in self._absent for token in partial_ids):
            raise PromptError(
                f"request {request.request_id} continues from tokens that this model never samples"
            )
        keyed = with_hashes(request.images, request.image_hashes)
        images = [self._policy.images.prepare(encoded, key) for encoded, key in keyed]
        placeholders = request.prompt_token_ids.count(self._policy.image_token_id)
        expected = sum(image.tokens for image in images)
        if placeholders != expected:
            raise PromptError(
                f"request {request.request_id} has {placeholders} image placeholders for images "
                f"that take {expected}; render the prompt with this model's renderer"
            )
        if self._pointer is not None:
            if not images:
                raise PromptError(
                    f"request {request.request_id} shows no screenshot at which this policy could point"
                )
            if request.partial is not None:
                self._check_pointers(request.request_id, request.partial, images[-1].tokens)
        return images

    def _check_pointers(self, request_id: str, partial: SampledTokens, cells: int) -> None:
        """Raise PromptError unless each pointer of a partial is whole, or is cut off by the partial's end.

        `cells` is the number of patches of the screenshot that is pointed into.
        """
        assert self._pointer is not None
        before = -1
        patches = partial.patches or [-1] * len(partial)
        for position, (token, patch) in enumerate(zip(partial.token_ids, patches, strict=False)):
            expected = self._pointer.forced_after(before)
            is_forced = token in self._pointer.forced
            has_patch = token == self._pointer.end
            if (expected or -1) != (token if is_forced else -1) or (patch >= 0) != has_patch:
                raise PromptError(
                    f"request {request_id} continues from tokens that are no pointer, at {position}"
                )
            if patch >= cells:
                raise PromptError(
                    f"request {request_id} continues from patch {patch}, its last screenshot has patches "
                    f"0 to {cells - 1}"
                )
            before = token


@dataclass(eq=False)
class ActiveRequest:
    """One request, which waits or runs."""

    request: GenerateRequest
    builder: CompletionBuilder
    images: list[PreparedImage]
    arrived: float  # monotonic seconds
    began: float = 0.0  # monotonic seconds, the start of its prefill
    position: int = 0  # of the last token drawn, in the model's position ids
    weights: int = -1  # RunningBatch's count of weight changes when it was prefilled
    future: Future[Generation] = field(default_factory=Future)
    is_cancelled: bool = False  # no caller awaits it any more, so its row can end early
    routing: bytearray = field(default_factory=bytearray)
    """[tokens in the cache, layers, chosen], as in SampledTokens; empty if the engine records none."""
    _block_keys: BlockKeys | None = None

    @property
    def token_ids(self) -> list[int]:
        """The prompt and the tokens that were drawn so far."""
        return self.request.prompt_token_ids + self.builder.token_ids

    @property
    def most_tokens(self) -> int:
        """The tokens of prompt and completion if the completion reaches max_tokens."""
        return len(self.request.prompt_token_ids) + self.request.sampling.max_tokens

    @cached_property
    def uniform(self) -> NDArray[np.float64]:
        """The uniform numbers of the completion, one for each position."""
        sampling = self.request.sampling
        return uniform_numbers(sampling.seed, sampling.max_tokens)

    @property
    def next_uniform(self) -> float:
        """The uniform number with which the next token is drawn."""
        return float(self.uniform[len(self.builder)])

    def block_keys(self, token_ids: Sequence[int], image_token: int) -> Sequence[bytes]:
        """Return the keys of the whole blocks of `token_ids`, a prefix of this request's tokens."""
        if self._block_keys is None:
            self._block_keys = BlockKeys(self.images, image_token)
        return self._block_keys.of(token_ids)

    def generation(self, stop: CompletionStop, queue_s: float, engine_s: float) -> Generation:
        """Return the completion so far, as the engine's result.

        The tokens that a partial had computed keep the experts with which they were drawn.
        """
        before = self.request.partial.routing if self.request.partial is not None else b""
        routing = before + bytes(self.routing[len(before) :])
        return self.builder.generation(stop, queue_s, engine_s, routing)

    def finished(self, ends: Container[int]) -> Literal["end", "length"] | None:
        """Return why the completion is over, or None if it is not. `ends` are the end tokens."""
        return self.builder.finished(ends, self.request.sampling.max_tokens)


class JoinPolicy:
    """Decides when waiting requests join a running batch, and when they wait for more to join with them.

    A prefill delays all rows of the batch, and much of this delay is the same for one joiner as for ten. So
    joiners wait until the iterations that they have waited add up to the iterations that their prefill will
    cost the others. This loses at most twice as much as the best policy with foresight (Dooly, Goldman and
    Scott, "On-line analysis of the TCP acknowledgment delay problem", J. ACM 48, 2001). Iterations are
    counted, not seconds, so that the same requests make the same batches.
    """

    def __init__(self, prefill_iterations: float = PREFILL_ITERATIONS) -> None:
        self._cost = prefill_iterations
        self._waited = 0

    def admits(self, joiners: int, running: int) -> bool:
        """Return True if `joiners` requests join `running` rows now. Call it once before each iteration."""
        if joiners and self._waited >= self._cost * running:
            self._waited = 0
            return True
        self._waited = self._waited + joiners if joiners else 0
        return False
