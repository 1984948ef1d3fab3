"""The three tokens of a pointer, without torch.

PointerTokens   their ids in one model's vocabulary, and which token another one forces

`start` is sampled like any token. After it `pad` is forced, and after `pad` the token `end`, with which
a patch is drawn: from the last hidden state of `pad`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dart_cli.config.architecture import TOKENS, pointer_ids

START, PAD, END = TOKENS
TRIPLE = START + PAD + END
"""A pointer, as text."""


@dataclass(frozen=True)
class PointerTokens:
    """Token ids of one model."""

    start: int
    pad: int
    end: int

    @property
    def triple(self) -> tuple[int, int, int]:
        """A pointer, as token ids."""
        return self.start, self.pad, self.end

    @property
    def forced(self) -> tuple[int, int]:
        """Those that are never drawn from the vocabulary."""
        return self.pad, self.end

    def forced_after(self, token: int) -> int | None:
        """The token that must follow `token`; None where the next one is drawn."""
        if token == self.start:
            return self.pad
        return self.end if token == self.pad else None


def pointer_tokens(config: Mapping[str, Any]) -> PointerTokens | None:
    """The tokens of a config.json; None for a folder without a head. Raises ModelError for a part of them."""
    ids = pointer_ids(config)
    return None if ids is None else PointerTokens(*ids)
