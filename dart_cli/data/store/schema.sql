-- The run's tables. Points in time are in unix seconds, durations in seconds, log-probabilities in nats.
-- Raise VERSION in connection.py with every change of a table: a database of another version is refused.

CREATE TABLE runs (
    id TEXT PRIMARY KEY,
    created_at REAL NOT NULL,
    seed INTEGER NOT NULL,
    config TEXT NOT NULL,                -- JSON, of the newest start
    active_s REAL NOT NULL DEFAULT 0,    -- for how long `dart data` has served it, over all starts
    stop_reason TEXT NOT NULL DEFAULT '',-- why a stop was requested; empty once it was carried out
    learned REAL NOT NULL DEFAULT 0      -- success with which train.stop_at ended the run
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
    size INTEGER NOT NULL,               -- trajectories that it needs
    state TEXT NOT NULL,                 -- open, ready, batched, trained, dropped
    reason TEXT NOT NULL DEFAULT '',     -- why dropped
    opened_at REAL NOT NULL,
    closed_at REAL,
    batch_id INTEGER,
    pool_member TEXT                     -- the member of the pool that joined it; NULL for none
);
CREATE INDEX groups_by_state ON groups (state);
CREATE INDEX groups_by_batch ON groups (batch_id) WHERE batch_id IS NOT NULL;
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
    max_steps INTEGER NOT NULL,          -- of its lease
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
    batch_id INTEGER,
    reward REAL,                         -- in [0, 1]; NULL without a valid verdict
    counted INTEGER NOT NULL DEFAULT 0,  -- 1 if it counts for its task's success
    app_log TEXT NOT NULL DEFAULT ''     -- what the application reported, a line each
);
CREATE INDEX trajectories_by_group ON trajectories (group_id);
CREATE INDEX trajectories_by_state ON trajectories (state, reason);
CREATE INDEX trajectories_by_batch ON trajectories (batch_id) WHERE batch_id IS NOT NULL;
CREATE TABLE steps (
    trajectory_id TEXT NOT NULL,         -- `x...` for a member of the pool from outside the run
    step INTEGER NOT NULL,               -- from 0
    at REAL NOT NULL,
    screenshot TEXT NOT NULL,            -- key of screenshots: the screen before the action
    image_hashes TEXT NOT NULL,          -- JSON list: the prompt's images, the last is screenshot
    prompt_token_ids BLOB NOT NULL,      -- steps.py beside this module reads and writes the blobs
    token_ids BLOB NOT NULL,
    behaviour_logprobs BLOB NOT NULL,
    entropies BLOB NOT NULL,
    version_spans BLOB NOT NULL,
    patches BLOB NOT NULL,               -- drawn by pointers
    pointed BLOB NOT NULL,               -- the pointers' maps
    routing TEXT NOT NULL,               -- JSON list: keys of screenshots, the parts of its routing
    text TEXT NOT NULL,
    action TEXT,                         -- JSON; NULL if the text is no action
    more_actions TEXT,                   -- JSON list: those performed after it; NULL if there are none
    error TEXT NOT NULL,
    model_s REAL NOT NULL,
    env_s REAL NOT NULL,
    worker TEXT NOT NULL,                -- the rollout worker that finished the completion
    instruction TEXT NOT NULL,           -- as the policy read it; in step 0 alone
    observed_text TEXT NOT NULL,         -- text that it read beside the screenshot
    reward REAL,                         -- NULL if the environment gave none
    hint BLOB NOT NULL,                  -- a place in the prompt, and its tokens with the next step
    PRIMARY KEY (trajectory_id, step)
);
CREATE TABLE screenshots (
    hash TEXT PRIMARY KEY,               -- envs.contract.blobs.content_hash
    media_type TEXT NOT NULL,            -- image/png, ...; `routing` for part of a step's routing
    bytes BLOB NOT NULL
);
CREATE TABLE screenshot_uses (           -- the newest group that shows each; apart from the images
    hash TEXT PRIMARY KEY,
    group_number INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX screenshot_uses_by_group ON screenshot_uses (group_number);
CREATE TABLE batches (
    id INTEGER PRIMARY KEY,              -- from 1, in the order of training
    state TEXT NOT NULL,                 -- batched, trained
    formed_at REAL NOT NULL,
    formed_version INTEGER NOT NULL,     -- the trainer's when it was formed
    temperature REAL NOT NULL,
    reward REAL NOT NULL,                -- mean over its trajectories
    trained_at REAL,
    trained_version INTEGER,             -- the trainer's after the update
    run_s REAL NOT NULL,                 -- how long the run had been served when it was formed
    trajectories INTEGER NOT NULL,       -- trajectories of the run that had ended then
    replay_of INTEGER,                   -- NULL for a fresh batch
    reuse INTEGER NOT NULL
);
CREATE UNIQUE INDEX batches_by_replay ON batches (replay_of, reuse) WHERE replay_of IS NOT NULL;
CREATE TABLE batch_samples (
    batch_id INTEGER NOT NULL REFERENCES batches (id),
    position INTEGER NOT NULL,
    group_id TEXT NOT NULL,              -- the group it is compared in
    trajectory_id TEXT NOT NULL,
    step INTEGER NOT NULL,
    advantage REAL NOT NULL,
    weight REAL NOT NULL,
    reason TEXT NOT NULL,
    entropy REAL,                        -- mean over tokens
    baseline REAL,                       -- expected reward; NULL without a running baseline
    reward REAL,                         -- of its trajectory; NULL without a running baseline
    gap_mean REAL,                       -- proximal - behaviour; NULL if it was not reported
    gap_largest REAL,                    -- of absolute differences
    value REAL,                          -- reward that the trainer's critic expected; NULL without one
    valued REAL,                         -- the advantage by it
    PRIMARY KEY (batch_id, position)
) WITHOUT ROWID;
CREATE INDEX batch_samples_by_trajectory ON batch_samples (trajectory_id);
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
    published_at REAL NOT NULL,
    updates INTEGER NOT NULL             -- updates in its weights
);
CREATE TABLE decisions (
    id INTEGER PRIMARY KEY,
    at REAL NOT NULL,
    subject TEXT NOT NULL,               -- id of a group or a trajectory, or `batch N`
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
CREATE TABLE processes (                 -- the newest heartbeat of each worker
    worker TEXT PRIMARY KEY,
    role TEXT NOT NULL,
    host TEXT NOT NULL,
    started_at REAL NOT NULL,
    heard_at REAL NOT NULL,
    policy_version INTEGER NOT NULL,
    state TEXT NOT NULL,
    waiting_for TEXT NOT NULL,
    waiting_s REAL NOT NULL
);
CREATE TABLE syncs (                     -- how workers took new weights; the times add up
    id INTEGER PRIMARY KEY,
    worker TEXT NOT NULL,
    policy_version INTEGER NOT NULL,     -- the version to take
    error TEXT NOT NULL,                 -- why the set was refused; empty if it serves
    granted_at REAL NOT NULL,            -- when the permit was given
    done_at REAL NOT NULL,
    waited_s REAL NOT NULL,              -- for the permit
    transfer_s REAL NOT NULL,            -- for reading the set; requests are served meanwhile
    pause_s REAL NOT NULL,               -- from the halt of the engine until it serves again
    in_flight INTEGER NOT NULL           -- requests in work when it began
);
CREATE INDEX syncs_by_worker ON syncs (worker, done_at);
CREATE TABLE usage (                     -- the processes' time, over all restarts
    worker TEXT NOT NULL,
    phase TEXT NOT NULL,
    role TEXT NOT NULL,
    started_at REAL NOT NULL,            -- of the newest process of that name
    seconds REAL NOT NULL,               -- of that process, as its newest heartbeat reports
    before_s REAL NOT NULL,              -- of its predecessors, and between them
    PRIMARY KEY (worker, phase)
) WITHOUT ROWID;
CREATE TABLE task_progress (             -- read at a start, in place of every outcome
    task_id TEXT PRIMARY KEY,
    progress TEXT NOT NULL               -- JSON of a dart_cli.data.progress.TaskProgress
) WITHOUT ROWID;
CREATE TABLE pool (
    trajectory_id TEXT PRIMARY KEY,
    suite TEXT NOT NULL,
    task_id TEXT NOT NULL,
    task_seed INTEGER NOT NULL,
    source TEXT NOT NULL,                -- oracle, demonstration, teacher, online, imported
    steps INTEGER NOT NULL,
    has_logprobs INTEGER NOT NULL,       -- 1 if its behaviour log-probabilities are known
    origin TEXT NOT NULL,                -- the run id and trajectory that it comes from, or empty
    added_at REAL NOT NULL,
    evicted_at REAL,                     -- NULL while it may be drawn
    used INTEGER NOT NULL,               -- batches it was part of
    reward REAL NOT NULL
) WITHOUT ROWID;
CREATE INDEX pool_by_task ON pool (task_id, added_at) WHERE evicted_at IS NULL;
CREATE TABLE pool_images (               -- screenshots of members, which are not removed
    trajectory_id TEXT NOT NULL,
    hash TEXT NOT NULL,
    PRIMARY KEY (trajectory_id, hash)
) WITHOUT ROWID;
CREATE INDEX pool_images_by_hash ON pool_images (hash);
CREATE TABLE pool_folders (              -- folders of data.pool that were imported
    folder TEXT PRIMARY KEY,
    fingerprint TEXT NOT NULL            -- of its files, and of the settings that they were checked with
) WITHOUT ROWID;
CREATE TABLE baselines (                 -- running baselines: expected rewards
    task_id TEXT NOT NULL,
    step INTEGER NOT NULL,               -- of the episode; -1 for the whole task
    passed REAL NOT NULL,                -- discounted rewards
    failed REAL NOT NULL,                -- discounted 1 - rewards
    PRIMARY KEY (task_id, step)
) WITHOUT ROWID;
CREATE TABLE judgements (                -- judgements of judge models; one row for each judge
    trajectory_id TEXT NOT NULL REFERENCES trajectories (id),
    judge TEXT NOT NULL,                 -- the model, and a digest: judge.py, name_of
    use TEXT NOT NULL,                   -- missing: it is the verdict; check, later: beside a verdict
    outcome TEXT NOT NULL,               -- pass, fail; invalid: no answer that can be read
    score REAL,                          -- NULL without an answer
    reason TEXT NOT NULL,
    calls INTEGER NOT NULL,              -- requests to the model
    prompt_tokens INTEGER NOT NULL,
    completion_tokens INTEGER NOT NULL,
    seconds REAL NOT NULL,
    at REAL NOT NULL,
    PRIMARY KEY (trajectory_id, judge)
) WITHOUT ROWID;
