"""Which settings of a chat request are taken, and which must be the run's.

settle   the sampling of one completion. Raises ApiError for what it cannot be
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
"""Settings that change the distribution or the completion, with their values that change nothing."""

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
"""Settings whose answer would be of another form; only these values are answered."""

_SILENT = frozenset(
    "model messages user metadata stream stream_options logprobs store service_tier "
    "parallel_tool_calls safety_identifier prompt_cache_key session_id return_token_ids".split()
)
"""Settings that are read elsewhere, or change nothing."""


class _Own(BaseModel):
    """Settings of a completion that a request may have."""

    model_config = ConfigDict(strict=True)

    temperature: Annotated[float, Field(ge=0, le=MAX_TEMPERATURE)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**31)] | None = None


def settle(given: Mapping[str, Any], run: Sampling, *, is_trained: bool, ignores: bool) -> Sampling:
    """How a completion is drawn: as the run samples, and outside training as the request says.

    `ignores`: other settings are passed over where they would be refused. Raises ApiError.
    """
    for name, neutral in _UNANSWERED.items():
        if given.get(name) is not None and not _is_one_of(given[name], neutral):
            raise _unsupported(name, given[name], neutral)
    for name in given:
        if (
            given[name] is None
            or name in _SILENT
            or name in _UNANSWERED
            or name in _Own.model_fields
        ):
            continue
        neutral = _NEUTRAL.get(name, ())
        if not _is_one_of(given[name], neutral) and not ignores:
            raise _unsupported(name, given[name], neutral)
    own = read_body(_Own, given)
    temperature = own.temperature
    if temperature and temperature < MIN_TEMPERATURE:
        raise invalid(f"temperature must be 0 or at least {MIN_TEMPERATURE:g}", "temperature")
    most, seed = own.max_completion_tokens or own.max_tokens, own.seed
    if not is_trained:
        changes = {"temperature": temperature, "max_tokens": most, "seed": seed}
        return run.model_copy(
            update={name: value for name, value in changes.items() if value is not None}
        )
    for name, value, runs, key in (
        ("temperature", temperature, run.temperature, "rollout.temperature"),
        ("max_tokens", most, run.max_tokens, "rollout.max_tokens"),
    ):
        if value is not None and value != runs and not ignores:
            raise invalid(
                f"{name} = {value:g}: training samples with {key} = {runs:g}; leave it out, set the run's "
                f'{key}, or pass it over with serve.sampling = "ignore"',
                name,
            )
    if seed is not None and not ignores:
        raise invalid("seed: training draws by the lease's own; leave it out", "seed")
    return run


def _is_one_of(value: Any, neutral: tuple[Any, ...]) -> bool:
    return type(value) is not bool and value in neutral


def _unsupported(name: str, value: Any, neutral: tuple[Any, ...]) -> ApiError:
    shown = str(value)
    shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
    if name in _UNANSWERED or name in _NEUTRAL:
        cure = f"leave it out{''.join(f', or set it to {each}' for each in neutral[:1])}"
        return invalid(f"{name} = {shown} is not supported: {cure}", name, "unsupported_value")
    text = f'{name} is not known here: leave it out, or set serve.sampling = "ignore"'
    return invalid(text, name, "unknown_parameter")
