"""Pages of single groups and trajectories, and the long lists of them.

groups, group               a page each
trajectories, trajectory    a page each
group_rows, with_groups     the rows of a list of either
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from bus.errors import UserError
from bus.messages import Outcome
from dart_cli.data.store.reader import Reader
from dart_cli.data.store.rows import GroupRow, GroupState, TrajectoryRow
from dart_cli.inspection.explain import explain_trajectory
from dart_cli.inspection.find import find_subject
from dart_cli.inspection.ls import CANCELLED, STATES
from dart_cli.view import film
from dart_cli.view.header import Values, header
from dart_cli.view.query import ROWS, Query, page_of
from dart_cli.view.site import Site

GROUP_STATES: tuple[GroupState, ...] = get_args(GroupState)
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
_ASKED = ("outcome", "state", "reason", "version")

# --- groups ---------------------------------------------------------------------------------


def groups(reader: Reader, site: Site, query: Query) -> Values:
    """Groups, the newest first; by task and state."""
    state = query.one_of("state", GROUP_STATES)
    task_id = query.one_of("task", _task_ids(reader))
    page = page_of(query, reader.count_groups(state=state, task_id=task_id))
    rows = reader.newest_groups(state=state, task_id=task_id, limit=ROWS, offset=page.offset)
    return header(reader, site, query, is_list=True) | {
        "rows": group_rows(reader, rows),
        "page": page,
        "asked": {"state": state, "task": task_id},
        "choices": {"task": _task_ids(reader), "state": GROUP_STATES},
    }


def group(reader: Reader, site: Site, query: Query, name: str) -> Values:
    """One group and its members side by side. Raises UserError for an unknown group."""
    row = reader.groups_by_id([name]).get(name)
    if row is None:
        newest = reader.newest_group()
        cure = (
            f"its groups go from g000001 to g{newest:06d}" if newest else "no group was opened yet"
        )
        raise UserError(f"no group {name} in this run; {cure}")
    members = reader.trajectories(group_ids=[name])
    finals = [member.final_screenshot for member in members if member.final_screenshot]
    return header(reader, site, query, live=row.state in ("open", "ready", "batched")) | {
        "row": row,
        "members": members,
        "screens": film.screens(reader, site, finals),
        "instruction": reader.instruction(row.suite, row.task_id, [m.id for m in members]),
    }


def group_rows(reader: Reader, rows: Sequence[GroupRow]) -> list[Values]:
    """Groups with the verdicts of their members."""
    members: dict[str, list[TrajectoryRow]] = {row.id: [] for row in rows}
    for member in reader.trajectories(group_ids=list(members)):
        members[member.group_id].append(member)
    return [{"row": row, "members": members[row.id]} for row in rows]


# --- trajectories ---------------------------------------------------------------------------


def trajectories(reader: Reader, site: Site, query: Query) -> Values:
    """Trajectories, the newest first; by task, verdict, state, reason and version.

    Cancelled ones only where a verdict, state or reason asks for them.
    """
    counters = reader.counters()
    reasons = sorted({row.reason for row in counters if row.reason})
    task_ids = sorted({row.task_id for row in counters})
    wanted: Values = {
        "task_id": query.one_of("task", task_ids),
        "outcome": query.one_of("outcome", OUTCOMES),
        "state": query.one_of("state", STATES),
        "reason": query.one_of("reason", reasons),
        "version": query.whole("version"),
    }
    left_out = 0
    if not (wanted["outcome"] or wanted["state"] or wanted["reason"]):
        left_out = reader.count_trajectories(**wanted | {"reason": CANCELLED})
        wanted["but_reason"] = CANCELLED
    page = page_of(query, reader.count_trajectories(**wanted))
    rows = reader.trajectories(**wanted, limit=ROWS, offset=page.offset)
    return header(reader, site, query, is_list=True) | {
        "rows": with_groups(reader, rows[::-1]),
        "page": page,
        "left_out": left_out,
        "asked": {"task": wanted["task_id"], **{k: wanted[k] for k in _ASKED}},
        "choices": {"task": task_ids, "outcome": OUTCOMES, "state": STATES, "reason": reasons},
    }


def trajectory(reader: Reader, site: Site, query: Query, name: str) -> Values:
    """One trajectory as a filmstrip, with its history in the run.

    Raises UserError, which names the nearest id, for an unknown trajectory.
    """
    subject = find_subject(reader, name)
    row, group = subject.trajectory, subject.group
    members = [] if group is None else [m.id for m in reader.trajectories(group_ids=[group.id])]
    place = members.index(subject.id) if subject.id in members else -1
    live = row is not None and row.state not in ("trained", "dropped")
    samples = reader.sample_rows(subject.id)
    frames = film.frames(reader, site, reader.steps(subject.id), samples)
    return header(reader, site, query, live=live) | {
        "subject": subject,
        "row": row,
        "group": group,
        "before": members[place - 1] if place > 0 else None,
        "after": members[place + 1] if 0 <= place < len(members) - 1 else None,
        "instruction": reader.instruction(subject.suite, subject.task_id, [subject.id]),
        "frames": frames,
        "credited": film.credited(frames),
        "final": film.final_screen(reader, site, row),
        "judgements": reader.judgements(subject.id),
        "story": explain_trajectory(reader, subject),
    }


def with_groups(reader: Reader, rows: Sequence[TrajectoryRow]) -> list[Values]:
    """Trajectories with their groups; a group is stored before its members."""
    found = reader.groups_by_id(row.group_id for row in rows)
    return [{"row": row, "group": found[row.group_id]} for row in rows]


def _task_ids(reader: Reader) -> list[str]:
    return sorted({task_id for _, task_id in reader.instructions()})
