"""The format of the Parquet files for trajectories, with one row for each step.

    COLUMNS        every column: its type, and whether a foreign file may lack it
    Trajectory     a trajectory in the form in which runs export and import it
    content_id     returns the id that a trajectory from outside has in every run
    schema         returns the files' schema for pyarrow and Hugging Face `datasets`

Screenshots are `datasets.Image` columns that include the encoded bytes. Log-probabilities and entropies are
float64, as in the database, so that an export and an import keep them bit for bit. The rows of a trajectory
are adjacent, in order of step.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from bus.errors import MissingPartError
from bus.messages import Outcome
from dart_cli.data.store.rows import PoolSource
from dart_cli.data.store.steps import StepRow

if TYPE_CHECKING:
    import pyarrow as pa

FORMAT = 1
"""Version of the format; files of a later version are refused. Raise it when a column's meaning changes."""


INSTALL = "pip install 'pyarrow>=18'"


@dataclass(frozen=True)
class Trajectory:
    """A trajectory in the form in which runs export and import it."""

    id: str
    suite: str
    task_id: str
    task_seed: int
    instruction: str  # as the policy read it; in old files with {fields} that are not filled in
    source: PoolSource
    origin: str  # the run id and trajectory that it comes from; empty if it comes from no run
    outcome: Outcome
    steps: Sequence[StepRow]
    images: Mapping[str, bytes]  # content hash -> encoded image, for all images of its prompts
    final_screenshot: bytes | None = None  # after the last action
    reward: float | None = None  # the verdict's, in [0, 1]; None if it is invalid
    verdict_reason: str = ""
    stop_reason: str = ""
    app_log: str = ""  # what the application reported, a line each

    @property
    def has_logprobs(self) -> bool:
        """True if the log-probabilities that it was sampled with are known."""
        return all(step.sampled.behaviour_logprobs for step in self.steps)


def content_id(trajectory: Trajectory) -> str:
    """Return `x` and a hash of a trajectory's content: its id in every run and at every import."""
    content = []
    for step in trajectory.steps:
        parts = [
            step.image_hashes,
            step.prompt_token_ids,
            step.sampled.token_ids,
            step.sampled.behaviour_logprobs,
            step.text,
            step.action,
        ]
        # Steps without these have the ids that they had before these existed.
        if step.sampled.patches:
            parts.append(step.sampled.patches)
        if step.more_actions:
            parts.append(step.more_actions)
        content.append(parts)
    instance = [trajectory.task_id, trajectory.task_seed]
    plain = json.dumps([instance, content], sort_keys=True, allow_nan=False)
    return f"x{blake2b(plain.encode(), digest_size=16).hexdigest()}"


# --- columns --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Column:
    """One column; `kind` is the pyarrow type of its values, or of a list's items, or `image`."""

    kind: str
    is_list: bool = False
    optional: bool = False  # a foreign file may lack it


COLUMNS: dict[str, Column] = {
    "trajectory_id": Column("string"),
    "step": Column("int32"),  # from 0
    "steps": Column("int32"),  # of the trajectory
    "suite": Column("string"),
    "task_id": Column("string"),
    "task_seed": Column("int64"),
    "instruction": Column("string", optional=True),
    "source": Column("string", optional=True),  # oracle, demonstration, teacher, online, imported
    "origin": Column("string", optional=True),
    "outcome": Column("string"),
    "reward": Column("float64", optional=True),  # in [0, 1]; if absent, 1 for pass and 0 for fail
    "verdict_reason": Column("string", optional=True),
    "stop_reason": Column("string", optional=True),
    "app_log": Column("string", optional=True),  # what the application reported, a line each
    "screenshot": Column("image"),  # before the action
    "text": Column("string"),  # the completion
    "action": Column("string", optional=True),  # JSON; null if the text is no action
    # A JSON list: the actions of the completion that were performed after it; null without.
    "more_actions": Column("string", optional=True),
    "error": Column("string", optional=True),  # why the text is no action
    "observed_text": Column("string", optional=True),  # read beside the screenshot
    "image_hashes": Column("string", is_list=True),  # the prompt's images; the last is screenshot
    "prompt_token_ids": Column("int32", is_list=True),
    "token_ids": Column("int32", is_list=True),
    "behaviour_logprobs": Column("float64", is_list=True),  # nats; empty if unknown
    "entropies": Column("float64", is_list=True, optional=True),  # nats
    # The cells that pointers have drawn, as in SampledTokens; empty without pointers.
    "patches": Column("int32", is_list=True, optional=True),
    "versions": Column("int32", is_list=True, optional=True),  # of each token, in its own run
    "model_s": Column("float64", optional=True),
    "env_s": Column("float64", optional=True),
    "step_reward": Column("float64", optional=True),  # null if the environment gave none
    "final_screenshot": Column("image", optional=True),  # in the last row of a trajectory
}
"""Name -> column, in the order of the file; a row is one step."""

OF_TRAJECTORY = (
    "suite",
    "task_id",
    "task_seed",
    "instruction",
    "source",
    "origin",
    "outcome",
    "reward",
    "verdict_reason",
    "stop_reason",
    "app_log",
)
"""Columns that are fields of a Trajectory of the same name."""
OF_STEP = (
    "step",
    "text",
    "error",
    "observed_text",
    "image_hashes",
    "prompt_token_ids",
    "model_s",
    "env_s",
)
"""Columns that are fields of a StepRow of the same name."""
OF_TOKENS = ("token_ids", "behaviour_logprobs", "entropies", "patches")
"""Columns that are fields of SampledTokens of the same name."""


def values_of(part: object, names: Sequence[str]) -> dict[str, Any]:
    """Return name -> value of these fields of an object."""
    return {name: getattr(part, name) for name in names}


def pyarrow_modules() -> tuple[Any, Any]:
    """Return the modules pyarrow and pyarrow.parquet. Raises MissingPartError if they are not installed."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise MissingPartError(f"Parquet files need pyarrow: {INSTALL}") from None
    return pa, pq


def column_type(pa: Any, column: Column) -> Any:
    """Return the column's pyarrow type."""
    if column.kind == "image":
        return pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    item = getattr(pa, column.kind)()
    return pa.list_(item) if column.is_list else item


def _feature(column: Column) -> dict[str, Any]:
    """Return the description of the column for `datasets`."""
    if column.kind == "image":
        return {"_type": "Image"}
    value = {"dtype": column.kind, "_type": "Value"}
    return {"feature": value, "_type": "Sequence"} if column.is_list else value


def schema(about: Mapping[str, Any]) -> pa.Schema:
    """Return the files' schema, with `about` in its metadata: where the files come from."""
    pa, _ = pyarrow_modules()
    features = {name: _feature(column) for name, column in COLUMNS.items()}
    return pa.schema(
        [(name, column_type(pa, column)) for name, column in COLUMNS.items()],
        metadata={
            "huggingface": json.dumps({"info": {"features": features}}),
            "dart": json.dumps({"format": FORMAT, **about}),
        },
    )
