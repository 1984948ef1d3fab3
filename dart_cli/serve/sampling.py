"""Decides which settings of a chat request are used, and which must be the run's.

settle   returns the sampling of one completion, or raises ApiError for a setting that is not allowed
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from bus.messages import Sampling
from bus.temperatures import MAX_TEMPERATURE, MIN_TEMPERATURE
from dart_cli.serve.errors import ApiError, invalid
from dart_cli.serve.requests import read_body

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p": (1,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "stop": ("", []),
    "best_of": (1,),
}
"""Settings that change the distribution or the completion -> their values that change nothing."""

_UNANSWERED: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "top_logprobs": (0,),
}
"""Settings that ask for an answer of another form -> the values that are allowed."""

_SILENT = frozenset(
    "model messages user metadata stream stream_options logprobs store service_tier "
    "parallel_tool_calls safety_identifier prompt_cache_key session_id return_token_ids".split()
)
"""Settings that other modules read, or that change nothing."""


class _Settings(BaseModel):
    """Sampling settings that a request may have."""

    model_config = ConfigDict(strict=True)

    temperature: Annotated[float, Field(ge=0, le=MAX_TEMPERATURE)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**31)] | None = None


def settle(
    fields: Mapping[str, Any], run: Sampling, *, is_trained: bool, ignores: bool
) -> Sampling:
    """Return how a completion is sampled: as the run does, or outside training as the request asks.

    With `ignores`, settings that would be refused are ignored instead. Raises ApiError.
    """
    # 1. Refuse settings whose answer would have another form, and unknown ones.
    for name, neutral in _UNANSWERED.items():
        if fields.get(name) is not None and not _is_one_of(fields[name], neutral):
            raise _unsupported(name, fields[name], neutral)
    for name, value in fields.items():
        is_read = name in _SILENT or name in _UNANSWERED or name in _Settings.model_fields
        if value is None or is_read:
            continue
        neutral = _NEUTRAL.get(name, ())
        if not _is_one_of(value, neutral) and not ignores:
            raise _unsupported(name, value, neutral)
    # 2. Read the sampling settings; outside training they are used.
    settings = read_body(_Settings, fields)
    temperature = settings.temperature
    if temperature and temperature < MIN_TEMPERATURE:
        raise invalid(f"temperature must be 0 or at least {MIN_TEMPERATURE:g}", "temperature")
    most, seed = settings.max_completion_tokens or settings.max_tokens, settings.seed
    if not is_trained:
        changes = {"temperature": temperature, "max_tokens": most, "seed": seed}
        return run.model_copy(
            update={name: value for name, value in changes.items() if value is not None}
        )
    # 3. In training they must be the run's.
    for name, value, of_run, key in (
        ("temperature", temperature, run.temperature, "rollout.temperature"),
        ("max_tokens", most, run.max_tokens, "rollout.max_tokens"),
    ):
        if value is not None and value != of_run and not ignores:
            raise invalid(
                f"{name} = {value:g}: training samples with {key} = {of_run:g}; leave it out, set the run's "
                f'{key}, or ignore it with serve.sampling = "ignore"',
                name,
            )
    if seed is not None and not ignores:
        raise invalid("seed: training samples with the lease's seed; leave it out", "seed")
    return run


def _is_one_of(value: Any, neutral: tuple[Any, ...]) -> bool:
    return type(value) is not bool and value in neutral


def _unsupported(name: str, value: Any, neutral: tuple[Any, ...]) -> ApiError:
    """Return the error for a setting that is not supported; `neutral` are the values that are allowed."""
    text = str(value)
    text = text if len(text) <= 60 else f"{text[:57]}..."
    if name in _UNANSWERED or name in _NEUTRAL:
        fix = f"leave it out, or set it to {neutral[0]}" if neutral else "leave it out"
        return invalid(f"{name} = {text} is not supported: {fix}", name, "unsupported_value")
    text = f'{name} is an unknown parameter: leave it out, or set serve.sampling = "ignore"'
    return invalid(text, name, "unknown_parameter")
