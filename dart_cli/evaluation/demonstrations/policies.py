"""Policies that know the environment's own solution.

    OraclePolicy   answers with the solution, in the policy's tokens
    HintedPolicy   samples from the policy, which sees the next step of the solution

The oracle's tokens were sampled by no policy: their log-probabilities are unknown. A policy's are
those of the distribution they were sampled from, with the hint in the prompt; the stored prompt is
without it. The ratio pi(a | s) / mu(a | s, hint) is then the importance weight of such a step.
"""

from __future__ import annotations

from bus.errors import ActionError, EngineError
from bus.messages import ActRequest, Completion
from bus.packed import int32s
from dart_cli.engines.base import PromptEncoder, Responder
from dart_cli.env.async_env import AsyncEnv
from dart_cli.env.episode import ActionSpec


class OraclePolicy:
    """Answers with the environment's own solution, as the policy would have written it."""

    def __init__(
        self, env: AsyncEnv, prompt_encoder: PromptEncoder, action_spec: ActionSpec, max_tokens: int
    ) -> None:
        self._env = env
        self._prompt_encoder = prompt_encoder
        self._action_spec = action_spec
        self._max_tokens = max_tokens

    async def act(self, request: ActRequest) -> Completion:
        """The next step of the solution. Raises EnvError, EngineError where it cannot be written."""
        action, _hint = await self._env.solve()
        coordinates = self._action_spec.coordinate_map_of(request.width, request.height)
        try:
            text = self._action_spec.codec.format(action, coordinates)
        except ActionError as error:
            raise EngineError(f"the policy's codec cannot write the solution: {error}") from error
        sampled = self._prompt_encoder.encode_completion(text, request)
        if len(sampled) > self._max_tokens:
            raise EngineError(
                f"the solution {text[:60]!r} takes {len(sampled)} tokens, "
                f"rollout.max_tokens = {self._max_tokens}"
            )
        return Completion(
            prompt_token_ids=int32s(self._prompt_encoder.encode_prompt(request)),
            sampled=sampled,
            text=text,
            stop="end",
            queue_s=0.0,
            engine_s=0.0,
        )


class HintedPolicy:
    """Answers as the policy samples when it sees the next step; the prompt returned is without it."""

    def __init__(self, responder: Responder, env: AsyncEnv, action_spec: ActionSpec) -> None:
        self._responder = responder
        self._env = env
        self._action_spec = action_spec

    async def act(self, request: ActRequest) -> Completion:
        """A completion under the hint. Raises EnvError, EngineError."""
        instruction = await self._hinted(request)
        hinted = request.model_copy(update={"instruction": instruction})
        completion = await self._responder.answer(hinted)
        plain_prompt = self._responder.prompt_encoder.encode_prompt(request)
        return completion.model_copy(update={"prompt_token_ids": int32s(plain_prompt)})

    async def _hinted(self, request: ActRequest) -> str:
        """The instruction that names the next step: in words, else as the action's text."""
        action, hint = await self._env.solve()
        if hint:
            return hint
        coordinates = self._action_spec.coordinate_map_of(request.width, request.height)
        try:
            text = self._action_spec.codec.format(action, coordinates)
        except ActionError:
            return request.instruction
        return f"{request.instruction}\nNext: {text}"
