"""Answers of the endpoint as JSON: completions in OpenAI's form, with dart's own fields under `dart`.

completion_json   returns the answer to a chat request
as_events         returns that answer as a stream of server-sent events: one chunk with the whole text
session_json      returns a session
models_json       returns the list of models, which has one
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from bus.messages import Completion
from dart_cli.serve.requests import ChatRequest
from dart_cli.serve.session import Answer, Session

MODEL = "dart"
"""The name of the model. A request for `dart:TASK` also names the task of the session that it opens."""


def completion_json(
    session: Session, request: ChatRequest, answer: Answer, action_language: Mapping[str, str | int]
) -> dict[str, Any]:
    """Return a chat completion; `action_language` describes how actions are written in its text."""
    completion, terms = answer.completion, session.terms
    tokens = completion.sampled.token_ids
    prompt_tokens = len(completion.prompt_token_ids)
    token_fields = {"token_ids": tokens} if request.token_ids else {}
    prompt = {"prompt_token_ids": list(completion.prompt_token_ids)} if request.token_ids else {}
    return {
        "id": f"chatcmpl-{terms.trajectory_id}-{answer.step}",
        "object": "chat.completion",
        "created": answer.created,
        "model": request.model,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": completion.text},
                "finish_reason": _finish_reason(completion),
                "logprobs": _logprobs(completion) if request.logprobs else None,
                **token_fields,
            }
        ],
        **prompt,
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": len(tokens),
            "total_tokens": prompt_tokens + len(tokens),
        },
        "dart": {
            "session": terms.id,
            "trajectory_id": terms.trajectory_id,
            "task": terms.task_id,
            "step": answer.step,
            "steps_left": terms.max_steps - answer.step - 1,
            "token_ids": tokens,
            "versions": [
                [span.version, span.start, span.end] for span in completion.sampled.version_spans
            ],
            "worker": completion.worker,
            **action_language,
        },
    }


def as_events(answer: Mapping[str, Any], *, with_usage: bool) -> str:
    """Return a chat completion as server-sent events."""
    return "".join(f"data: {chunk}\n\n" for chunk in (*_chunks(answer, with_usage), "[DONE]"))


def _chunks(answer: Mapping[str, Any], with_usage: bool) -> Iterator[str]:
    [choice] = answer["choices"]
    same = {key: answer[key] for key in ("id", "created", "model")}
    same |= {"object": "chat.completion.chunk", "dart": answer["dart"]}
    whole = {**choice, "delta": choice["message"], "finish_reason": None}
    last = {"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}
    del whole["message"]
    for choice_chunk in (whole, last):
        yield json.dumps({**same, "choices": [choice_chunk]})
    if with_usage:
        yield json.dumps({**same, "choices": [], "usage": answer["usage"]})


def session_json(session: Session) -> dict[str, Any]:
    """Return the fields of a session for its agent."""
    terms = session.terms
    return {
        "object": "session",
        "id": terms.id,
        "trajectory_id": terms.trajectory_id,
        "group_id": terms.lease.group_id if terms.lease else "",
        "task": terms.task_id,
        "seed": terms.task_seed,
        "instruction": terms.instruction,
        "max_steps": terms.max_steps,
        "steps": session.steps,
        "train": terms.lease is not None,
        "state": session.state,
        "temperature": terms.sampling.temperature,
        "max_tokens": terms.sampling.max_tokens,
    }


def models_json(action_language: Mapping[str, str | int]) -> dict[str, Any]:
    """Return the list of models, which holds the one model."""
    return {"object": "list", "data": [model_json(action_language)]}


def model_json(action_language: Mapping[str, str | int]) -> dict[str, Any]:
    """Return the one model, with the action language that it writes."""
    own = {"dart": dict(action_language)} if action_language else {}
    return {"id": MODEL, "object": "model", "created": 0, "owned_by": "dart", **own}


def _finish_reason(completion: Completion) -> str:
    return "length" if completion.stop == "length" else "stop"


def _logprobs(completion: Completion) -> dict[str, Any]:
    """Return the log-probabilities, with tokens by id as in vLLM: this process has no vocabulary."""
    sampled = completion.sampled
    pairs = zip(sampled.token_ids, sampled.behaviour_logprobs, strict=True)
    return {
        "content": [
            {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
            for token, logprob in pairs
        ],
        "refusal": None,
    }
