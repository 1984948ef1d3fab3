"""The database's schema, as a list of named steps that are never edited once released.

A new version of dart appends a step; an older database is brought up to date when `dart data`
opens it, each step in a transaction of its own. A database that has had a step this dart does not
know is refused. Moments are unix seconds, durations seconds, log-probabilities nats.
"""

from __future__ import annotations

import contextlib
import json

from sqlite_utils import Database
from sqlite_utils.migrations import Migrations

APPLICATION_ID = 0x44415254
"""Marks the file as dart's ("DART"), so that no other program's database is written to."""

MIGRATIONS = Migrations("dart")

_LEDGER = """
CREATE TABLE runs (
    id TEXT PRIMARY KEY,
    created_at REAL NOT NULL,
    seed INTEGER NOT NULL,
    config TEXT NOT NULL,                -- JSON, of the newest start
    active_s REAL NOT NULL DEFAULT 0     -- time `dart data` has served, over all starts
);
CREATE TABLE tasks (
    suite TEXT NOT NULL,
    task_id TEXT NOT NULL,
    instruction TEXT NOT NULL,
    tier INTEGER NOT NULL,
    split TEXT NOT NULL,
    max_steps INTEGER NOT NULL,
    PRIMARY KEY (suite, task_id)
);
CREATE TABLE groups (
    id TEXT PRIMARY KEY,
    number INTEGER NOT NULL UNIQUE,      -- order of opening, from 1
    suite TEXT NOT NULL,
    task_id TEXT NOT NULL,
    task_seed INTEGER NOT NULL,
    size INTEGER NOT NULL,               -- trajectories wanted
    state TEXT NOT NULL,                 -- open, ready, batched, trained, dropped
    reason TEXT NOT NULL DEFAULT '',     -- why dropped
    opened_at REAL NOT NULL,
    closed_at REAL,
    batch_id INTEGER
);
CREATE INDEX groups_by_state ON groups (state);
CREATE TABLE trajectories (
    id TEXT PRIMARY KEY,
    group_id TEXT NOT NULL REFERENCES groups (id),
    attempt INTEGER NOT NULL,            -- from 0, within the group
    state TEXT NOT NULL,                 -- leased, playing, finished, batched, trained, dropped
    reason TEXT NOT NULL DEFAULT '',     -- why dropped
    worker TEXT NOT NULL,
    slot INTEGER NOT NULL,
    sampling_seed INTEGER NOT NULL,
    leased_at REAL NOT NULL,
    ended_at REAL,
    outcome TEXT,                        -- pass, fail, invalid
    verdict_reason TEXT,
    stop_reason TEXT,
    steps INTEGER,
    oldest_version INTEGER,              -- of the weights that sampled its tokens
    newest_version INTEGER,
    final_screenshot TEXT,
    reset_s REAL,
    wall_s REAL,
    batch_id INTEGER
);
CREATE INDEX trajectories_by_group ON trajectories (group_id);
CREATE INDEX trajectories_by_state ON trajectories (state, reason);
CREATE TABLE steps (
    trajectory_id TEXT NOT NULL REFERENCES trajectories (id),
    step INTEGER NOT NULL,               -- from 0
    at REAL NOT NULL,
    screenshot TEXT NOT NULL,            -- key of screenshots: the screen before the action
    image_hashes TEXT NOT NULL,          -- JSON list: the prompt's images, the last is screenshot
    prompt_token_ids BLOB NOT NULL,      -- see dart_cli/data/store/encoding.py for the four blobs
    token_ids BLOB NOT NULL,
    behaviour_logprobs BLOB NOT NULL,
    entropies BLOB NOT NULL,
    version_spans BLOB NOT NULL,
    text TEXT NOT NULL,
    action TEXT,                         -- JSON; NULL where the text is no action
    error TEXT NOT NULL,
    model_s REAL NOT NULL,
    env_s REAL NOT NULL,
    PRIMARY KEY (trajectory_id, step)
);
CREATE TABLE screenshots (
    hash TEXT PRIMARY KEY,               -- envs.base.content_hash
    media_type TEXT NOT NULL,
    bytes BLOB NOT NULL
);
CREATE TABLE batches (
    id INTEGER PRIMARY KEY,              -- from 1, in the order of training
    state TEXT NOT NULL,                 -- batched, trained
    formed_at REAL NOT NULL,
    formed_version INTEGER NOT NULL,     -- the trainer's when it asked
    temperature REAL NOT NULL,
    reward REAL NOT NULL,                -- mean over its trajectories
    trained_at REAL,
    trained_version INTEGER              -- the trainer's after the update
);
CREATE TABLE batch_samples (
    batch_id INTEGER NOT NULL REFERENCES batches (id),
    position INTEGER NOT NULL,
    trajectory_id TEXT NOT NULL,
    step INTEGER NOT NULL,
    advantage REAL NOT NULL,
    weight REAL NOT NULL,
    PRIMARY KEY (batch_id, position)
) WITHOUT ROWID;
CREATE TABLE staleness (
    batch_id INTEGER NOT NULL REFERENCES batches (id),
    versions_behind INTEGER NOT NULL,
    tokens INTEGER NOT NULL,
    PRIMARY KEY (batch_id, versions_behind)
) WITHOUT ROWID;
CREATE TABLE versions (
    policy_version INTEGER PRIMARY KEY,
    path TEXT NOT NULL,
    digest TEXT NOT NULL,
    published_at REAL NOT NULL
);
CREATE TABLE decisions (
    id INTEGER PRIMARY KEY,
    at REAL NOT NULL,
    subject TEXT NOT NULL,               -- id of a group or a trajectory
    used INTEGER NOT NULL,               -- 1 trained on, 0 dropped
    reason TEXT NOT NULL,
    weight REAL NOT NULL,
    batch_id INTEGER
);
CREATE INDEX decisions_by_subject ON decisions (subject);
CREATE TABLE metrics (
    name TEXT NOT NULL,
    step INTEGER NOT NULL,               -- batch id
    at REAL NOT NULL,
    value REAL NOT NULL,
    PRIMARY KEY (name, step)
) WITHOUT ROWID;
CREATE TABLE processes (
    worker TEXT PRIMARY KEY,
    role TEXT NOT NULL,
    host TEXT NOT NULL,
    pid INTEGER NOT NULL,
    started_at REAL NOT NULL,
    heard_at REAL NOT NULL,
    policy_version INTEGER NOT NULL,
    state TEXT NOT NULL,
    waiting_for TEXT NOT NULL,
    waiting_s REAL NOT NULL,
    gauges TEXT NOT NULL                 -- JSON
);
"""


@MIGRATIONS(name="0001_ledger")
def ledger(db: Database) -> None:
    """The tables of the first release."""
    for statement in _LEDGER.split(";\n"):
        if statement.strip():
            db.execute(statement)
    # A pragma is part of the transaction; the application id marks the file as ours with it.
    db.execute(f"PRAGMA application_id = {APPLICATION_ID}")


@MIGRATIONS(name="0002_stop_reason")
def stop_reason(db: Database) -> None:
    """Why a stop was requested; empty again once it was carried out."""
    db.execute("ALTER TABLE runs ADD COLUMN stop_reason TEXT NOT NULL DEFAULT ''")


@MIGRATIONS(name="0003_screenshot_uses")
def screenshot_uses(db: Database) -> None:
    """Which group showed a screenshot last: what may be removed when the database is full.

    A table of its own, so that neither noting nor finding it touches the images.
    """
    db.execute(
        "CREATE TABLE screenshot_uses (hash TEXT PRIMARY KEY, group_number INTEGER NOT NULL) "
        "WITHOUT ROWID"
    )
    db.execute("CREATE INDEX screenshot_uses_by_group ON screenshot_uses (group_number)")
    db.execute(
        "INSERT INTO screenshot_uses "
        "SELECT hash, (SELECT COALESCE(MAX(number), 0) FROM groups) FROM screenshots"
    )


@MIGRATIONS(name="0004_ledger_by_batch")
def ledger_by_batch(db: Database) -> None:
    """The rows of a batch without a look at all others: an update costs the same all night."""
    for table in ("groups", "trajectories"):
        db.execute(
            f"CREATE INDEX {table}_by_batch ON {table} (batch_id) WHERE batch_id IS NOT NULL"
        )


@MIGRATIONS(name="0005_syncs")
def syncs(db: Database) -> None:
    """How each rollout worker took new weights: the times are apart and add up."""
    db.execute("""CREATE TABLE syncs (
        id INTEGER PRIMARY KEY,
        worker TEXT NOT NULL,
        policy_version INTEGER NOT NULL,     -- that was to be taken
        error TEXT NOT NULL,                 -- why the set was refused; empty if it serves
        granted_at REAL NOT NULL,            -- when the permit was given
        done_at REAL NOT NULL,
        waited_s REAL NOT NULL,              -- for the permit
        transfer_s REAL NOT NULL,            -- reading the set; requests are served meanwhile
        pause_s REAL NOT NULL,               -- until the new tensors are in place
        finish_s REAL NOT NULL,              -- post-processing, the engine still halted
        resume_s REAL NOT NULL,              -- from there until the engine serves again
        in_flight INTEGER NOT NULL           -- requests in work when it began
    )""")
    db.execute("CREATE INDEX syncs_by_worker ON syncs (worker, done_at)")


@MIGRATIONS(name="0006_step_worker")
def step_worker(db: Database) -> None:
    """Which rollout worker finished a step's completion; empty in rows of before."""
    db.execute("ALTER TABLE steps ADD COLUMN worker TEXT NOT NULL DEFAULT ''")


@MIGRATIONS(name="0007_usage")
def usage(db: Database) -> None:
    """Where the processes' time went: a row for each worker and phase, however often it started."""
    db.execute("""CREATE TABLE usage (
        worker TEXT NOT NULL,
        phase TEXT NOT NULL,
        role TEXT NOT NULL,
        started_at REAL NOT NULL,            -- of the newest process of that name
        seconds REAL NOT NULL,               -- of that process, as it said last
        before_s REAL NOT NULL,              -- of those before it, and between them
        PRIMARY KEY (worker, phase)
    ) WITHOUT ROWID""")


@MIGRATIONS(name="0008_task_progress")
def task_progress(db: Database) -> None:
    """How each task fares, so that a start need not read every outcome again."""
    db.execute("""CREATE TABLE task_progress (
        task_id TEXT PRIMARY KEY,
        passed INTEGER NOT NULL,
        failed INTEGER NOT NULL,
        invalid INTEGER NOT NULL,
        average_total REAL NOT NULL,         -- of the moving average of its success
        average_weight REAL NOT NULL,
        curve TEXT NOT NULL                  -- JSON: passed and judged by bucket of versions
    ) WITHOUT ROWID""")


@MIGRATIONS(name="0009_curation")
def curation(db: Database) -> None:
    """The experience pool; why a step of a batch is trained on or not; the step limit of a lease.

    A member of the pool is either a trajectory of this run, under its own id, or one from outside
    whose steps are in `steps` under an id that begins with `x`; the latter has no row in
    `trajectories`.
    """
    db.execute("""CREATE TABLE pool (
        trajectory_id TEXT PRIMARY KEY,
        suite TEXT NOT NULL,
        task_id TEXT NOT NULL,
        task_seed INTEGER NOT NULL,
        source TEXT NOT NULL,                -- oracle, demonstration, online, imported
        steps INTEGER NOT NULL,
        known INTEGER NOT NULL,              -- 1 if behaviour log-probabilities are known
        origin TEXT NOT NULL,                -- where it was first: run id and trajectory, or empty
        added_at REAL NOT NULL,
        evicted_at REAL,                     -- NULL while it may be drawn
        used INTEGER NOT NULL DEFAULT 0      -- batches it was part of
    ) WITHOUT ROWID""")
    db.execute("CREATE INDEX pool_by_task ON pool (task_id, added_at) WHERE evicted_at IS NULL")
    db.execute("ALTER TABLE batch_samples ADD COLUMN reason TEXT NOT NULL DEFAULT ''")
    db.execute("ALTER TABLE batch_samples ADD COLUMN entropy REAL")  # mean over tokens, nats
    db.execute("CREATE INDEX batch_samples_by_trajectory ON batch_samples (trajectory_id)")
    db.execute("ALTER TABLE trajectories ADD COLUMN max_steps INTEGER")  # NULL in rows of before
    db.execute("ALTER TABLE groups ADD COLUMN pool_member TEXT")  # that joined it; NULL for none
    # Images that members of the pool show: they stay, however old the groups are that show them.
    db.execute("""CREATE TABLE pool_images (
        trajectory_id TEXT NOT NULL,
        hash TEXT NOT NULL,
        PRIMARY KEY (trajectory_id, hash)
    ) WITHOUT ROWID""")
    db.execute("CREATE INDEX pool_images_by_hash ON pool_images (hash)")


@MIGRATIONS(name="0010_pool_folders")
def pool_folders(db: Database) -> None:
    """Which folders of data.pool were imported as they are, so that a start need not read them."""
    db.execute("""CREATE TABLE pool_folders (
        folder TEXT PRIMARY KEY,
        fingerprint TEXT NOT NULL            -- of its files, and of what they were checked against
    ) WITHOUT ROWID""")


@MIGRATIONS(name="0011_step_instruction")
def step_instruction(db: Database) -> None:
    """The instruction as the policy read it, in the row of step 0; empty in older rows."""
    db.execute("ALTER TABLE steps ADD COLUMN instruction TEXT NOT NULL DEFAULT ''")


@MIGRATIONS(name="0012_sample_gaps")
def sample_gaps(db: Database) -> None:
    """How far trainer and engine were apart on a step, nats; NULL where it was not reported."""
    db.execute("ALTER TABLE batch_samples ADD COLUMN gap_mean REAL")  # proximal - behaviour
    db.execute("ALTER TABLE batch_samples ADD COLUMN gap_largest REAL")  # of absolute differences


@MIGRATIONS(name="0013_group_of_sample")
def group_of_sample(db: Database) -> None:
    """The group in which a sample is compared: a member of the pool may be in several of a batch.

    Older rows are in order of groups, that of the pool behind the group's own.
    """
    db.execute("ALTER TABLE batch_samples ADD COLUMN group_id TEXT NOT NULL DEFAULT ''")
    db.execute(
        "UPDATE batch_samples SET group_id = COALESCE("
        "(SELECT group_id FROM trajectories WHERE id = batch_samples.trajectory_id), '') "
        "WHERE reason <> 'pool'"
    )
    db.execute(
        "UPDATE batch_samples SET group_id = COALESCE("
        "(SELECT own.group_id FROM batch_samples own WHERE own.batch_id = batch_samples.batch_id "
        "AND own.position < batch_samples.position AND own.reason <> 'pool' "
        "ORDER BY own.position DESC LIMIT 1), '') WHERE reason = 'pool'"
    )


@MIGRATIONS(name="0014_rewards")
def rewards(db: Database) -> None:
    """Rewards in [0, 1] beside outcomes, and those of single steps; older rows follow the outcome."""
    db.execute("ALTER TABLE trajectories ADD COLUMN reward REAL")  # NULL without a valid verdict
    db.execute(
        "UPDATE trajectories SET reward = (outcome = 'pass') WHERE outcome IN ('pass', 'fail')"
    )
    db.execute("ALTER TABLE steps ADD COLUMN reward REAL")  # NULL where the environment gave none
    db.execute("ALTER TABLE pool ADD COLUMN reward REAL NOT NULL DEFAULT 1.0")


@MIGRATIONS(name="0015_counted")
def counted(db: Database) -> None:
    """Which trajectories count for their task's success; progress is counted again from them.

    With data.early_stop those of a group's first half. One whose steps are missing is invalid.
    """
    db.execute("ALTER TABLE trajectories ADD COLUMN counted INTEGER NOT NULL DEFAULT 0")
    db.execute(
        "UPDATE trajectories SET outcome = 'invalid', reward = NULL WHERE reason = 'incomplete'"
    )
    early_stop = [json.loads(row[0]) for row in db.execute("SELECT config FROM runs")]
    is_half = any(config.get("data", {}).get("early_stop") for config in early_stop)
    db.execute(
        "UPDATE trajectories SET counted = 1 WHERE outcome IN ('pass', 'fail') AND id IN ("
        "SELECT id FROM (SELECT t.id, g.size, "
        "ROW_NUMBER() OVER (PARTITION BY t.group_id ORDER BY t.attempt) AS place "
        "FROM trajectories t JOIN groups g ON g.id = t.group_id "
        "WHERE t.outcome IN ('pass', 'fail') OR t.state IN ('leased', 'playing')) "
        "WHERE place <= CASE WHEN ? THEN MAX((size + 1) / 2, 2) ELSE size END)",
        (is_half,),
    )
    db.execute("DELETE FROM task_progress")


@MIGRATIONS(name="0016_batch_run_s")
def batch_run_s(db: Database) -> None:
    """How long the run had been served when a batch was formed: its place in the schedule."""
    db.execute("ALTER TABLE batches ADD COLUMN run_s REAL NOT NULL DEFAULT 0")


@MIGRATIONS(name="0017_lineage")
def lineage(db: Database) -> None:
    """How many updates are in a version's weights, and of which lineage; NULL in older rows."""
    db.execute("ALTER TABLE versions ADD COLUMN updates INTEGER")
    db.execute("ALTER TABLE versions ADD COLUMN lineage INTEGER")
    db.execute("""CREATE TABLE lineages (
        id INTEGER PRIMARY KEY,              -- from 1, in the order in which they began
        forked_at INTEGER NOT NULL,          -- updates that it shares with the one before
        recipe TEXT NOT NULL                 -- digest of the settings of an update
    )""")


@MIGRATIONS(name="0018_observed_text")
def observed_text(db: Database) -> None:
    """What the policy read beside the screenshot; empty in older rows."""
    db.execute("ALTER TABLE steps ADD COLUMN observed_text TEXT NOT NULL DEFAULT ''")


@MIGRATIONS(name="0019_task_rewards")
def task_rewards(db: Database) -> None:
    """Moving averages of each task's rewards and of its invalid episodes; counted again."""
    for name in ("reward_total", "square_total", "broken_total", "broken_weight"):
        db.execute(f"ALTER TABLE task_progress ADD COLUMN {name} REAL NOT NULL DEFAULT 0")
    db.execute("ALTER TABLE task_progress ADD COLUMN broken_acting INTEGER NOT NULL DEFAULT 0")
    db.execute("DELETE FROM task_progress")


@MIGRATIONS(name="0020_reuse_and_credit")
def reuse_and_credit(db: Database) -> None:
    """Batches trained on again, what a sample's advantage is made of, and expected rewards."""
    db.execute("ALTER TABLE batches ADD COLUMN replay_of INTEGER")  # NULL of a fresh batch
    db.execute("ALTER TABLE batches ADD COLUMN reuse INTEGER NOT NULL DEFAULT 0")
    db.execute(
        "CREATE UNIQUE INDEX batches_by_replay ON batches (replay_of, reuse) "
        "WHERE replay_of IS NOT NULL"
    )
    db.execute("ALTER TABLE batches ADD COLUMN success REAL")  # mean over tasks when it was formed
    db.execute("ALTER TABLE batches ADD COLUMN success_error REAL NOT NULL DEFAULT 0")  # its own
    db.execute("ALTER TABLE batches ADD COLUMN tasks TEXT NOT NULL DEFAULT ''")  # a digest
    db.execute("ALTER TABLE batches ADD COLUMN trajectories INTEGER NOT NULL DEFAULT 0")  # likewise
    db.execute("ALTER TABLE batch_samples ADD COLUMN screen_advantage REAL NOT NULL DEFAULT 0")
    db.execute("ALTER TABLE batch_samples ADD COLUMN fork_trajectory_id TEXT NOT NULL DEFAULT ''")
    db.execute("ALTER TABLE batch_samples ADD COLUMN fork_step INTEGER")
    db.execute("ALTER TABLE batch_samples ADD COLUMN baseline REAL")  # NULL without trackers
    db.execute("ALTER TABLE steps ADD COLUMN screen_key TEXT NOT NULL DEFAULT ''")
    for name in ("recent_total", "recent_weight", "recent_reward_total"):
        db.execute(f"ALTER TABLE task_progress ADD COLUMN {name} REAL NOT NULL DEFAULT 0")
    db.execute("DELETE FROM task_progress")  # counted again: an average has all outcomes or none
    db.execute("""CREATE TABLE trackers (
        task_id TEXT NOT NULL,
        step INTEGER NOT NULL,               -- of the episode; -1 for the whole task
        passed REAL NOT NULL,                -- discounted rewards
        failed REAL NOT NULL,                -- discounted 1 - rewards
        moved REAL,                          -- nats that the policy had moved at the newest
        PRIMARY KEY (task_id, step)
    ) WITHOUT ROWID""")


@MIGRATIONS(name="0021_patches")
def patches(db: Database) -> None:
    """The patches that pointers drew, and their maps; empty in older rows."""
    db.execute("ALTER TABLE steps ADD COLUMN patches BLOB NOT NULL DEFAULT x''")
    db.execute("ALTER TABLE steps ADD COLUMN pointed BLOB NOT NULL DEFAULT x''")


@MIGRATIONS(name="0022_judgements")
def judgements(db: Database) -> None:
    """What judge models said of trajectories; one row for each judge."""
    db.execute("""CREATE TABLE judgements (
        trajectory_id TEXT NOT NULL REFERENCES trajectories (id),
        judge TEXT NOT NULL,                 -- the model, and a digest of how it is asked
        use TEXT NOT NULL,                   -- missing: it is the verdict; check, later: beside one
        outcome TEXT NOT NULL,               -- pass, fail; invalid: no answer that can be read
        score REAL,                          -- NULL without an answer
        reason TEXT NOT NULL,
        calls INTEGER NOT NULL,              -- requests to the model
        prompt_tokens INTEGER NOT NULL,
        completion_tokens INTEGER NOT NULL,
        seconds REAL NOT NULL,
        at REAL NOT NULL,
        PRIMARY KEY (trajectory_id, judge)
    ) WITHOUT ROWID""")


@MIGRATIONS(name="0023_learned")
def learned(db: Database) -> None:
    """What train.stop_at looks at, and the success with which it ended the run."""
    db.execute("ALTER TABLE runs ADD COLUMN learned REAL NOT NULL DEFAULT 0")
    db.execute("ALTER TABLE task_progress ADD COLUMN newest TEXT NOT NULL DEFAULT ''")
    db.execute("DELETE FROM task_progress")  # counted again: the newest trajectories are known


def unknown_steps(db: Database) -> list[str]:
    """Names of steps this database has had that this dart does not know: a newer one's."""
    with contextlib.closing(Database(memory=True)) as empty:
        known = {step.name for step in MIGRATIONS.pending(empty)}
    return sorted({step.name for step in MIGRATIONS.applied(db)} - known)
