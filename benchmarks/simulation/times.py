"""How long the simulated GUIs, GPUs and updates take: [env.options] of a configuration.

A simulated suite, engine and learner are named in the configuration as any code of a user's own, and read
their times from the one place that belongs to the suite. Without a simulated suite they have the defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from bus.errors import TaskError
from dart_cli.config.schema import Config


class Times(BaseModel):
    """The times of the model and the GPUs, in seconds, before the speed-up."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    speedup: float = Field(default=1.0, gt=0, le=1e9)
    """All times are divided by this, those of the environments included."""

    prefill_s: float = Field(default=0.5, ge=0)
    """An engine prefills a prompt whose trajectory it has not served before."""

    prefill_cached_s: float = Field(default=0.12, ge=0)
    """The same where the turns before are in its prefix cache: the new screenshot alone."""

    decode_s: float = Field(default=0.01, ge=0)
    """A decode iteration with one request."""

    decode_each_s: float = Field(default=0.0002, ge=0)
    """What each further request in the batch adds to an iteration."""

    completion_tokens: int = Field(default=70, ge=1)
    """Median tokens of a completion (log-normal)."""

    completion_sigma: float = Field(default=0.4, ge=0, le=2)
    """Spread of their logarithm."""

    transfer_s: float = Field(default=2.0, ge=0)
    """A worker reads a weight set while it serves."""

    pause_s: float = Field(default=0.5, ge=0)
    """It does not serve while the set is put in place."""

    train_s: float = Field(default=10.0, ge=0)
    """An update, however small."""

    train_sample_s: float = Field(default=0.07, ge=0)
    """What each sample adds to it."""

    @classmethod
    def of(cls, config: Config) -> Times:
        """Return the times of a configuration, which the suite has checked."""
        options = config.env.options
        return cls(**{name: options[name] for name in cls.model_fields if name in options})


def read_times(options: Mapping[str, Any]) -> Times:
    """Return the times among the options of a suite. Raises TaskError for one that is unknown or out of range."""
    try:
        return Times(**options)
    except ValidationError as error:
        first = error.errors()[0]
        name = first["loc"][0]
        if first["type"] == "extra_forbidden":
            raise TaskError(
                f"suite timed has no option {name!r}; its options are profile, fault_rate, size, seed, "
                f"{', '.join(Times.model_fields)}"
            ) from None
        raise TaskError(f"{name}: {first['msg']}, got {first['input']!r}") from None
