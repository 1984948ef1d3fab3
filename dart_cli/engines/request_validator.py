"""What of a request an engine can serve, found before it waits; and when a completion is over."""

from __future__ import annotations

from typing import Literal

from bus.errors import EngineError
from dart_cli.engines.base import GenerateRequest
from dart_cli.engines.completions import Draft
from dart_cli.policy.images import PreparedImage
from dart_cli.policy.model import LoadedPolicy

Stop = Literal["end", "length", "suspended"]


class RequestLimits:
    """Those of one policy, in at most `max_model_len` tokens, 0 for as many as it has positions."""

    def __init__(self, policy: LoadedPolicy, max_model_len: int = 0) -> None:
        self._policy = policy
        self._never = frozenset(policy.forbidden_token_ids)
        self._length = min(max_model_len or policy.max_positions, policy.max_positions)
        is_cut = self._length < policy.max_positions
        self._cure = "show fewer past screens or turns" + (
            ", or raise vllm.max_model_len" if is_cut else ""
        )
        self._vocabulary = int(policy.model.get_input_embeddings().weight.shape[0])

    def prepare(self, request: GenerateRequest) -> list[PreparedImage]:
        """The images [I] of a request that can be served. Raises EngineError for another."""
        length = len(request.prompt_token_ids) + request.sampling.max_tokens
        if not request.prompt_token_ids:
            raise EngineError(f"request {request.request_id} has an empty prompt")
        if length > self._length:
            raise EngineError(
                f"request {request.request_id} needs {length} positions, the model has "
                f"{self._length}; {self._cure}"
            )
        drawn = request.partial.token_ids if request.partial is not None else []
        if any(not 0 <= token < self._vocabulary or token in self._never for token in drawn):
            raise EngineError(
                f"request {request.request_id} goes on from tokens that this model never samples"
            )
        hashes = request.image_hashes or [""] * len(request.images)
        if len(hashes) != len(request.images):
            raise EngineError(
                f"request {request.request_id} has {len(request.images)} images and "
                f"{len(hashes)} content hashes"
            )
        images = [*map(self._policy.images.prepare, request.images, hashes)]
        places = request.prompt_token_ids.count(self._policy.image_token_id)
        needed = sum(image.tokens for image in images)
        if places != needed:
            raise EngineError(
                f"request {request.request_id} has {places} image placeholders for images "
                f"that take {needed}; render the prompt with this model's renderer"
            )
        return images

    def end_of(self, request: GenerateRequest, draft: Draft) -> Literal["end", "length"] | None:
        """Why a completion is over; None if it is not."""
        if draft.token_ids and draft.token_ids[-1] in self._policy.end_token_ids:
            return "end"
        return "length" if len(draft) >= request.sampling.max_tokens else None
