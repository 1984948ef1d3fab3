#!/usr/bin/env bash
# The roles of a run in tmux, a pane each, as one would type them by hand; and the status page.
#
#   scripts/tmux.sh CONFIG                                  everything on a laptop, or as its [gpus] says
#   scripts/tmux.sh --train 0-5 --rollout 6-7 CONFIG        a box: GPUs 0-5 train, 6-7 roll out
#   scripts/tmux.sh --rollouts 2 --envs 4 CONFIG --set env.slots=32
#
#   --train GPUS     GPUs of the trainer, e.g. 0 or 0-1 or 0,3, a rank on each; with --rollout in place
#                    of train.ranks and [gpus]
#   --rollout GPUS   a rollout worker for each of them
#   --rollouts N     rollout workers where no GPUs are named (default 1)
#   --envs N         environment processes (default 1)
#   --session NAME   tmux session (default dart-CONFIG); one that is there is gone back to
#   --detached       leave it in the background
#   --dry-run        print the commands, start nothing
#
# What follows CONFIG goes to every role. In each pane is a shell: Ctrl-C ends its process, the
# up-arrow brings the command back. Window `run`: status, data, train, env; window `rollout`: the
# workers. Leave with Ctrl-b d; `tmux kill-session -t NAME` ends it all.
set -euo pipefail

die() { printf 'error: %s\n' "$*" >&2; exit 2; }
usage() { sed -n '2,/^set -/{/^set -/d;s/^# \{0,1\}//;p;}' "$0"; }

train='' rollout='' rollouts=1 envs=1 session='' dry=0 detached=0 config=''

number() { # NAME VALUE: a whole number from 1 on
    [[ $2 =~ ^[1-9][0-9]{0,3}$ ]] || die "$1 $2: want a whole number from 1 on"
}

gpus() { # NAME LIST: 0-2,5 as a line for each
    local part
    [[ $2 =~ ^[0-9]+(-[0-9]+)?(,[0-9]+(-[0-9]+)?)*$ ]] || die "$1 $2: want GPUs such as 0 or 2-7 or 0,3"
    for part in ${2//,/ }; do seq "${part%-*}" "${part#*-}"; done
}

while [ $# -gt 0 ]; do
    case $1 in
        -h | --help) usage; exit 0 ;;
        --dry-run) dry=1; shift; continue ;;
        --detached) detached=1; shift; continue ;;
        --train | --rollout | --rollouts | --envs | --session) [ $# -gt 1 ] || die "$1 wants a value" ;;
        -*) die "no option $1; scripts/tmux.sh --help lists them" ;;
        *) config=$1; shift; break ;;
    esac
    case $1 in
        --train) train=$(gpus "$1" "$2" | paste -sd,) ;;
        --rollout) rollout=$(gpus "$1" "$2") ;;
        --rollouts) number "$1" "$2"; rollouts=$2 ;;
        --envs) number "$1" "$2"; envs=$2 ;;
        --session) session=$2 ;;
    esac
    shift 2
done
[ -n "$config" ] || die "name the TOML file of the run: scripts/tmux.sh configs/quickstart.toml"
[ -f "$config" ] || die "no such file: $config"
name=$(basename "$config" .toml)
session=${session:-dart-${name//[^A-Za-z0-9_-]/-}} # tmux writes panes as SESSION:WINDOW.PANE
[[ $session =~ ^[A-Za-z0-9_-]+$ ]] || die "--session $session: use letters, digits, _ and -"

# --- what each pane runs -------------------------------------------------------------------------

venv=$(cd "$(dirname "$0")/.." && pwd)/.venv
dart=dart
if [ -x "${DART_VENV:-$venv}/bin/dart" ]; then dart=${DART_VENV:-$venv}/bin/dart; fi

ranks=()
if [ -n "$train" ]; then
    shared=${train//[^,]/}
    ranks=(--set "train.ranks=$((${#shared} + 1))" --set 'gpus.train=[]' --set 'gpus.rollout=[]')
fi
if [ -z "$train$rollout" ] && [ -x "${DART_VENV:-$venv}/bin/python" ]; then
    placed=$(cd "$(dirname "$0")/.." && pwd) # where the code is
    placed=$(PYTHONPATH=$placed "${DART_VENV:-$venv}/bin/python" -m dart_cli.runtime.commands "$config" "$@" 2>&1) || die "$placed"
    train=$(sed -n 's/^train //p' <<< "$placed")
    rollout=$(sed -n 's/^rollout //p' <<< "$placed")
fi

role() { # GPUS ROLE ARGUMENT...: a command line, quoted for the pane's shell
    local visible=$1
    shift
    if [ -n "$visible" ]; then printf 'CUDA_VISIBLE_DEVICES=%s ' "$visible"; fi
    printf '%q' "$dart"
    printf ' %q' "$@"
    printf '\n'
}

main=("$(role '' status "$config" "$@")" "$(role '' data "$config" "$@")" "$(role "$train" train "$config" ${ranks[@]+"${ranks[@]}"} "$@")")
for ((i = 0; i < envs; i++)); do main+=("$(role '' env "$config" "$@")"); done
workers=()
if [ -n "$rollout" ]; then
    for gpu in $rollout; do workers+=("$(role "$gpu" rollout "$config" "$@")"); done
else
    for ((i = 0; i < rollouts; i++)); do workers+=("$(role '' rollout "$config" "$@")"); done
fi

if [ "$dry" = 1 ]; then
    printf '%s\n' "${main[@]}" "${workers[@]}"
    exit 0
fi
command -v tmux > /dev/null || die "no tmux: apt install tmux, or type what --dry-run prints"
command -v "$dart" > /dev/null || die "no dart command: scripts/setup makes .venv; activate it"

# --- panes ---------------------------------------------------------------------------------------

fill() { # WINDOW LAYOUT COMMAND...: a pane for each command, the first is there already
    local window=$1 layout=$2 pane
    shift 2
    pane=$(tmux list-panes -t "$window" -F '#{pane_id}')
    tmux send-keys -t "$pane" "$1" Enter
    shift
    for command in "$@"; do
        pane=$(tmux split-window -d -t "$pane" -c "$PWD" -P -F '#{pane_id}')
        tmux send-keys -t "$pane" "$command" Enter
        tmux select-layout -t "$window" "$layout" > /dev/null
    done
}

if ! tmux has-session -t "=$session" 2> /dev/null; then
    # A session without a client needs an explicit size, or panes do not fit.
    tmux new-session -d -s "$session" -n run -x 240 -y 64 -c "$PWD"
    tmux set-option -w -t "$session:run" main-pane-height 60% 2> /dev/null ||
        tmux set-option -w -t "$session:run" main-pane-height 38 # tmux before 3.2 knows no shares
    fill "$session:run" main-horizontal "${main[@]}"
    tmux new-window -d -t "$session:" -n rollout -c "$PWD"
    fill "$session:rollout" tiled "${workers[@]}"
fi
if [ "$detached" = 1 ] || [ ! -t 1 ]; then
    echo "tmux attach -t $session"
elif [ -n "${TMUX:-}" ]; then
    exec tmux switch-client -t "=$session"
else
    exec tmux attach-session -t "=$session"
fi
