"""An ActRequest answered: render the prompt, draw the completion, decode its text.

Used by the rollout worker for the bus and by `dart eval` in its own process.
"""

from __future__ import annotations

from bus.messages import ActRequest, Completion
from dart_cli.engines.base import Engine, GenerateRequest
from dart_cli.policy.model import LoadedPolicy
from dart_cli.policy.prompt import PromptRenderer


class Responder:
    """Answers screens with completions through one engine."""

    def __init__(
        self, policy: LoadedPolicy, engine: Engine, renderer: PromptRenderer | None = None
    ) -> None:
        self._policy = policy
        self._engine = engine
        self._renderer = renderer or PromptRenderer(policy)

    async def answer(self, request: ActRequest) -> Completion:
        """Draw what the policy says to `request`.

        Raises EngineError if the prompt cannot be built or served.
        """
        prompt = self._renderer.render(request.instruction, request.turns, request.screenshot)
        generation = await self._engine.generate(
            GenerateRequest(
                request_id=f"{request.trajectory_id}/{request.step}",
                prompt_token_ids=prompt.token_ids,
                images=prompt.images,
                sampling=request.sampling,
            )
        )
        return Completion(
            prompt_token_ids=prompt.token_ids,
            token_ids=generation.token_ids,
            behaviour_logprobs=generation.behaviour_logprobs,
            entropies=generation.entropies,
            version_spans=generation.version_spans,
            text=self._policy.decode(generation.token_ids),
            stop=generation.stop,
            queue_s=generation.queue_s,
            engine_s=generation.engine_s,
        )
