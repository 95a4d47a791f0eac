#!/usr/bin/env bash
# Trains a web-browsing agent on Slurm: checks everything, starts Ray on all nodes of the job, trains, stops it all.
#
#   sbatch [SBATCH OPTIONS] submit_webvoyager.sh [--config-env FILE] [-- HYDRA_OVERRIDES...]
#   bash submit_webvoyager.sh --dry-run[=NODES] ...    print every command of such a job, run none
#
# Settings come from config.env beside this script (template: config.env.example) and from the environment, which has
# precedence. Nodes, partition, account and time are sbatch's options. Submitting again with the same RUN_NAME goes on
# from the last checkpoint. What follows `--` goes to verl.trainer.main_ppo unchanged.
# Exit code: training's own; 1 a check failed, 2 wrong settings or usage, 124 stopped before the time limit, 128+n signal.
#SBATCH --job-name=webvoyager
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@600
set -euo pipefail

readonly ENVIRONMENT_START_S=300 HEAD_START_S=300

DRY_RUN=false SIGNAL='' STAGE=start LOG_DIR='' LOCK='' TRAIN_STARTED=''
declare -A SERVICES=()
CHILDREN=() OVERRIDES=()

say() { printf '%(%F %T)T submit: %s\n' -1 "$*"; }
die() { # EXIT_CODE TEXT
  printf '%(%F %T)T submit: error: %s\n' -1 "$2" >&2
  exit "$1"
}

# --- what was asked for -------------------------------------------------------------------------------------------------

parse_arguments() {
  CONFIG_ENV=config.env DRY_NODES=2
  while (($#)); do
    case $1 in
      --dry-run) DRY_RUN=true ;;
      --dry-run=*) DRY_RUN=true DRY_NODES=${1#*=} ;;
      --config-env) shift && CONFIG_ENV=$(realpath -m "${1:?--config-env needs a file}") ;;
      --config-env=*) CONFIG_ENV=$(realpath -m "${1#*=}") ;;
      -h | --help)
        sed -n '2,/^#SBATCH/{/^#SBATCH/d;s/^# \{0,1\}//;p;}' "${BASH_SOURCE[0]}"
        exit 0
        ;;
      --)
        shift
        OVERRIDES=("$@")
        return
        ;;
      *) die 2 "unknown argument $1; overrides for verl stand after --, options of sbatch before the script" ;;
    esac
    shift
  done
  [[ $DRY_NODES =~ ^[1-9][0-9]*$ ]] || die 2 "--dry-run=$DRY_NODES: a number of nodes"
}

enter_recipe() { # Slurm runs a copy of this script from its spool folder, so the script's own place says nothing in a job
  local folder
  for folder in "${RECIPE_DIR:-}" "${SLURM_SUBMIT_DIR:-}" "$(dirname "${BASH_SOURCE[0]}")"; do
    if [[ -n $folder && -f $folder/browser_agent_loop.py && -f $folder/config.env.example ]]; then
      cd "$folder"
      RECIPE_DIR=$PWD
      return
    fi
  done
  die 2 "the recipe is not in ${SLURM_SUBMIT_DIR:-$PWD}: submit from its folder, or export RECIPE_DIR with its path"
}

# --- nodes ------------------------------------------------------------------------------------------------------------

find_nodes() {
  ENVIRONMENT_NODES=()
  if [[ -z ${SLURM_JOB_ID:-} ]]; then
    $DRY_RUN || die 2 "not inside a Slurm job; submit it: sbatch submit_webvoyager.sh (or --dry-run)"
    SLURM_JOB_ID=JOBID
    mapfile -t NODES < <(seq -f 'NODE%g' "$DRY_NODES")
    if [[ $START_ENVIRONMENT == cpu-nodes ]]; then ENVIRONMENT_NODES=(CPUNODE1); fi
  else
    mapfile -t NODES < <(scontrol show hostnames "${SLURM_JOB_NODELIST_HET_GROUP_0:-$SLURM_JOB_NODELIST}")
    if [[ $START_ENVIRONMENT == cpu-nodes ]]; then
      [[ -n ${SLURM_JOB_NODELIST_HET_GROUP_1:-} ]] ||
        die 2 "START_ENVIRONMENT=cpu-nodes, but the job has no second component: sbatch OPTIONS : CPU_NODE_OPTIONS submit_webvoyager.sh"
      mapfile -t ENVIRONMENT_NODES < <(scontrol show hostnames "$SLURM_JOB_NODELIST_HET_GROUP_1")
    fi
  fi
  HEAD=${NODES[0]}
  if [[ $START_ENVIRONMENT == head ]]; then ENVIRONMENT_NODES=("$HEAD"); fi
  local servers=$((${#ENVIRONMENT_NODES[@]} * ENVIRONMENT_SERVERS_PER_NODE)) key
  for key in NEMO_GYM_BROWSER_MAX_OPEN_SESSIONS NEMO_GYM_BROWSER_MAX_CONCURRENT_SEEDS; do
    ((${!key} >= servers)) || die 2 "$key=${!key} is less than 1 for each of the $servers servers that the job starts; raise it"
  done
}

address_of() { # NODE: prints the IPv4 address under which Slurm reaches it; names cost gRPC 40 s where DNS is slow
  if $DRY_RUN; then
    printf 'ADDRESS_OF_%s' "$1"
    return
  fi
  local name address
  name=$(scontrol show node --oneliner "$1" | grep -oE ' NodeAddr=[^ ]+')
  address=$(getent ahostsv4 "${name#*=}" | awk '$1 !~ /^127\./ {print $1; exit}')
  [[ -n $address ]] || die 1 "the node $1 (${name#*=}) has no address other than 127.*; check the cluster's name service"
  printf '%s' "$address"
}

container() { # IMAGE NAME: fill the array CONTAINER with pyxis' options; empty without an image
  CONTAINER=()
  if [[ -z $1 ]]; then return; fi
  local mounts=$RECIPE_DIR,$RESULTS_ROOT,${TRAIN_FILE%/*},${VAL_FILE%/*} path
  for path in "$MODEL_PATH" "${HF_HOME:-}" "$GYM_VENV"; do
    if [[ -d $path ]]; then mounts+=,$(realpath "$path"); fi
  done
  mounts=$(tr , '\n' <<<"$mounts" | sort -u | sed 's/.*/&:&/' | paste -sd, -)
  # A name makes all steps of the job on a node share one unpacked image. All of the job's environment arrives in the
  # container; what an image may set by itself is named in --container-env, so that the job's value wins.
  CONTAINER=(--container-image="$1" --container-name="$2" --container-workdir="$RECIPE_DIR" --no-container-mount-home
    --container-mounts="$mounts${CONTAINER_MOUNTS:+,$CONTAINER_MOUNTS}" --container-env="PYTHONPATH${HF_HOME:+,HF_HOME}")
}

on() { # GROUP NODE: fill the array SRUN with a step of one task on this node
  # --overlap: a step that does not share would wait for ever behind Ray's. --cpu-bind=none: the step has all cores.
  SRUN=(srun --overlap --nodes=1 --ntasks=1 --ntasks-per-node=1 --nodelist="$2" --cpu-bind=none --kill-on-bad-exit=1)
  if (($1)); then SRUN+=(--het-group="$1"); fi
}

# --- the end ----------------------------------------------------------------------------------------------------------

preempted() { # Slurm then stops the steps first, and a script that ends before its own TERM comes ends the job for good
  scontrol show job --oneliner "$SLURM_JOB_ID" | grep -qE ' PreemptTime=[0-9]'
}

requeue_if_asked() {
  if [[ $REQUEUE != 1 ]]; then return 0; fi
  if [[ $SIGNAL == USR1 ]] || preempted; then
    say "back into the queue"
    scontrol requeue "$SLURM_JOB_ID" || say "Slurm does not requeue this job (see its words above); submit it again"
  fi
}

finish() { # whatever the reason, stop everything and say how it ended
  # Below, `return` has an argument everywhere: in a trap, bash's default is the status from before it, a failure to set -e.
  local status=$?
  trap '' TERM INT HUP USR1
  trap - EXIT
  if $DRY_RUN || [[ -z $LOG_DIR ]]; then exit "$status"; fi
  # First what there is to say: after scancel, Slurm gives this script no more than its KillWait.
  if [[ -n $SIGNAL ]]; then say "signal $SIGNAL while: $STAGE"; fi
  if [[ -n $TRAIN_STARTED && $(last_step) == none ]]; then
    say "no checkpoint was written"
  elif [[ -n $TRAIN_STARTED ]]; then
    say "the last checkpoint is of step $(last_step); the same RUN_NAME goes on from there"
  fi
  say "exit code $status (logs: $LOG_DIR); stopping what still runs"
  stop_all
  if [[ -n $LOCK && $(<"$LOCK") == "$SLURM_JOB_ID" ]]; then rm -f "$LOCK"; fi
  requeue_if_asked
  exit "$status"
}

take_run() { # two jobs that write the same checkpoints would ruin them
  local lock=$RUN_DIR/job.lock holder
  mkdir -p "$LOG_DIR"
  if ! (set -o noclobber && printf '%s\n' "$SLURM_JOB_ID" >"$lock") 2>/dev/null; then
    holder=$(<"$lock")
    if [[ $holder != "$SLURM_JOB_ID" && -n $(squeue --noheader --jobs="$holder" --format=%T 2>/dev/null) ]]; then
      die 1 "the run $RUN_NAME belongs to job $holder, which is still there; wait for it, cancel it, or choose another RUN_NAME"
    fi
    printf '%s\n' "$SLURM_JOB_ID" >"$lock"
  fi
  LOCK=$lock
}

# --- the job ----------------------------------------------------------------------------------------------------------

start_environment() {
  if [[ -z $START_ENVIRONMENT ]]; then return; fi
  local node ready=() group=0
  if [[ $START_ENVIRONMENT == cpu-nodes ]]; then group=1; fi
  container "$GYM_CONTAINER_IMAGE" gym
  for node in "${ENVIRONMENT_NODES[@]}"; do
    on "$group" "$node"
    ready+=("$LOG_DIR/environment-$node.urls")
    service "environment-$node" "${SRUN[@]}" "${CONTAINER[@]}" "$GYM_VENV/bin/python" environment_servers.py \
      --host "$(address_of "$node")" --port "$ENVIRONMENT_PORT" --servers "$ENVIRONMENT_SERVERS_PER_NODE" \
      --gym-venv "$GYM_VENV" --log-dir "$LOG_DIR" --ready-file "${ready[-1]}"
  done
  all_ready() { local file; for file in "${ready[@]}"; do [[ -s $file ]] || return 1; done; }
  STAGE='start the environment'
  until_ready "$ENVIRONMENT_START_S" "the environment" all_ready
  if $DRY_RUN; then
    NEMO_GYM_URL=http://$(address_of "${ENVIRONMENT_NODES[0]}"):$ENVIRONMENT_PORT
  else
    NEMO_GYM_URL=$(cat "${ready[@]}" | paste -sd, -)
  fi
  say "NEMO_GYM_URL=$NEMO_GYM_URL"
}

# What a node runs, with its own shell: PYTHON GPUS OPTIONS... Slurm sets the variables of every make of GPU, and verl
# refuses AMD's beside NVIDIA's (verl/single_controller/base/worker.py). A raylet gives its helpers 15 s to start, which a
# cold network file system can take: up to three starts, but none once Ray has run. The shell outlives a TERM: what Ray
# has started would otherwise lose its place in the step's tree, by which Slurm finds what to kill where it has no cgroups.
# shellcheck disable=SC2016
readonly RAY_ON_NODE='[[ -z ${CUDA_VISIBLE_DEVICES:-} ]] || unset ROCR_VISIBLE_DEVICES HIP_VISIBLE_DEVICES
told="" && trap told=1 TERM INT
for start in 1 2 3; do
  began=$SECONDS
  "$0" -m ray.scripts.scripts start --block --disable-usage-stats --num-gpus="$1" \
    --num-cpus="${SLURM_CPUS_ON_NODE:-$(nproc)}" --resources="{\"node_name:$SLURMD_NODENAME\": 1}" "${@:2}"
  status=$?
  [[ -z $told ]] && ((status != 0 && status < 128 && SECONDS - began < 120)) || exit "$status"
  echo "Ray did not start on $SLURMD_NODENAME (exit code $status, start $start of 3)"
done
exit 1'

start_ray() {
  local node
  STAGE='start Ray'
  container "$CONTAINER_IMAGE" train
  on 0 "$HEAD"
  service "ray-$HEAD" "${SRUN[@]}" "${CONTAINER[@]}" bash -c "$RAY_ON_NODE" "$TRAIN_PYTHON" "$GPUS_PER_NODE" \
    --head --node-ip-address="$HEAD_ADDRESS" --port="$RAY_PORT" --include-dashboard=false
  head_listens() { (exec 3<>"/dev/tcp/$HEAD_ADDRESS/$RAY_PORT") 2>/dev/null; }
  until_ready "$HEAD_START_S" "Ray's head at $HEAD_ADDRESS:$RAY_PORT" head_listens
  for node in "${NODES[@]:1}"; do
    on 0 "$node"
    service "ray-$node" "${SRUN[@]}" "${CONTAINER[@]}" bash -c "$RAY_ON_NODE" "$TRAIN_PYTHON" "$GPUS_PER_NODE" \
      --address="$HEAD_ADDRESS:$RAY_PORT"
  done
}

training_arguments() {
  local config=$TRAIN_CONFIG
  if [[ -z $config && ${#NODES[@]} == 1 ]]; then config=webvoyager_grpo_one_node; fi
  # Quotes are for Hydra: a path may hold what its grammar takes for more than text.
  ARGUMENTS=(--config-path="$RECIPE_DIR/configs" --config-name="${config:-webvoyager_grpo}"
    trainer.nnodes="${#NODES[@]}" trainer.n_gpus_per_node="$GPUS_PER_NODE"
    data.train_files="'$TRAIN_FILE'" data.val_files="'$VAL_FILE'"
    trainer.experiment_name="$RUN_NAME" trainer.default_local_dir="'$CHECKPOINTS'"
    trainer.validation_data_dir="'$RUN_DIR/validations'" hydra.run.dir="'$LOG_DIR/hydra'")
  if [[ -n $MODEL_PATH ]]; then ARGUMENTS+=(actor_rollout_ref.model.path="'$MODEL_PATH'"); fi
  ARGUMENTS+=("${OVERRIDES[@]}")
}

prepare() { # absolute paths, and what the steps find in their environment
  RESULTS_ROOT=$(realpath -m "$RESULTS_ROOT") TRAIN_FILE=$(realpath -m "$TRAIN_FILE") VAL_FILE=$(realpath -m "$VAL_FILE")
  GYM_VENV=$(realpath -m "$GYM_VENV")
  if [[ $TRAIN_PYTHON == */* ]]; then TRAIN_PYTHON=$(realpath -ms "$TRAIN_PYTHON"); fi
  if [[ -d $MODEL_PATH ]]; then MODEL_PATH=$(realpath "$MODEL_PATH"); fi
  RUN_DIR=$RESULTS_ROOT/$RUN_NAME CHECKPOINTS=$RESULTS_ROOT/$RUN_NAME/checkpoints
  LOG_DIR=$RUN_DIR/logs/job-$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}
  export NEMO_GYM_BROWSER_EPISODE_LOG_DIR=${NEMO_GYM_BROWSER_EPISODE_LOG_DIR:-$RUN_DIR/episodes}
  export PYTHONPATH=$RECIPE_DIR${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 HYDRA_FULL_ERROR=1
  # Ray takes commands from whoever reaches its ports: with a token, from this job alone.
  export RAY_AUTH_MODE=${RAY_AUTH_MODE:-token} RAY_AUTH_TOKEN=${RAY_AUTH_TOKEN:-$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')}
  # Ray 2.60 waits 30 s after a TERM for what Ray Serve has running; nothing here is served, and Slurm waits no longer.
  export RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=${RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S:-0}
  HEAD_ADDRESS=$(address_of "$HEAD")
  # Ray and a thousand sessions need more than the usual 1,024 open files; srun hands the limit on. Where it can't be
  # raised, the smoke check counts what it needs and says so.
  ulimit -Sn "$(ulimit -Hn)" || true
  # A driver of Ray that gets a TERM aborts, and would leave gigabytes of core beside the recipe at every scancel.
  ulimit -Sc 0
}

show_settings() { # the environment that a dry run would give to its commands
  local key value
  for key in "${KEYS[@]}" "${FOREIGN_KEYS[@]}" PYTHONPATH RAY_AUTH_MODE RAY_AUTH_TOKEN; do
    value=${!key}
    if [[ $key =~ $SECRET && -n $value ]]; then value='(not shown)'; fi
    printf '  %s=%s\n' "$key" "$(sed -E 's#(://)[^/@]*@#\1(not shown)@#g' <<<"$value")"
  done
}

main() {
  parse_arguments "$@"
  enter_recipe
  # shellcheck source=job_settings.sh
  source job_settings.sh
  # shellcheck source=job_steps.sh
  source job_steps.sh
  load_settings "$CONFIG_ENV"
  find_nodes
  prepare
  training_arguments
  say "run $RUN_NAME, job $SLURM_JOB_ID, attempt ${SLURM_RESTART_COUNT:-0}, nodes ${NODES[*]}"
  if $DRY_RUN; then show_settings; else take_run; fi

  local step=()
  container "$CONTAINER_IMAGE" train
  on 0 "$HEAD"
  step=("${SRUN[@]}" "${CONTAINER[@]}" "$TRAIN_PYTHON")
  run preflight "${step[@]}" preflight.py --nodes "${#NODES[@]}" -- "${ARGUMENTS[@]}" || exit 1
  start_environment
  run smoke "${step[@]}" smoke_environment.py --concurrency "${PREFLIGHT_SESSIONS:-$NEMO_GYM_BROWSER_MAX_OPEN_SESSIONS}" || exit 1
  if [[ -n $NEMO_GYM_BROWSER_JUDGE_URL ]]; then run judge "${step[@]}" judge.py --check || exit 1; fi
  start_ray
  run cluster "${step[@]}" cluster_check.py --address "$HEAD_ADDRESS:$RAY_PORT" --gpus-per-node "$GPUS_PER_NODE" \
    --timeout "$NODES_TIMEOUT_S" --nodes "${NODES[@]}" || exit 1
  export RAY_ADDRESS=$HEAD_ADDRESS:$RAY_PORT
  rm -f "$CHECKPOINTS/save_requested"
  TRAIN_STARTED=1
  run train "${step[@]}" -m verl.trainer.main_ppo "${ARGUMENTS[@]}"
}

trap 'SIGNAL=TERM' TERM
trap 'SIGNAL=INT' INT
trap 'SIGNAL=HUP' HUP
trap 'SIGNAL=USR1' USR1
trap finish EXIT
main "$@"
