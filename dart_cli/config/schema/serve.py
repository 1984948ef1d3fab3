"""The chat endpoint of `dart serve`: section [serve]."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from dart_cli.config.schema.base import (
    MOST_SLOTS,
    Section,
)


class ServeConfig(Section):
    """The chat endpoint of `dart serve`, through which agents of other programs play."""

    host: str = "127.0.0.1"
    """Address to serve on; beyond loopback every request needs a token (docs/serve.md)."""

    port: int = Field(default=8480, ge=0, le=65535)
    """Its port; 0 for any free one, which is printed."""

    sessions: int = Field(default=64, ge=1, le=MOST_SLOTS)
    """Episodes that may be open at once; a further one is answered with 429."""

    sampling: Literal["refuse", "ignore"] = "refuse"
    """What becomes of a request's own temperature, token limit and the like, where they differ from
    [rollout], by which training samples: an error that says so, or nothing."""
