#!/bin/sh
# Completes the base: Python with venv, an entry for the user, and a compiler for CUDA. Installs missing
# packages only, so a base without a package manager works if it already has them.
# usage: base.sh USER_ID [cuda]
set -eu
export PYTHONDONTWRITEBYTECODE=1  # install.py writes reproducible bytecode

wanted=""
python3 -c 'import ensurepip, venv' 2>/dev/null || wanted=" python3 python3-venv ca-certificates"
# Triton compiles launchers at run time and includes Python's headers.
if [ "${2:-}" = cuda ]; then
  command -v cc >/dev/null || wanted="$wanted gcc libc6-dev"
  headers='import pathlib, sysconfig, sys
sys.exit(not (pathlib.Path(sysconfig.get_path("include")) / "Python.h").is_file())'
  python3 -c "$headers" 2>/dev/null || wanted="$wanted python3-dev"
fi
if [ -n "$wanted" ]; then
  command -v apt-get >/dev/null || {
    echo "the base lacks$wanted and has no apt-get to install them; use another BASE" >&2
    exit 1
  }
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq
  # shellcheck disable=SC2086
  apt-get install -qq --yes --no-install-recommends $wanted
  apt-get clean
  rm -rf /var/lib/apt/lists/* /var/log/* /var/cache/ldconfig/aux-cache /var/cache/debconf/*-old
fi
# Libraries call getpass.getuser(), which fails for a user ID without a name.
grep -q "^[^:]*:[^:]*:$1:" /etc/passwd || echo "finetune:x:$1:$1::/tmp:/bin/sh" >>/etc/passwd
grep -q "^[^:]*:[^:]*:$1:" /etc/group || echo "finetune:x:$1:" >>/etc/group
