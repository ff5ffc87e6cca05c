#!/usr/bin/env bash
# Installs what the program needs from the distribution's packages: Debian 12 and 13, Ubuntu 24.04.
#   bash scripts/install.sh build [test] [slurm] [reference] [PACKAGE...]
# build: compiler, oneDNN, MPI, cJSON. test: cmocka and pytest, clang for fuzzing. slurm: the daemons, for the tests of
# jobs on many nodes; no service is started. reference: PyTorch, for the full tests.
# What is installed already is not touched; then neither the network nor root is needed.
set -euo pipefail

packages=()
for word in "$@"; do
  case $word in
    build) packages+=(gcc make pkg-config libc6-dev libdnnl-dev libopenmpi-dev openmpi-bin libcjson-dev) ;;
    test) packages+=(g++ libcmocka-dev python3 python3-pytest clang libclang-rt-dev) ;;
    slurm) packages+=(slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge iproute2) ;;
    reference) packages+=(python3-torch python3-numpy python3-pip python3-venv) ;;
    *) packages+=("$word") ;;
  esac
done

missing=()
for package in "${packages[@]}"; do
  [ "$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null || true)" = installed ] || missing+=("$package")
done
[ ${#missing[@]} -gt 0 ] || exit 0

if ! command -v apt-get >/dev/null; then
  echo "These packages are needed (Debian's names): ${missing[*]}" >&2
  echo "There is no apt-get here: install them by hand, then run this again." >&2
  exit 2
fi
as_root=()
if [ "$(id -u)" != 0 ]; then
  command -v sudo >/dev/null || { echo "Needs root to install: ${missing[*]}" >&2; exit 2; }
  as_root=(sudo)
fi
echo "Installing with apt-get: ${missing[*]}"
log=$(mktemp)
# Packages with a daemon start it on installation, unless this file says no. The tests start their own.
policy=/usr/sbin/policy-rc.d
case " ${missing[*]} " in *" munge "* | *" slurmctld "* | *" slurmd "*) ;; *) policy='' ;; esac
[ ! -e "$policy" ] || policy=''
cleanup() {
  rm -f "$log"
  [ -z "$policy" ] || "${as_root[@]}" rm -f "$policy"
}
trap cleanup EXIT
[ -z "$policy" ] || printf '#!/bin/sh\nexit 101\n' | "${as_root[@]}" install -m 755 /dev/stdin "$policy"
apt_install() {
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -q -y --no-install-recommends install "${missing[@]}"
}
# The lists of packages may be missing or old on a fresh machine.
if ! "${as_root[@]}" apt-get -q update >"$log" 2>&1 || ! apt_install >>"$log" 2>&1; then
  tail -n 20 "$log" >&2
  echo "Could not install: ${missing[*]}" >&2
  exit 2
fi
