"""Files steps, screenshots and successes from outside the run; removes old screenshots.

StepWriter   steps, screenshots by content, members of the experience pool
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import isfinite
from pathlib import Path

from pydantic_core import from_json, to_json

from bus.errors import ProtocolError, StoreError
from bus.messages import (
    StepRecord,
    VersionSpan,
)
from dart_cli.data.store.connection import marks
from dart_cli.data.store.encoding import (
    in_range,
    pack_floats,
    pack_ids,
    pack_maps,
    pack_prompt,
    pack_spans,
    span_versions,
)
from dart_cli.data.store.rows import (
    PoolRow,
    StepRow,
)
from dart_cli.data.store.transactions import Transactions
from dart_cli.policy.pointer.tokens import patch_mistake
from envs.base import content_hash, image_type

_MAX_NUMBERS = 4096
_ALWAYS = 2**62
"""In place of the newest group that shows a screenshot: members of the pool do."""


class StepWriter(Transactions):
    """Files steps once, and each screenshot once for all steps that show it."""

    def __init__(self, path: Path, lock: int) -> None:
        super().__init__(path, lock)
        self._group_numbers: dict[str, int] = {}  # of trajectories in play, by id; a cache

    def add_step(self, record: StepRecord, at: float) -> bool:
        """File one step and its images; False if that step is filed already."""
        screenshot = record.image_hashes[-1]
        if not self._add_step(record, at, screenshot, record.sampled.version_spans):
            return False
        group = self._group_number(record.trajectory_id)
        self._add_screenshot(group, screenshot, record.media_type, record.screenshot)
        for image in record.images:
            self._add_screenshot(group, content_hash(image), media_type(image), image)
        return True

    def _add_step(
        self, step: StepRecord | StepRow, at: float, screenshot: str, spans: Sequence[VersionSpan]
    ) -> bool:
        """File one step; False if it is filed already."""
        added = self._write(
            "INSERT OR IGNORE INTO steps (trajectory_id, step, at, screenshot, image_hashes, "
            "prompt_token_ids, token_ids, behaviour_logprobs, entropies, version_spans, text, action, "
            "error, model_s, env_s, worker, instruction, reward, observed_text, screen_key, patches, "
            "pointed) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                step.trajectory_id,
                step.step,
                at,
                screenshot,
                _json(step.image_hashes),
                pack_prompt(step.prompt_token_ids),
                pack_ids(step.sampled.token_ids),
                pack_floats(step.sampled.behaviour_logprobs),
                pack_floats(step.sampled.entropies),
                pack_spans(spans),
                step.text,
                None if step.action is None else _json(step.action),
                step.error,
                step.model_s,
                step.env_s,
                step.worker,
                step.instruction,
                step.reward,
                step.observed_text,
                step.screen_key,
                pack_ids(step.sampled.patches),
                pack_maps(step.pointed),
            ),
        )
        return added > 0

    def _add_screenshot(self, group: int, key: str, media_type: str, image: bytes) -> None:
        """Keep an encoded image under its content hash, once, and note the group that shows it."""
        self._write(
            "INSERT OR IGNORE INTO screenshots (hash, media_type, bytes) VALUES (?, ?, ?)",
            (key, media_type, image),
        )
        self._write(
            "INSERT INTO screenshot_uses VALUES (?, ?) "
            "ON CONFLICT (hash) DO UPDATE SET group_number = excluded.group_number "
            "WHERE group_number < excluded.group_number",
            (key, group),
        )

    def _group_number(self, trajectory_id: str) -> int:
        """Of the trajectory's group. Raises StoreError for a trajectory that was never leased."""
        number = self._group_numbers.get(trajectory_id)
        if number is None:
            rows = self._rows(
                "SELECT g.number FROM trajectories t JOIN groups g ON g.id = t.group_id "
                "WHERE t.id = ?",
                (trajectory_id,),
            )
            if not rows:
                raise StoreError(f"{self.path}: no trajectory {trajectory_id}")
            if len(self._group_numbers) >= _MAX_NUMBERS:
                self._group_numbers.clear()
            number = self._group_numbers[trajectory_id] = rows[0]["number"]
        return number

    def remove_screenshots(self, before_group: int, limit: int) -> int:
        """Remove up to `limit` screenshots that no group from `before_group` on shows; how many.

        The oldest go first. Their place in the file is used again.
        """
        gone = [
            (row["hash"],)
            for row in self._rows(
                "SELECT hash FROM screenshot_uses WHERE group_number < ? "
                "ORDER BY group_number LIMIT ?",
                (before_group, limit),
            )
        ]
        for table in ("screenshots", "screenshot_uses"):
            self._write_many(f"DELETE FROM {table} WHERE hash = ?", gone)  # noqa: S608
        return len(gone)

    def add_pool_member(
        self, row: PoolRow, steps: Sequence[StepRow], screenshots: Mapping[str, bytes]
    ) -> bool:
        """File a success from outside the run; False, and nothing changes, if it is filed already.

        Its id is `x` and a hash of its content. `screenshots`: content hash -> encoded image, of
        those that are not in the database yet. Weights of another run mean nothing in this one, so
        version spans are left out, and log-probabilities where they are not `known`. How many
        members a task may have is decided by dart_cli.data.pool, at the next start.

        Raises ProtocolError if its parts do not fit together: what is filed is trained on.
        """
        _check_member(row, steps)
        for key, image in screenshots.items():
            if content_hash(image) != key:
                raise ProtocolError(f"{row.trajectory_id}: image {key} has other content")
        if self.pool_member(row.trajectory_id) is not None:
            return False
        shown = {name for step in steps for name in step.image_hashes} - screenshots.keys()
        if unknown := len(shown) - self._known_images(shown):
            raise ProtocolError(f"{row.trajectory_id}: {unknown} prompt images are unknown")
        for key, image in screenshots.items():
            self._add_screenshot(0, key, media_type(image), image)
        for step in steps:
            self._add_step(
                step
                if row.known
                else replace(
                    step, sampled=step.sampled.model_copy(update={"behaviour_logprobs": []})
                ),
                step.at,
                step.screenshot,
                [],
            )
        return self.join_pool(row)

    def pool_folder(self, folder: str) -> str:
        """Fingerprint that the folder had when it was imported; empty if it was not."""
        rows = self._rows("SELECT fingerprint FROM pool_folders WHERE folder = ?", (folder,))
        return str(rows[0]["fingerprint"]) if rows else ""

    def save_pool_folder(self, folder: str, fingerprint: str) -> None:
        """Note that the folder was imported whole."""
        self._write("INSERT OR REPLACE INTO pool_folders VALUES (?, ?)", (folder, fingerprint))

    def join_pool(self, row: PoolRow) -> bool:
        """A success whose steps are filed joins the pool; False if it is in it already.

        Its screenshots stay until it is evicted.
        """
        values = vars(row)
        added = self._write(
            f"INSERT OR IGNORE INTO pool ({','.join(values)}) VALUES ({marks(list(values))})",  # noqa: S608
            list(values.values()),
        )
        if not added:
            return False
        self._write(
            "INSERT OR IGNORE INTO pool_images SELECT s.trajectory_id, images.value "
            "FROM steps s, json_each(s.image_hashes) AS images WHERE s.trajectory_id = ?",
            (row.trajectory_id,),
        )
        self._write(
            "UPDATE screenshot_uses SET group_number = ? "
            "WHERE hash IN (SELECT hash FROM pool_images WHERE trajectory_id = ?)",
            (_ALWAYS, row.trajectory_id),
        )
        return True

    def evict_from_pool(self, trajectory_id: str, at: float) -> None:
        """The member is drawn no more; groups that are open now may still need its screenshots."""
        self._write(
            "UPDATE pool SET evicted_at = ? WHERE trajectory_id = ?",
            (at, trajectory_id),
        )
        self._write(
            "UPDATE screenshot_uses SET group_number = ? WHERE hash IN ("
            "SELECT hash FROM pool_images WHERE trajectory_id = ?) AND NOT EXISTS ("
            "SELECT 1 FROM pool_images p WHERE p.hash = screenshot_uses.hash "
            "AND p.trajectory_id <> ?)",
            (self.newest_group(), trajectory_id, trajectory_id),
        )
        self._write("DELETE FROM pool_images WHERE trajectory_id = ?", (trajectory_id,))

    def draw_from_pool(self, group_id: str, trajectory_id: str) -> None:
        """The member of the pool joins the group."""
        self._write("UPDATE groups SET pool_member = ? WHERE id = ?", (trajectory_id, group_id))

    def versions_sampled(self, trajectory_id: str) -> set[int]:
        """The weights that sampled the trajectory's tokens."""
        rows = self._rows(
            "SELECT version_spans FROM steps WHERE trajectory_id = ?", (trajectory_id,)
        )
        return {version for row in rows for version in span_versions(row["version_spans"])}

    def missing_parts(self, trajectory_id: str, steps: int) -> str:
        """What the trajectory lacks of `steps` steps and their images; empty if nothing."""
        rows = self._rows(
            "SELECT step, image_hashes FROM steps WHERE trajectory_id = ? ORDER BY step",
            (trajectory_id,),
        )
        if len(rows) != steps or (rows and (rows[0]["step"], rows[-1]["step"]) != (0, steps - 1)):
            return f"{len(rows)} of {steps} steps were handed in"
        hashes = {name for row in rows for name in from_json(row["image_hashes"])}
        unknown = len(hashes) - self._known_images(hashes)
        return f"{unknown} prompt images are unknown" if unknown else ""

    def _known_images(self, hashes: Iterable[str]) -> int:
        """How many of the images are in the database."""
        rows = self._rows(
            "SELECT COUNT(*) AS number FROM screenshots "
            "WHERE hash IN (SELECT value FROM json_each(?))",
            (json.dumps(sorted(hashes)),),
        )
        return int(rows[0]["number"])


def _check_member(row: PoolRow, steps: Sequence[StepRow]) -> None:
    """Raise ProtocolError if a member from outside the run cannot be trained on."""
    name = row.trajectory_id
    if not name.startswith("x"):
        raise ProtocolError(f"{name}: the id of a trajectory from outside begins with x")
    if not steps or [step.step for step in steps] != list(range(row.steps)):
        raise ProtocolError(f"{name}: {len(steps)} steps, must be {row.steps}, numbered from 0")
    for step in steps:
        where = f"step {step.step} of {name}"
        if step.trajectory_id != name:
            raise ProtocolError(f"{where}: belongs to {step.trajectory_id}")
        if not step.sampled.token_ids or not step.prompt_token_ids:
            raise ProtocolError(f"{where}: prompt_token_ids and token_ids must not be empty")
        if not in_range(step.sampled.token_ids) or not in_range(step.prompt_token_ids):
            raise ProtocolError(f"{where}: token ids must be in [0, 2 ** 31)")
        logprobs = step.sampled.behaviour_logprobs
        if row.known and (
            len(logprobs) != len(step.sampled.token_ids) or not all(map(isfinite, logprobs))
        ):
            raise ProtocolError(f"{where}: behaviour_logprobs must be finite, one for each token")
        sampled = step.sampled
        if mistake := patch_mistake(
            sampled.token_ids, sampled.patches, logprobs if row.known else [], sampled.entropies
        ):
            raise ProtocolError(f"{where}: {mistake}")
        if step.sampled.entropies and not all(map(isfinite, step.sampled.entropies)):
            raise ProtocolError(f"{where}: entropies must be finite")
        if not step.image_hashes or step.image_hashes[-1] != step.screenshot:
            raise ProtocolError(f"{where}: the last of image_hashes must be the screenshot's")


def _json(value: object) -> str:
    """As json.dumps, at a quarter of its time."""
    return to_json(value).decode()


def media_type(image: bytes) -> str:
    """Of an encoded screenshot, by its first bytes."""
    return image_type(image) or "application/octet-stream"
