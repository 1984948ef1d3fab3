"""The Parquet files in which trajectories leave and enter runs; one row a step.

    COLUMNS        every column: type, meaning, whether a foreign file may lack it
    Trajectory     one trajectory as it travels between runs
    content_id     the name that a trajectory from outside has in every run
    schema         the files' schema, as pyarrow and Hugging Face `datasets` read it

Screenshots are `datasets.Image` columns with the encoded bytes in them. Log-probabilities and
entropies are float64, as the database holds them, so that they return bit for bit. The rows of a
trajectory are adjacent, in order of step.
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
"""Raised by a change of the columns' meaning; files of a later one are refused."""


INSTALL = "pip install 'pyarrow>=18'"


@dataclass(frozen=True)
class Trajectory:
    """One trajectory as it travels between runs."""

    id: str
    suite: str
    task_id: str
    task_seed: int
    instruction: str  # as the policy read it; {fields} as the suite wrote them in old files
    source: PoolSource
    origin: str  # run id and trajectory where it was first; empty if nowhere
    outcome: Outcome
    steps: Sequence[StepRow]
    images: Mapping[str, bytes]  # by content hash: every image of its prompts
    final_screenshot: bytes | None = None  # after the last action
    reward: float | None = None  # the verdict's, in [0, 1]; None of an invalid one
    verdict_reason: str = ""
    stop_reason: str = ""

    @property
    def known(self) -> bool:
        """Whether the log-probabilities it was sampled with are known."""
        return all(step.sampled.behaviour_logprobs for step in self.steps)


def content_id(trajectory: Trajectory) -> str:
    """`x` and a hash of a trajectory's content: the same in every run and at every import."""
    content = [
        [
            step.image_hashes,
            step.prompt_token_ids,
            step.sampled.token_ids,
            step.sampled.behaviour_logprobs,
            step.text,
            step.action,
            *(
                [step.sampled.patches] if step.sampled.patches else []
            ),  # older ids stay as they were
        ]
        for step in trajectory.steps
    ]
    instance = [trajectory.task_id, trajectory.task_seed]
    plain = json.dumps([instance, content], sort_keys=True, allow_nan=False)
    return f"x{blake2b(plain.encode(), digest_size=16).hexdigest()}"


# --- columns --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Column:
    """One column; `kind` is a name of pyarrow's, of its items in a list, or `image`."""

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
    "source": Column("string", optional=True),  # oracle, demonstration, online, imported
    "origin": Column("string", optional=True),
    "outcome": Column("string"),
    "reward": Column("float64", optional=True),  # in [0, 1]; lacking: 1 for pass, 0 for fail
    "verdict_reason": Column("string", optional=True),
    "stop_reason": Column("string", optional=True),
    "screenshot": Column("image"),  # before the action
    "text": Column("string"),  # the completion
    "action": Column("string", optional=True),  # JSON; null where the text is no action
    "error": Column("string", optional=True),  # why it is none
    "observed_text": Column("string", optional=True),  # read beside the screenshot
    "image_hashes": Column("string", is_list=True),  # the prompt's images, this screen the last
    "prompt_token_ids": Column("int32", is_list=True),
    "token_ids": Column("int32", is_list=True),
    "behaviour_logprobs": Column("float64", is_list=True),  # nats; empty where unknown
    "entropies": Column("float64", is_list=True, optional=True),  # nats
    "patches": Column("int32", is_list=True, optional=True),  # that pointers drew; empty without
    "versions": Column("int32", is_list=True, optional=True),  # weights of each token, there
    "model_s": Column("float64", optional=True),
    "env_s": Column("float64", optional=True),
    "step_reward": Column("float64", optional=True),  # null where the environment gave none
    "final_screenshot": Column("image", optional=True),  # in the last row of a trajectory
}
"""In the order of the file; a row is one step."""

OF_TRAJECTORY = (
    *("suite", "task_id", "task_seed", "instruction", "source", "origin"),
    *("outcome", "reward", "verdict_reason", "stop_reason"),
)
OF_STEP = (
    *("step", "text", "error", "observed_text", "image_hashes", "prompt_token_ids"),
    *("model_s", "env_s"),
)
OF_TOKENS = ("token_ids", "behaviour_logprobs", "entropies", "patches")
"""Columns that are fields of the same name of a Trajectory, a StepRow, its SampledTokens."""


def values_of(part: object, names: Sequence[str]) -> dict[str, Any]:
    """Return the fields of those names."""
    return {name: getattr(part, name) for name in names}


def pyarrow_modules() -> tuple[Any, Any]:
    """Arrow and its Parquet part. Raises MissingPartError."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise MissingPartError(f"Parquet files need pyarrow: {INSTALL}") from None
    return pa, pq


def column_type(pa: Any, column: Column) -> Any:
    """Return the column's type, as pyarrow's."""
    if column.kind == "image":
        return pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    item = getattr(pa, column.kind)()
    return pa.list_(item) if column.is_list else item


def _feature(column: Column) -> dict[str, Any]:
    """Return the column as `datasets` describes it."""
    if column.kind == "image":
        return {"_type": "Image"}
    value = {"dtype": column.kind, "_type": "Value"}
    return {"feature": value, "_type": "Sequence"} if column.is_list else value


def schema(about: Mapping[str, Any]) -> pa.Schema:
    """Return the files' schema; `about` notes where they come from, for their readers."""
    pa, _ = pyarrow_modules()
    features = {name: _feature(column) for name, column in COLUMNS.items()}
    return pa.schema(
        [(name, column_type(pa, column)) for name, column in COLUMNS.items()],
        metadata={
            "huggingface": json.dumps({"info": {"features": features}}),
            "dart": json.dumps({"format": FORMAT, **about}),
        },
    )
