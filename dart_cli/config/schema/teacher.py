"""The teacher, who plays training tasks or scores the policy's tokens: section [teacher]."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from bus.temperatures import MAX_TEMPERATURE
from dart_cli.config.schema.base import (
    MANY,
    MOST_SLOTS,
    MOST_TOKENS,
    Count,
    PositiveSeconds,
    Section,
    one_of,
    without_control,
)
from dart_cli.config.schema.model_policy import PolicyConfig
from dart_cli.config.schema.rollout import MODEL_ENGINES


class TeacherConfig(Section):
    """A better model that plays training tasks, for the policy to learn from its successes (docs/teacher.md)."""

    model: Annotated[str, AfterValidator(without_control)] = ""
    """A model folder of any family, which plays in this process, with `model.dtype`, `rollout.device`,
    `rollout.max_batch` and [vllm]. With `url` it may be empty: of a folder only the family and the sizes of
    screens are then used."""

    hints: bool = False
    """With `train.teacher_weight`: whether the teacher's prompt names the next step of the environment's own
    solution at every step. Without `model` the teacher is then `model.path` itself, as the run began with it
    (self-distillation). Steps from which the environment knows no way to the goal have no teacher.
    `dart data collect` has `--hints` instead."""

    url: str = ""
    """Base URL, up to the version, of an OpenAI-compatible chat API that takes images, e.g.
    `http://localhost:8000/v1`. The model behind it then plays, and not `model`."""

    name: str = ""
    """With `url`: the model's name at the server."""

    key_env: str = ""
    """With `url`: name of the environment variable that has the API key, which is stored nowhere. If empty,
    OPENAI_API_KEY is used where it is set."""

    engine: Annotated[str, one_of(MODEL_ENGINES, "my_package.my_module:MyEngine")] = "transformers"
    """Without `url`: what runs the folder, as `rollout.engine`."""

    policy: PolicyConfig | None = None
    """How the teacher is prompted and what it writes: the keys of [policy]. Here an unset `family` is `auto`,
    which needs `model`."""

    temperature: float | None = Field(default=None, ge=0, le=MAX_TEMPERATURE)
    """Sampling temperature; 0 is greedy. If unset, a server chooses, and a folder plays greedily."""

    max_tokens: int = Field(default=1024, ge=1, le=MOST_TOKENS)
    """Largest length of an answer, tokens, its thought included."""

    keep_thoughts: bool = False
    """Whether the policy learns the teacher's thoughts, and not only its actions. They count towards
    `rollout.max_tokens`."""

    concurrent: int = Field(default=8, ge=1, le=MOST_SLOTS)
    """With `url`: largest number of requests at a time."""

    answer_s: PositiveSeconds = 120.0
    """With `url`: seconds that a request may take. It is repeated up to three times, with pauses."""

    budget_requests: Count = 0
    """With `url`: largest number of requests, over all starts; 0 for no limit. Requests that are under way
    when it is spent are still answered."""

    budget_tokens: int = Field(default=0, ge=0, le=MANY * MANY)
    """With `url`: largest number of tokens, of prompts and answers, over all starts; 0 for no limit."""

    price_prompt: float = Field(default=0.0, ge=0, le=MANY)
    """Price of a million tokens of prompts, in any currency. It is only used to show the cost."""

    price_answer: float = Field(default=0.0, ge=0, le=MANY)
    """Price of a million tokens of answers."""

    @property
    def is_set(self) -> bool:
        """Whether there is a teacher of its own weights."""
        return bool(self.model or self.url)

    @property
    def title(self) -> str:
        """What the teacher is called: its name at the server, or its folder."""
        return self.name if self.url else self.model
