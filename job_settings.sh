# Settings of a job: config.env and the environment, for submit_webvoyager.sh, which sources this file.
# shellcheck shell=bash

readonly REQUIRED=(RUN_NAME RESULTS_ROOT TRAIN_FILE VAL_FILE)
# Variables of others that config.env may set; any other unknown key there is a mistake.
readonly FOREIGN='^(NCCL|HF|WANDB|VLLM|VERL|RAY|TORCH|PYTORCH|CUDA|OMP|GLOO|UCX|MLFLOW|TENSORBOARD|TRANSFORMERS|HYDRA|PYTHON)_|_(proxy|PROXY)$|^(FI_.*|DO_NOT_TRACK|TMPDIR|PATH|LD_LIBRARY_PATH)$'
# shellcheck disable=SC2034 # for submit_webvoyager.sh
readonly SECRET='(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)$'

declare -gA DEFAULTS=() # -g: this file is sourced by a function
KEYS=() FOREIGN_KEYS=() PROBLEMS=()

unquoted() { # TEXT: prints the value that the right-hand side of KEY=... stands for; fails on what a shell would expand
  local text=$1 plain='^([^[:space:]"'\''$`\\;&|<>()]*)([[:space:]]+#.*)?[[:space:]]*$'
  local single="^'([^']*)'[[:space:]]*(#.*)?\$" double='^"([^"$`\\]*)"[[:space:]]*(#.*)?$'
  if [[ $text =~ $plain ]]; then
    text=${BASH_REMATCH[1]}
    # shellcheck disable=SC2088 # the file's tilde, which no shell has seen
    if [[ ${text:0:2} == "~/" ]]; then text=$HOME/${text:2}; fi
  elif [[ $text =~ $single || $text =~ $double ]]; then
    text=${BASH_REMATCH[1]}
  else
    return 1
  fi
  printf '%s' "$text"
}

read_config() { # FILE NAME_OF_ARRAY: fill the associative array with the file's keys, and PROBLEMS with its faults
  local -n into=$2
  local line key value number=0
  while IFS= read -r line || [[ -n $line ]]; do
    number=$((number + 1))
    if [[ $line =~ ^[[:space:]]*(#.*)?$ ]]; then continue; fi
    # The line itself is not shown: it may hold a key.
    if ! [[ $line =~ ^(export[[:space:]]+)?([A-Za-z_][A-Za-z0-9_]*)=(.*)$ ]]; then
      PROBLEMS+=("$1:$number: not a line KEY=value, without spaces around the =")
      continue
    fi
    key=${BASH_REMATCH[2]}
    if ! value=$(unquoted "${BASH_REMATCH[3]}"); then
      PROBLEMS+=("$1:$number: $key: put the value in single quotes; nothing is expanded in it")
    elif [[ -n ${into[$key]+set} ]]; then
      PROBLEMS+=("$1:$number: $key is set a second time; leave one of the two")
    else
      into["$key"]=$value
      if [[ $2 == DEFAULTS ]]; then KEYS+=("$key"); fi
    fi
  done <"$1"
}

load_settings() { # FILE: export every setting, from the environment, the file, or the template's default, in this order
  local file=$1 key value from_environment=()
  declare -A given=()
  read_config config.env.example DEFAULTS
  [[ -r $file ]] || die 2 "$PWD: no file $file; copy config.env.example to config.env and fill it in, or name yours with --config-env"
  read_config "$file" given
  for key in "${!given[@]}"; do
    if [[ -n ${DEFAULTS[$key]+set} ]]; then continue; fi
    if [[ $key =~ $FOREIGN ]]; then
      if [[ -z ${!key-} ]]; then export "$key=${given[$key]}"; fi
      FOREIGN_KEYS+=("$key")
    else
      PROBLEMS+=("$file: $key: no such setting; config.env.example lists them all")
    fi
  done
  for key in "${KEYS[@]}"; do
    value=${!key-}
    if [[ -n $value && $value != "${given[$key]:-${DEFAULTS[$key]}}" ]]; then from_environment+=("$key"); fi
    if [[ -z $value ]]; then value=${given[$key]:-${DEFAULTS[$key]}}; fi
    export "$key=$value"
  done
  for key in "${REQUIRED[@]}"; do
    if [[ -z ${!key} ]]; then PROBLEMS+=("$file: $key is not set"); fi
  done
  if [[ -n $NEMO_GYM_URL && -n $START_ENVIRONMENT ]]; then
    PROBLEMS+=("$file: NEMO_GYM_URL and START_ENVIRONMENT are both set; leave one of them empty")
  elif [[ -z $NEMO_GYM_URL && -z $START_ENVIRONMENT ]]; then
    PROBLEMS+=("$file: neither NEMO_GYM_URL nor START_ENVIRONMENT is set: where are the browsers?")
  fi
  # The names of folders, and numbers that are used before preflight.py looks at them all.
  [[ -z $RUN_NAME || $RUN_NAME =~ ^[A-Za-z0-9][A-Za-z0-9._-]*$ ]] || PROBLEMS+=("$file: RUN_NAME=$RUN_NAME: letters, digits, . _ - only")
  for key in GPUS_PER_NODE RAY_PORT ENVIRONMENT_PORT ENVIRONMENT_SERVERS_PER_NODE NEMO_GYM_BROWSER_MAX_OPEN_SESSIONS \
    NEMO_GYM_BROWSER_MAX_CONCURRENT_SEEDS; do
    [[ ${!key} =~ ^[1-9][0-9]*$ ]] || PROBLEMS+=("$file: $key=${!key}: must be a whole number of at least 1")
  done
  [[ $START_ENVIRONMENT =~ ^(|head|cpu-nodes)$ ]] || PROBLEMS+=("$file: START_ENVIRONMENT=$START_ENVIRONMENT: head, cpu-nodes, or empty")
  if ((${#PROBLEMS[@]})); then
    printf '  %s\n' "${PROBLEMS[@]}" >&2
    die 2 "${#PROBLEMS[@]} problem(s) in the settings; nothing was started"
  fi
  if ((${#from_environment[@]})); then say "from the environment, not from $file: ${from_environment[*]}"; fi
}
