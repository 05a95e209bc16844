#!/bin/sh
# Creates /tools, an environment with pip and the build backend of tools.lock.
set -eu
python3 -m venv /tools
for one in PIP_CONFIG_FILE=/run/secrets/pip.conf PIP_CERT=/run/secrets/ca.pem; do
  # pip fails if either names a missing file, and both secrets are optional.
  if [ -f "${one#*=}" ]; then export "${one?}"; fi
done
/tools/bin/python -m pip install --quiet --no-cache-dir --disable-pip-version-check \
  --only-binary=:all: --find-links /wheels --require-hashes -r /tools.lock
