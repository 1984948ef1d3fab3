"""The policies that play with the environment's own solution, and what a teacher shares with them.

OraclePolicy      answers with the environment's own solution, in the tokens of the policy
HintedPolicy      samples from a policy whose prompt names the next step of the solution
ActionWriter      writes actions as a completion of the policy that learns
UnwritableError   the error for an action that the policy's language or its length does not allow
"""

from __future__ import annotations

from collections.abc import Sequence

from bus.errors import ActionError, EngineError
from bus.messages import ActRequest, Completion
from bus.packed import int32s
from dart_cli.engines.base import PromptEncoder, Responder
from dart_cli.env.async_env import AsyncEnv
from dart_cli.env.episode import hinted
from dart_cli.env.step_prompts import ActionSpec
from envs.contract.actions import Action


class UnwritableError(EngineError):
    """An action cannot be written as a completion of the policy; `is_long` tells that it has too many tokens."""

    def __init__(self, text: str, *, is_long: bool = False) -> None:
        super().__init__(text)
        self.is_long = is_long


class ActionWriter:
    """Writes actions as completions of the policy that learns: its prompt, its action language, its tokens."""

    def __init__(
        self, prompt_encoder: PromptEncoder, action_spec: ActionSpec, max_tokens: int
    ) -> None:
        self._prompt_encoder = prompt_encoder
        self._action_spec = action_spec
        self._max_tokens = max_tokens

    def completion(
        self,
        actions: Sequence[Action],
        request: ActRequest,
        what: str = "solution",
        *,
        thought: str = "",
        words: str = "",
    ) -> Completion:
        """Return the completion that means `actions`; its log-probabilities are unknown.

        A `thought` stands where the policy has its thoughts. `words` say what is done; languages that have no
        place for them leave them out. `what` names the actions in errors. Raises UnwritableError, and
        EngineError for a prompt that cannot be built.
        """
        opening = self._prompt_encoder.closed_thought(thought or words)
        line = (words if thought else "") if opening else (words or thought)
        size = request.width, request.height
        try:
            text = opening + self._action_spec.write(actions, size, line)
        except ActionError as error:
            raise UnwritableError(
                f"the policy's action parser cannot write the {what}: {error}"
            ) from error
        try:
            sampled = self._prompt_encoder.encode_completion(text, request)
        except EngineError as error:
            raise UnwritableError(str(error)) from error
        if len(sampled) > self._max_tokens:
            raise UnwritableError(
                f"the {what} {text[:60]!r} takes {len(sampled)} tokens, "
                f"rollout.max_tokens = {self._max_tokens}",
                is_long=True,
            )
        return Completion(
            prompt_token_ids=int32s(self._prompt_encoder.encode_prompt(request)),
            sampled=sampled,
            text=text,
            stop="end",
            queue_s=0.0,
            engine_s=0.0,
        )


class OraclePolicy:
    """A policy that answers with the environment's own solution, in the action language of the policy."""

    def __init__(self, env: AsyncEnv, writer: ActionWriter) -> None:
        self._env = env
        self._writer = writer

    async def act(self, request: ActRequest) -> Completion:
        """Return the next step of the solution. Raises EnvError, and EngineError if it cannot be written."""
        action, _hint = await self._env.solve()
        return self._writer.completion([action], request)


class HintedPolicy:
    """A policy that samples with a hint on the next step in its prompt, and returns the prompt without it."""

    def __init__(self, responder: Responder, env: AsyncEnv, action_spec: ActionSpec) -> None:
        self._responder = responder
        self._env = env
        self._action_spec = action_spec

    async def act(self, request: ActRequest) -> Completion:
        """Return a completion that was sampled with the hint. Raises EnvError, EngineError."""
        instruction = await hinted(self._env, request, self._action_spec)
        question = request
        if instruction:
            question = request.model_copy(update={"instruction": instruction})
        completion = await self._responder.answer(question)
        plain_prompt = self._responder.prompt_encoder.encode_prompt(request)
        return completion.model_copy(update={"prompt_token_ids": int32s(plain_prompt)})
