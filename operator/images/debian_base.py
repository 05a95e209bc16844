"""A base image of Debian packages, for where no registry answers.

It has Python, certificates and what Debian calls essential, but neither apt nor documentation. Made
twice from the same packages it is the same, byte by byte.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from engines import EPOCH, EngineError

SUITE = "bookworm"
# libstdc++ is for torch and numpy; elsewhere it comes with apt.
PACKAGES = ("usr-is-merged", "python3", "python3-venv", "ca-certificates", "libstdc++6")
FOR_CUDA = ("gcc", "libc6-dev", "python3-dev")
NOT_SHIPPED = ("doc", "info", "locale", "man")
# Triggered by packages, with the time of the day in it, or only of use to apt.
_LEFT_BEHIND = "find {} -name __pycache__ -prune -exec rm -rf {{}} + ; rm -rf {}"


def make(folder: Path, *, compiler: bool, mirror: str, fresh: bool) -> Path:
    """Return a tar archive with the root of such a base; to make one needs root and mmdebstrap.

    Args:
        folder: Where it is, and stays.
        compiler: Whether it has a C compiler and Python's headers.
        mirror: Of Debian; empty takes Debian's own.
        fresh: Make it, although one is there.

    Raises:
        EngineError: mmdebstrap is not there, or failed.
    """
    options = _options(compiler)
    digest = hashlib.sha256(repr([*options, mirror]).encode()).hexdigest()
    archive = folder / f"base-{digest[:12]}.tar"
    if archive.exists() and not fresh:
        return archive
    if shutil.which("mmdebstrap") is None:
        raise EngineError(
            "no registry answers, and without mmdebstrap no base can be made of Debian packages: "
            "apt-get install mmdebstrap, or name a base that is here: make images BASE=…"
        )
    print("no registry answers: making a base of Debian packages", file=sys.stderr)
    new = archive.with_suffix(".new.tar")
    done = subprocess.run(
        ["mmdebstrap", *options, SUITE, str(new), *([mirror] if mirror else [])],
        env={**os.environ, "SOURCE_DATE_EPOCH": EPOCH},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        last = "\n".join(done.stderr.strip().splitlines()[-5:])
        raise EngineError(f"mmdebstrap failed (exit {done.returncode}):\n{last}")
    return new.rename(archive)


def _options(compiler: bool) -> list[str]:
    packages = PACKAGES + (FOR_CUDA if compiler else ())
    folders = '"$1"/usr/lib/python3* "$1"/usr/share/python3'
    rest = '"$1"/var/cache/ldconfig/aux-cache "$1"/var/cache/debconf/*-old "$1"/var/log/*'
    return [
        *("--quiet", "--variant=essential", f"--include={','.join(packages)}"),
        # Else Debian 12 installs usrmerge, and with it all of perl.
        "--hook-dir=/usr/share/mmdebstrap/hooks/merged-usr",
        *(f"--dpkgopt=path-exclude=/usr/share/{one}/*" for one in NOT_SHIPPED),
        "--dpkgopt=path-include=/usr/share/doc/*/copyright",
        f"--customize-hook={_LEFT_BEHIND.format(folders, rest)}",
    ]
