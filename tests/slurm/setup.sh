#!/usr/bin/env bash
# Installs what the tests in tests/slurm need beside .venv: Slurm, the tools that make namespaces, a C compiler.
#
#   tests/slurm/setup.sh
#
# Does nothing when all of it is there. Otherwise it is installed with apt by root (20 MB); anyone else is told what is
# missing. The tests themselves need root, and no daemon of the system: each run starts a cluster of its own.
set -euo pipefail

# A command that shows that its package is there, and the package as Debian and Ubuntu name it.
readonly COMMANDS="slurmctld:slurmctld slurmd:slurmd sbatch:slurm-client ip:iproute2 unshare:util-linux
  nsenter:util-linux setpriv:util-linux gcc:gcc"
readonly SPANK_HEADER=slurm/spank.h SPANK_PACKAGE=libslurm-dev C_LIBRARY_PACKAGE=libc6-dev
PATH=$PATH:/usr/sbin:/sbin

die() {
  printf 'tests/slurm/setup.sh: error: %s\n' "$*" >&2
  exit 1
}

missing_packages() {
  local pair
  for pair in $COMMANDS; do
    command -v "${pair%%:*}" >/dev/null || printf '%s\n' "${pair#*:}"
  done
  if ! printf '#include <%s>\n' stdlib.h | gcc -E -o /dev/null - 2>/dev/null; then echo "$C_LIBRARY_PACKAGE"; fi
  if ! printf '#include <%s>\n' "$SPANK_HEADER" | gcc -E -o /dev/null - 2>/dev/null; then echo "$SPANK_PACKAGE"; fi
}

(($# == 0)) || die "takes no arguments; got: $*"
[[ $(uname -s) == Linux ]] || die "the cluster of the tests is made of Linux namespaces; this is $(uname -s)"
mapfile -t missing < <(missing_packages | sort -u)
((${#missing[@]})) || exit 0

if [[ $(id -u) != 0 ]] || ! command -v apt-get >/dev/null; then
  die "missing: ${missing[*]} (Debian's names); install them, or run this as root on a system with apt"
fi
printf 'setup: installing %s\n' "${missing[*]}"
# A lock that another installer holds is waited for.
apt=(apt-get -qq -o DPkg::Lock::Timeout=120)
log=$(mktemp)
trap 'rm -f "$log"' EXIT
if ! { "${apt[@]}" update && DEBIAN_FRONTEND=noninteractive "${apt[@]}" install -y --no-install-recommends \
  "${missing[@]}"; } >"$log" 2>&1; then
  cat "$log" >&2
  die "apt could not install ${missing[*]}: see above"
fi
mapfile -t missing < <(missing_packages | sort -u)
((${#missing[@]} == 0)) || die "still missing after apt installed it: ${missing[*]}"
