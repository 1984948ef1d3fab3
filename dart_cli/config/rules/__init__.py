"""What no single key of a configuration can show, as rows: (key, condition, text).

rule      how a row is written, asked and told; `Finding` is what it gives
policy    rows of [model], [policy], [env.judge] and the engines
learning  rows of [data], [train], [eval], [tune]
machine   rows of [run], [bus], [weights], [up]: places, sockets, GPUs
tasks     rows of [env] and of the lists of tasks
check     all of them: `check_config`, `find_mistakes`, `unread`

`dart COMMAND` refuses by them, `--dry-run` and `dart doctor` tell them, docs/config.md has what reads a key.
A row is asked for without torch and fast, so that every verb refuses before it starts anything.
"""
