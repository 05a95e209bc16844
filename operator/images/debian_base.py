"""A base image of Debian packages, for where no registry answers.

It has Python, certificates and what Debian calls essential, but neither apt nor documentation. Made
twice from the same packages it is the same, byte by byte.
"""

import os
import shutil
import subprocess
from pathlib import Path

from engines import EPOCH, EngineError

SUITE = "bookworm"
PACKAGES = ("usr-is-merged", "python3", "python3-venv", "ca-certificates")
FOR_CUDA = ("gcc", "libc6-dev", "python3-dev")
NOT_SHIPPED = ("doc", "info", "locale", "man")
# Triggered by packages, with the time of the day in it, or only of use to apt.
_LEFT_BEHIND = "find {} -name __pycache__ -prune -exec rm -rf {{}} + ; rm -rf {}"


def make(archive: Path, *, compiler: bool = False, mirror: str = "") -> None:
    """Write the root of such a base as a tar archive; needs root and mmdebstrap.

    Args:
        archive: The file to write.
        compiler: Whether it has a C compiler and Python's headers.
        mirror: Of Debian; empty takes Debian's own.

    Raises:
        EngineError: mmdebstrap is not there, or failed.
    """
    if shutil.which("mmdebstrap") is None:
        raise EngineError(
            "no registry answers, and without mmdebstrap no base can be made of Debian packages: "
            "apt-get install mmdebstrap, or name a base that is here: make images BASE=…"
        )
    packages = PACKAGES + (FOR_CUDA if compiler else ())
    excluded = [f"--dpkgopt=path-exclude=/usr/share/{one}/*" for one in NOT_SHIPPED]
    excluded.append("--dpkgopt=path-include=/usr/share/doc/*/copyright")
    folders = '"$1"/usr/lib/python3* "$1"/usr/share/python3'
    rest = '"$1"/var/cache/ldconfig/aux-cache "$1"/var/cache/debconf/*-old "$1"/var/log/*'
    command = [
        *("mmdebstrap", "--quiet", "--variant=essential", f"--include={','.join(packages)}"),
        # Else Debian 12 installs usrmerge, and with it all of perl.
        "--hook-dir=/usr/share/mmdebstrap/hooks/merged-usr",
        *excluded,
        f"--customize-hook={_LEFT_BEHIND.format(folders, rest)}",
        *(SUITE, str(archive), *([mirror] if mirror else [])),
    ]
    environ = {**os.environ, "SOURCE_DATE_EPOCH": EPOCH}
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    if done.returncode:
        last = "\n".join(done.stderr.strip().splitlines()[-5:])
        raise EngineError(f"mmdebstrap failed (exit {done.returncode}):\n{last}")
