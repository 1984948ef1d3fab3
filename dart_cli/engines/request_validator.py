"""Checks whether an engine can serve a request, before it waits."""

from __future__ import annotations

from bus.errors import PromptError
from bus.messages import SampledTokens
from dart_cli.engines.base import GenerateRequest
from dart_cli.policy.images import PreparedImage, with_hashes
from dart_cli.policy.model import LoadedPolicy


class RequestValidator:
    """Checks requests to one policy, of at most `max_model_len` tokens; 0 for all its positions."""

    def __init__(self, policy: LoadedPolicy, max_model_len: int = 0) -> None:
        self._policy = policy
        self._absent = policy.absent_token_ids
        self._max_length = min(max_model_len or policy.max_positions, policy.max_positions)
        is_limited = self._max_length < policy.max_positions
        self._cure = "show fewer past screens or turns, leave texts out of env.observe" + (
            ", or raise vllm.max_model_len" if is_limited else ""
        )
        self._pointer = policy.pointer if policy.pointing == "pointer" else None
        self._vocabulary = int(policy.model.get_input_embeddings().weight.shape[0])

    def prepare(self, request: GenerateRequest) -> list[PreparedImage]:
        """The prepared images [I] of a valid request. Raises PromptError for an invalid one."""
        length = len(request.prompt_token_ids) + request.sampling.max_tokens
        if not request.prompt_token_ids:
            raise PromptError(f"request {request.request_id} has an empty prompt")
        if length > self._max_length:
            raise PromptError(
                f"request {request.request_id} needs {length} positions, the model has "
                f"{self._max_length}; {self._cure}"
            )
        drawn = request.partial.token_ids if request.partial is not None else []
        if any(not 0 <= token < self._vocabulary or token in self._absent for token in drawn):
            raise PromptError(
                f"request {request.request_id} continues from tokens that this model never samples"
            )
        keyed = with_hashes(request.images, request.image_hashes)
        images = [self._policy.images.prepare(*each) for each in keyed]
        placeholders = request.prompt_token_ids.count(self._policy.image_token_id)
        needed = sum(image.tokens for image in images)
        if placeholders != needed:
            raise PromptError(
                f"request {request.request_id} has {placeholders} image placeholders for images "
                f"that take {needed}; render the prompt with this model's renderer"
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
        """Raise PromptError unless each pointer of a partial is whole or at its end, on a screen of `cells`."""
        assert self._pointer is not None
        before = -1
        patches = partial.patches or [-1] * len(partial)
        for position, (token, patch) in enumerate(zip(partial.token_ids, patches, strict=False)):
            wanted = self._pointer.forced_after(before)
            is_forced = token in self._pointer.forced
            has_patch = token == self._pointer.end
            if (wanted or -1) != (token if is_forced else -1) or (patch >= 0) != has_patch:
                raise PromptError(
                    f"request {request_id} continues from tokens that are no pointer, at {position}"
                )
            if patch >= cells:
                raise PromptError(
                    f"request {request_id} continues from patch {patch}, its last screenshot has patches "
                    f"0 to {cells - 1}"
                )
            before = token
