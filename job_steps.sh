# Steps of a job: what submit_webvoyager.sh starts, watches and stops; it sources this file.
# Uses its variables DRY_RUN, LOG_DIR, CHECKPOINTS, and sets STAGE, SERVICES and CHILDREN. A signal that came is in SIGNAL.
# shellcheck shell=bash

readonly POLL_S=0.5 STOP_GRACE_S=20 LIMIT_RESERVE_S=60 SHOWN_LINES=20

pause() { # in the background, since bash runs a trap only once its foreground child has ended; a trap ends the wait early
  sleep "$POLL_S" &
  wait "$!" || true
}

show() { # COMMAND...: print it as it could be typed
  printf ' '
  printf ' %q' "$@"
  printf '\n'
}

service() { # NAME COMMAND...: start something that must live until the end; its output goes to a log of its own
  local name=$1
  shift
  say "starting $name (log: $LOG_DIR/$name.log)"
  if $DRY_RUN; then
    show "$@"
    return
  fi
  "$@" >>"$LOG_DIR/$name.log" 2>&1 </dev/null &
  SERVICES["$name"]=$!
  CHILDREN+=("$!")
}

look_at_services() { # die if one has ended
  local name
  for name in "${!SERVICES[@]}"; do
    if ! kill -0 "${SERVICES[$name]}" 2>/dev/null && [[ -z $SIGNAL ]]; then
      tail -n "$SHOWN_LINES" "$LOG_DIR/$name.log" >&2 || true # what is to be said comes below, log or no log
      die 1 "$name has ended by itself while: $STAGE (the end of $LOG_DIR/$name.log is above)"
    fi
  done
}

until_ready() { # TIMEOUT_S WHAT COMMAND...: poll until the command succeeds
  local deadline=$((SECONDS + $1)) what=$2
  shift 2
  if $DRY_RUN; then return; fi
  until "$@"; do
    look_at_services
    stop_if_told
    ((SECONDS < deadline)) || die 1 "$what is not there after $((SECONDS - deadline + $1)) s; see the logs in $LOG_DIR"
    pause
  done
}

run() { # NAME COMMAND...: run it to its end, shown and logged; returns its exit code
  local name=$1 pid status=0
  shift
  STAGE=$name
  say "$name"
  if $DRY_RUN; then
    show "$@"
    return
  fi
  "$@" > >(trap '' TERM INT && exec tee -a "$LOG_DIR/$name.log") 2>&1 </dev/null &
  pid=$!
  CHILDREN+=("$pid")
  while kill -0 "$pid" 2>/dev/null; do
    look_at_services
    if [[ $SIGNAL == USR1 && $name == train ]]; then wait_for_checkpoint "$pid"; fi
    stop_if_told
    pause
  done
  wait "$pid" || status=$?
  stop_if_told
  return "$status"
}

stop_if_told() { # leave, if a signal has come
  case $SIGNAL in
    '') ;;
    USR1) exit 124 ;;
    *) exit $((128 + $(kill -l "$SIGNAL"))) ;;
  esac
}

last_step() { cat "$CHECKPOINTS/latest_checkpointed_iteration.txt" 2>/dev/null || printf 'none'; }

wait_for_checkpoint() { # PID: have the running step saved, as far as the time limit allows
  local before end deadline
  before=$(last_step)
  end=$(scontrol show job --oneliner "$SLURM_JOB_ID" | grep -oE ' EndTime=[0-9T:-]+' | head -n 1) || end=''
  # Without a limit somebody has sent the signal by hand: an hour is enough for any step.
  end=$(date -d "${end#*=}" +%s 2>/dev/null || date -d '+1 hour' +%s)
  deadline=$((end - LIMIT_RESERVE_S))
  say "the time limit is near: asking for a checkpoint after the running step (the last one: step $before)"
  mkdir -p "$CHECKPOINTS" && touch "$CHECKPOINTS/save_requested"
  while kill -0 "$1" 2>/dev/null && [[ $(last_step) == "$before" ]] && (($(date +%s) < deadline)); do
    look_at_services
    if [[ $SIGNAL != USR1 ]]; then return; fi
    pause
  done
  say "the last checkpoint is of step $(last_step)"
}

stop_all() { # TERM to what the steps run, KILL to what is left of them
  local pid deadline=$((SECONDS + STOP_GRACE_S)) alive job
  # Through Slurm: a TERM to an srun has its step killed at once, and the environment's browsers would be left to themselves.
  # It fails where no step runs any more, and so does a signal to an srun that has just ended.
  for job in "$SLURM_JOB_ID" ${SLURM_JOB_ID_HET_GROUP_1:-}; do scancel --quiet --signal=TERM "$job" 2>/dev/null || true; done
  while :; do
    alive=()
    for pid in "${CHILDREN[@]}"; do
      if kill -0 "$pid" 2>/dev/null; then alive+=("$pid"); fi
    done
    if ((${#alive[@]} == 0)); then return 0; fi
    ((SECONDS < deadline)) || break
    pause
  done
  kill -TERM "${alive[@]}" 2>/dev/null || true
}
