"""The chat endpoint of `dart serve`: section [serve]."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from dart_cli.config.schema.base import MOST_SLOTS, Section


class ServeConfig(Section):
    """The chat endpoint of `dart serve`, through which agents of other programs play."""

    host: str = "127.0.0.1"
    """Address to serve on. Beyond loopback every request needs a token (docs/serve.md)."""

    port: int = Field(default=8480, ge=0, le=65535)
    """Port to serve on. 0 takes any free port and prints it."""

    sessions: int = Field(default=64, ge=1, le=MOST_SLOTS)
    """Number of episodes that may be open at once. A request for one more is answered with 429."""

    sampling: Literal["refuse", "ignore"] = "refuse"
    """What happens where the temperature, the token limit and the like of a request differ from [rollout], by
    which training samples. `refuse` answers with an error that names the difference, `ignore` uses
    [rollout]."""
