"""Asks a model folder in this process, through the transformers engine. This module imports torch."""

from __future__ import annotations

import asyncio

from bus.errors import EngineError
from bus.messages import ChatMessage, ChatPart, Sampling
from dart_cli.chat.server import ChatReply, Messages
from dart_cli.engines.base import GenerateRequest
from dart_cli.engines.transformers_engine import TransformersEngine
from dart_cli.hardware.device import pick_device
from dart_cli.policy.loader import LoadedPolicy, load_policy
from dart_cli.policy.prompt import PromptRenderer


class ModelBackend:
    """A backend that asks a model folder with greedy sampling. It loads the model at the first question."""

    attempts = 1  # the same question has the same answer

    def __init__(self, folder: str, most_at_once: int) -> None:
        self._folder, self._most = folder, most_at_once
        self._engine: TransformersEngine | None = None
        self._loading = asyncio.Lock()
        self._requests = 0

    async def ask(self, messages: Messages, max_tokens: int) -> ChatReply:
        """Return the model's answer.

        Raises ModelError if the folder cannot be loaded, EngineError if the backend is closed meanwhile.
        """
        engine = await self._loaded()
        prompt, images = await asyncio.to_thread(render, engine.policy, messages)
        self._requests += 1
        generation = await engine.generate(
            GenerateRequest(
                f"judge-{self._requests}",
                prompt,
                images,
                Sampling(temperature=0.0, max_tokens=max_tokens, seed=0),
            )
        )
        token_ids = generation.sampled.token_ids
        if generation.stop == "suspended":
            raise EngineError("the judge was closed")
        return ChatReply(engine.policy.decode(token_ids), len(prompt), len(token_ids))

    async def close(self) -> None:
        """Free the model; the next question loads it again."""
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.close()

    async def _loaded(self) -> TransformersEngine:
        async with self._loading:
            if self._engine is None:
                policy = await asyncio.to_thread(
                    load_policy, self._folder, "auto", pick_device("auto")
                )
                self._engine = TransformersEngine(policy, policy_version=-1, max_batch=self._most)
            return self._engine


def render(policy: LoadedPolicy, messages: Messages) -> tuple[list[int], list[bytes]]:
    """Return the prompt [P], with expanded image placeholders, and its images [I].

    A text that spells a special token is encoded as its characters. Raises PromptError if the chat template
    drops images.
    """
    images = [part for _, parts in messages for part in parts if isinstance(part, bytes)]
    chat = [ChatMessage(role=role, parts=list(map(_part, parts))) for role, parts in messages]
    prompt = PromptRenderer(policy).render_messages(chat, images)
    return prompt.token_ids, prompt.images


def _part(part: str | bytes) -> ChatPart:
    return ChatPart(text=part) if isinstance(part, str) else ChatPart(is_image=True)
