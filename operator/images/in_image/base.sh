#!/bin/sh
# Makes the base fit: Python with venv, a user's entry, and for CUDA a compiler. Nothing is installed
# where the base has it, so that a base without a package manager serves as well.
# usage: base.sh USER_ID [cuda]
set -eu
export PYTHONDONTWRITEBYTECODE=1  # install.py writes it, the same each time

wanted=""
python3 -c 'import ensurepip, venv' 2>/dev/null || wanted="python3 python3-venv ca-certificates"
# Triton compiles its launchers at run time, against Python's headers.
if [ "${2:-}" = cuda ]; then
  command -v cc >/dev/null || wanted="$wanted gcc libc6-dev"
  headers='import pathlib, sysconfig, sys
sys.exit(not (pathlib.Path(sysconfig.get_path("include")) / "Python.h").is_file())'
  python3 -c "$headers" 2>/dev/null || wanted="$wanted python3-dev"
fi
if [ -n "$wanted" ]; then
  command -v apt-get >/dev/null || {
    echo "the base lacks what comes with $wanted, and has no apt-get to install it" >&2
    exit 1
  }
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq
  # shellcheck disable=SC2086
  apt-get install -qq --yes --no-install-recommends $wanted
  apt-get clean
  rm -rf /var/lib/apt/lists/* /var/log/* /var/cache/ldconfig/aux-cache /var/cache/debconf/*-old
fi
# Libraries ask who they are: getpass.getuser() fails for a number without a name.
grep -q "^[^:]*:[^:]*:$1:" /etc/passwd || echo "finetune:x:$1:$1::/tmp:/bin/sh" >>/etc/passwd
grep -q "^[^:]*:[^:]*:$1:" /etc/group || echo "finetune:x:$1:" >>/etc/group
