"""The prompt of the policy: instruction, visible turns and the screen, as token ids.

    PromptRenderer.render   -> RenderedPrompt: token ids with expanded placeholders, and the images

The tokenizer's own chat template builds the text. The first user message has the
instruction; a past turn is an assistant message, preceded by its screenshot if history kept it; the
present screenshot is last. Text is tokenised once per distinct prompt and cached.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from bus.errors import EngineError
from bus.messages import Turn
from dart_cli.policy.images import with_hashes
from dart_cli.policy.model import LoadedPolicy


@dataclass(frozen=True)
class RenderedPrompt:
    """A prompt, ready for an engine."""

    token_ids: list[int]  # [P], one placeholder per image token
    images: list[bytes]  # [I], encoded, in the order of their placeholders


class PromptRenderer:
    """Renders prompts for one policy.

    `system` is a system message, empty for none; `template` wraps the instruction, which replaces
    `{instruction}` in it (UI-TARS asks for a page of text around it).
    """

    def __init__(
        self, policy: LoadedPolicy, system: str = "", template: str = "{instruction}"
    ) -> None:
        self._policy = policy
        self._system = system
        self._template = template
        self._tokenise = lru_cache(maxsize=4096)(self._tokenise_uncached)

    def render(
        self,
        instruction: str,
        turns: Sequence[Turn],
        screenshot: bytes,
        image_hashes: Sequence[str] = (),
    ) -> RenderedPrompt:
        """Token ids [P] and images [I], whose content hashes are `image_hashes` [I] where known.

        Raises EngineError if a screenshot is not an image.
        """
        images = [turn.screenshot for turn in turns if turn.screenshot is not None]
        images.append(screenshot)
        compact = self._tokenise(
            instruction, tuple((turn.text, turn.screenshot is not None) for turn in turns)
        )
        token_ids: list[int] = []
        remaining = iter(with_hashes(images, image_hashes))
        for token in compact:
            if token == self._policy.image_token_id:
                token_ids += [token] * self._policy.images.token_count(*next(remaining))
            else:
                token_ids.append(token)
        return RenderedPrompt(token_ids, images)

    def _messages(
        self, instruction: str, turns: Sequence[tuple[str, bool]]
    ) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        if self._system:
            messages.append({"role": "system", "content": self._system})
        opening = {"type": "text", "text": self._template.replace("{instruction}", instruction)}
        pending: list[dict[str, Any]] = [opening]  # parts of the user message being built
        for text, has_image in turns:
            if has_image:
                pending.insert(0, {"type": "image"})
            if pending:
                messages.append({"role": "user", "content": pending})
            messages.append({"role": "assistant", "content": text})
            pending = []
        messages.append({"role": "user", "content": [{"type": "image"}, *pending]})
        return messages

    def _tokenise_uncached(
        self, instruction: str, turns: tuple[tuple[str, bool], ...]
    ) -> tuple[int, ...]:
        """The prompt with one placeholder per image."""
        tokenizer = self._policy.tokenizer
        text = tokenizer.apply_chat_template(
            self._messages(instruction, turns), tokenize=False, add_generation_prompt=True
        )
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        placeholders = sum(token == self._policy.image_token_id for token in token_ids)
        expected = 1 + sum(has_image for _, has_image in turns)
        if placeholders != expected:
            # An instruction or a past completion that contains a placeholder would shift the images.
            raise EngineError(
                f"the prompt has {placeholders} image placeholders for {expected} images; "
                "does the instruction or a past turn contain the image token, "
                "or does the chat template drop images?"
            )
        return tuple(token_ids)
