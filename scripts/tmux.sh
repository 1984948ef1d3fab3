#!/usr/bin/env bash
# The roles of a run in tmux, a pane each, as one would type them by hand; and the status page.
#
#   scripts/tmux.sh CONFIG                                  everything on a laptop, or as its [up] says
#   scripts/tmux.sh --train 0-5 --rollout 6-7 CONFIG        a box: GPUs 0-5 train, 6-7 roll out
#   scripts/tmux.sh --rollouts 2 --envs 4 CONFIG --set env.slots=32
#
#   --train GPUS     GPUs of the trainer, e.g. 0 or 0-1 or 0,3, a rank on each; in place of up.train_gpus
#                    and train.ranks
#   --rollout GPUS   GPUs of rollout workers, vllm.tensor_parallel for each; in place of up.rollout_gpus
#                    and up.rollouts
#   --rollouts N     rollout workers where no GPUs are named for them (default up.rollouts)
#   --envs N         environment processes (default up.envs)
#   --session NAME   tmux session (default dart-CONFIG); one that is there is gone back to
#   --detached       leave it in the background
#   --dry-run        print the commands, start nothing; also after CONFIG
#
# What follows CONFIG goes to every role. In each pane is a shell: Ctrl-C ends its process, the
# up-arrow brings the command back. Window `run`: status, data, train, env; window `rollout`: the
# workers. Leave with Ctrl-b d; `tmux kill-session -t NAME` ends it all. `dart` is that of .venv beside this
# script, else that of the active environment.
set -euo pipefail

die() { printf 'error: %s\n' "$*" >&2; exit 2; }
usage() { sed -n '2,/^set -/{/^set -/d;s/^# \{0,1\}//;p;}' "$0"; }

train='' rollout='' rollouts='' envs='' session='' dry=0 detached=0 config=''

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
        --rollout) rollout=$(gpus "$1" "$2" | paste -sd,) ;;
        --rollouts) number "$1" "$2"; rollouts=$2 ;;
        --envs) number "$1" "$2"; envs=$2 ;;
        --session) session=$2 ;;
    esac
    shift 2
done
given=("$@") # a dry run is one wherever it stands
set --
for each in ${given[@]+"${given[@]}"}; do
    if [ "$each" = --dry-run ]; then dry=1; else set -- "$@" "$each"; fi
done
[ -n "$config" ] || die "name the TOML file of the run: scripts/tmux.sh configs/quickstart.toml"
[ -f "$config" ] || die "no such file: $config"
name=$(basename "$config" .toml)
session=${session:-dart-${name//[^A-Za-z0-9_-]/-}} # tmux writes panes as SESSION:WINDOW.PANE
[[ $session =~ ^[A-Za-z0-9_-]+$ ]] || die "--session $session: use letters, digits, _ and -"

# --- what each pane runs -------------------------------------------------------------------------

home=$(cd "$(dirname "$0")/.." && pwd) # where the code is
venv=${DART_VENV:-$home/.venv}
dart=$(command -v "$venv/bin/dart" || command -v dart || echo dart) # panes may have another PATH
python=''
for each in "$venv/bin/python" python3 python; do
    if PYTHONPATH=$home "$each" -c 'import dart_cli.config.load' 2> /dev/null; then python=$each; break; fi
done
[ -n "$python" ] || die "no Python with dart's packages: scripts/setup makes .venv, or activate an environment that has them"

flags=() ranks=()
if [ -n "$train" ]; then
    shared=${train//[^,]/}
    flags+=(--train "$train")
    ranks=(--set "train.ranks=$((${#shared} + 1))" --set 'up.train_gpus=[]' --set 'up.rollout_gpus=[]')
fi
named=$rollout
if [ -n "$rollout" ]; then flags+=(--rollout "$rollout"); fi
placed=$(PYTHONPATH=$home "$python" -m dart_cli.runtime.commands ${flags[@]+"${flags[@]}"} "$config" "$@" 2>&1) || die "$placed"
of() { sed -n "s/^$1 //p" <<< "$placed"; }
train=$(of train)
rollout=$(of rollout)
# The engines size their caches by these numbers. They come last: they are those that are started.
sizes=()
if [ -n "$named" ]; then
    sizes+=(--set "up.rollouts=$(wc -w <<< "$rollout" | tr -d ' ')" --set 'up.rollout_gpus=[]')
elif [ -n "$rollouts" ] && [ -z "$rollout" ]; then
    sizes+=(--set "up.rollouts=$rollouts")
fi
if [ -n "$envs" ]; then sizes+=(--set "up.envs=$envs"); fi
set -- "$@" ${sizes[@]+"${sizes[@]}"}
envs=${envs:-$(of envs)}
rollouts=${rollouts:-$(of rollouts)}

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
    printf '%s\n' "${main[@]}" ${workers[@]+"${workers[@]}"}
    exit 0
fi
command -v tmux > /dev/null || die "no tmux: apt install tmux, or type what --dry-run prints"
command -v "$dart" > /dev/null || die "no dart command: scripts/setup makes .venv, or activate an environment that has it"

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
    if [ ${#workers[@]} -gt 0 ]; then
        tmux new-window -d -t "$session:" -n rollout -c "$PWD"
        fill "$session:rollout" tiled "${workers[@]}"
    fi
fi
if [ "$detached" = 1 ] || [ ! -t 1 ]; then
    echo "tmux attach -t $session"
elif [ -n "${TMUX:-}" ]; then
    exec tmux switch-client -t "=$session"
else
    exec tmux attach-session -t "=$session"
fi
