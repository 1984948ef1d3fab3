#!/usr/bin/env bash
#SBATCH --job-name=dart
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --signal=B:TERM@120
# The processes of a run on the nodes of one Slurm job: docs/box.md.
#
#   sbatch --nodes 4 --gpus-per-node 8 scripts/slurm.sh CONFIG
#   sbatch --nodes 6 --gpus-per-node 8 scripts/slurm.sh --train-nodes 2 CONFIG --set train.updates=500
#
# The first node has `dart data` and the trainer; each other node a rollout worker for each of its shares of
# GPUs, and `dart env` processes. run.dir must be on a file system that all nodes share; so are the keys in it.
#
#   --train-nodes N   nodes of the trainer (default 1), all their GPUs, by torchrun if there are several
#   --gpus N          GPUs of each node (default: Slurm's SLURM_GPUS_ON_NODE)
#   --envs N          `dart env` processes on each other node (default: up.envs shared out to these nodes)
#   --port N          first of six ports of the first node (default 7800)
#   --dry-run         prints the srun commands, and starts nothing
#
# The job ends when the trainer does, with its exit code, or when `dart data` fails; sbatch it again and the run
# goes on. It runs in the folder where it was submitted, with the dart of .venv or of the present environment.
# srun is taken from PATH.
set -euo pipefail

usage() { sed -n '6,/^set -/{/^set -/d;s/^# \{0,1\}//;p;}' "$0"; }
die() { printf 'error: %s\n' "$*" >&2; exit 2; }

train_nodes=1 gpus=${SLURM_GPUS_ON_NODE:-0} envs='' port=7800 dry=0 stopped=0
while [ $# -gt 0 ]; do
    case $1 in
        --train-nodes | --gpus | --envs | --port) [ $# -gt 1 ] || die "$1: want a whole number after it" ;;
    esac
    case $1 in
        --train-nodes) train_nodes=$2 && shift 2 ;;
        --gpus) gpus=$2 && shift 2 ;;
        --envs) envs=$2 && shift 2 ;;
        --port) port=$2 && shift 2 ;;
        --dry-run) dry=1 && shift ;;
        -h | --help) usage && exit 0 ;;
        -*) usage >&2 && exit 2 ;;
        *) break ;;
    esac
done
[ $# -gt 0 ] || { usage >&2 && exit 2; }
config=$1
shift
given=("$@")
for number in "$train_nodes" "$gpus" "${envs:-0}" "$port"; do
    case $number in '' | *[!0-9]*) die "$number: want a whole number" ;; esac
done
[ -f "$config" ] || die "no such file: $config"
[ -n "${SLURM_JOB_NODELIST:-}" ] || die "no Slurm job: sbatch --nodes N scripts/slurm.sh CONFIG"
[ "$train_nodes" -ge 1 ] || die "--train-nodes $train_nodes: the trainer needs at least one"

# In a job the script is a copy of Slurm's, elsewhere.
venv=${DART_VENV:-${SLURM_SUBMIT_DIR:-$PWD}/.venv}
python=python3
if [ -x "$venv/bin/python" ]; then python=$venv/bin/python; fi

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
count=${#nodes[@]}
[ "$count" -gt "$train_nodes" ] ||
    die "$count nodes and --train-nodes $train_nodes: at least one more is needed, for rollout workers and environments"
others=$((count - train_nodes))
first=${nodes[0]}
# As another node knows it: a host's own name may be 127.0.1.1 there.
address=$first
if [ "$dry" = 0 ]; then
    address=$(srun --overlap --nodes=1 --ntasks=1 --nodelist="${nodes[count - 1]}" getent ahostsv4 "$first" | awk '{ print $1; exit }')
    [ -n "$address" ] || die "${nodes[count - 1]} knows no IPv4 address of $first"
fi

# What the configuration says of sizes and places.
asked=$("$python" - "$config" ${given[@]+"${given[@]}"} << 'READ'
import sys
from pathlib import Path

from bus.errors import DartError
from dart_cli.config.devices import gpus_per_worker
from dart_cli.config.endpoints import weights_dir
from dart_cli.config.load import load_config

path, *given = sys.argv[1:]
if given[::2] != ["--set"] * (len(given) // 2) or len(given) % 2:
    sys.exit("error: after CONFIG only --set KEY=VALUE")
try:
    config = load_config(Path(path), given[1::2])
except DartError as error:
    sys.exit(f"error: {error}")
channel = "" if config.weights.channel == "file" else config.weights.channel
print(gpus_per_worker(config), config.up.envs, config.run.dir.absolute(), weights_dir(config).absolute(), channel, sep="\n")
READ
) || exit 2
{ read -r each; read -r all_envs; read -r run_dir; read -r weights; read -r channel || true; } <<< "$asked"

if [ -z "$envs" ]; then envs=$(((all_envs + others - 1) / others)); fi
workers=1
if [ "$gpus" -gt 0 ]; then
    [ "$gpus" -ge "$each" ] || die "a rollout worker takes $each GPUs (vllm.tensor_parallel), a node has $gpus"
    workers=$((gpus / each))
fi
ranks=()
if [ "$gpus" -gt 0 ]; then ranks=(--set "train.ranks=$gpus"); fi

keys=$run_dir/keys
common=("$config" ${given[@]+"${given[@]}"}
    --set "run.dir=$run_dir" --set "bus.host=\"$address\"" --set "bus.port=$port"
    --set "bus.keys=$keys" --set 'up.train_gpus=[]' --set 'up.rollout_gpus=[]'
    --set "up.rollouts=$((others * workers))" --set "up.envs=$((others * envs))") # caches of screens follow from them
if [ -z "$channel" ]; then common+=(--set "weights.directory=$weights"); fi

steps=()
step() { # NODES NODELIST COMMAND...: one srun, in the background
    local number=$1 list=$2
    shift 2
    local line=(srun --overlap --kill-on-bad-exit=1 --nodes="$number" --ntasks="$number" --ntasks-per-node=1
        --nodelist="$list" "$@")
    if [ "$dry" = 1 ]; then
        printf '%q ' "${line[@]}"
        printf '\n'
        return
    fi
    "${line[@]}" &
    steps+=($!)
}
joined() { local IFS=,; printf '%s' "$*"; }

if [ "$dry" = 0 ]; then
    mkdir -p -m 700 "$run_dir"
    [ -f "$keys/curve.json" ] || "$python" -m dart_cli keys "$keys" > /dev/null
    trap 'stopped=1; kill -TERM ${steps[@]+"${steps[@]}"} 2> /dev/null || true' TERM INT
fi

step 1 "$first" "$python" -m dart_cli data "${common[@]}"
for ((n = train_nodes; n < count; n++)); do
    node=${nodes[n]}
    for ((i = 0; i < workers; i++)); do
        visible=()
        if [ "$gpus" -gt 0 ]; then
            visible=("CUDA_VISIBLE_DEVICES=$(seq -s , $((i * each)) $(((i + 1) * each - 1)))")
        fi
        step 1 "$node" env ${visible[@]+"${visible[@]}"} "$python" -m dart_cli rollout "${common[@]}" --worker "rollout-$n-$i"
    done
    for ((i = 0; i < envs; i++)); do
        step 1 "$node" env CUDA_VISIBLE_DEVICES= "$python" -m dart_cli env "${common[@]}" --worker "env-$n-$i"
    done
done
if [ "$train_nodes" -gt 1 ]; then
    step "$train_nodes" "$(joined "${nodes[@]:0:train_nodes}")" "$python" -m torch.distributed.run \
        --nnodes "$train_nodes" --nproc-per-node "$((gpus > 0 ? gpus : 1))" --max-restarts 3 \
        --rdzv-backend c10d --rdzv-endpoint "$address:$((port + 5))" --rdzv-id "${SLURM_JOB_ID:-0}" \
        -m dart_cli train "${common[@]}" --set train.ranks=1
else
    step 1 "$first" "$python" -m dart_cli train "${common[@]}" ${ranks[@]+"${ranks[@]}"}
fi
[ "$dry" = 0 ] || exit 0

# The job ends with the trainer, the last step. The others end by themselves, data, the first, once they have.
data=${steps[0]} train=${steps[${#steps[@]} - 1]} status=0
lives() { kill -0 "$1" 2> /dev/null; }
while [ "$stopped" = 0 ] && lives "$data" && lives "$train"; do # before bash 5.1 wait -n takes any process
    sleep 2 &
    wait $! || true # a signal interrupts it
done
if [ "$stopped" = 1 ]; then
    status=143
elif lives "$train"; then
    wait "$data" || status=$?
fi
if [ "$status" = 0 ]; then
    wait "$train" || status=$?
elif [ "$stopped" = 0 ]; then
    # The trainer would wait for it until the job's time is over.
    printf 'error: dart data ended with %s; the job ends, submit it again to go on\n' "$status" >&2
    kill -TERM "${steps[@]}" 2> /dev/null || true
fi
for ((left = 60; left > 0; left--)); do
    kill -0 "${steps[@]}" 2> /dev/null || break # true as long as any lives
    sleep 1
done
kill -TERM "${steps[@]}" 2> /dev/null || true
for pid in "${steps[@]}"; do wait "$pid" || true; done
exit "$status"
