"""What a batch is made of, beside the choice of its groups (curate).

finished_group   a live group as curate sees it
told_drops       why there is no batch yet: groups that were dropped since the last one
staleness_of     a batch's tokens by how far they are behind the trainer
check_size       whether it can be sent
"""

from __future__ import annotations

from collections import Counter

from bus.codec import encode
from bus.errors import ConfigError, OversizeError
from bus.messages import Batch, BatchReply
from dart_cli.data.curate import FinishedGroup, Member
from dart_cli.data.groups import Group

TELLING_DROPS = 32
"""Groups dropped for one reason, with no batch between them, after which it is no accident."""


def finished_group(group: Group) -> FinishedGroup:
    """The group as curate sees it."""
    members = tuple(
        Member(
            attempt.id,
            attempt.outcome,
            attempt.steps,
            attempt.oldest_version,
            tuple(attempt.entropies[step] for step in range(attempt.steps)),
        )
        for attempt in group.finished
        if attempt.outcome is not None
    )
    row = group.pool_member
    pool = None if row is None else Member(row.trajectory_id, "pass", row.steps, None)
    return FinishedGroup(group.id, members, pool)


def told_drops(dropped: Counter[str]) -> str:
    """The groups dropped since the last batch, by reason; empty if there are none."""
    if not dropped:
        return ""
    counts = ", ".join(f"{count} {reason}" for reason, count in dropped.most_common())
    cure = {
        "all_success": "; the policy solves these tasks, add harder ones",
        "all_fail": "; the policy never solves these tasks, add easier ones",
    }
    [(most, number)] = dropped.most_common(1)
    hint = cure.get(most, "") if number >= TELLING_DROPS else ""
    return f"; dropped since the last batch: {counts}{hint}"


def staleness_of(batch: Batch, trainer_version: int) -> dict[int, int]:
    """Tokens of the batch by how many versions behind the trainer they were sampled.

    Those of the pool have no spans and do not count.
    """
    tokens: dict[int, int] = {}
    for sample in batch.samples:
        for span in sample.sampled.version_spans:
            behind = max(trainer_version - span.version, 0)
            tokens[behind] = tokens.get(behind, 0) + span.end - span.start
    return tokens


def check_size(batch: Batch, *, is_filed: bool) -> None:
    """Raise ConfigError if the batch is larger than a message may be."""
    try:
        encode(BatchReply.model_construct(batch=batch, retry_after_s=0.0, reason=""))
    except OversizeError as error:
        groups = len(batch.group_ids)
        if is_filed:
            cure = "it is filed already: choose another run.dir, with a lower data.groups_per_batch"
        elif groups > 1:
            cure = f"lower data.groups_per_batch, now {groups}, and start dart data and train again"
        else:
            cure = "choose another run.dir, with a lower data.group_size or smaller screenshots"
        raise ConfigError(
            f"batch {batch.batch_id} of {groups} groups, {len(batch.samples)} steps and "
            f"{len(batch.images)} screenshots cannot be sent to the trainer: {error}; {cure}"
        ) from None
