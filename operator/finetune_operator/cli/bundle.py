"""Support bundle of `ftctl doctor --bundle`: a redacted archive for an issue.

`doctor`, `bundle_here` and `bundle_cluster` add files. Each text is cleaned when the archive is
written, so that no caller can forget to redact.
"""

import errno
import json
import os
import re
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import yaml

from finetune_operator import __version__
from finetune_operator.errors import FineTuneError
from finetune_trainer.config import redact

NUM_LINES = 200
MAX_LOGS = 50
MAX_BYTES = 1 << 18
"""Bytes of a log; a single line may be as long as the log."""

HIDDEN = "…"
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_HOMES = r"(?<![\w.])/(?:home|Users)/[^/\s'\":,]+"
_NOT_A_PERSON = ("", "root", "admin")
_SAMPLES = ("samplePrompts", "samples")
ALWAYS = (
    "Secrets, and the values of environment variables",
    "annotations and managed fields of objects; configurations of attempts, which hold a key",
    "rows of data sets, sample prompts and generated samples",
)
"""Data that no bundle contains."""


@dataclass
class Bundle:
    """Files of a bundle in memory, and the reasons why others are absent.

    Attributes:
        left_out: A sentence for each absent part.
        users: Names of the user on this machine and in the cluster.
    """

    files: dict[str, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    users: set[str] = field(
        default_factory=lambda: {os.environ.get(one, "") for one in ("USER", "LOGNAME")}
    )

    def add_objects(self, path: str, *objects: Any) -> None:
        """Add objects as YAML documents, without values of environment variables."""
        if not objects:
            return
        cleaned = [without_values(one) for one in objects]
        self.files[path] = yaml.safe_dump_all(
            cleaned, sort_keys=False, allow_unicode=True, width=float("inf")
        )

    def add_log(self, path: str, lines: list[str]) -> None:
        """Add the last lines of a log; events with generated samples are dropped."""
        kept = [text for line in lines if (text := _log_line(line)) is not None]
        self.files[path] = "".join(f"{line}\n" for line in kept[-NUM_LINES:])

    def clean(self, text: str) -> str:
        """Return a text without credentials, home folders and user names."""
        text = redact(_ANSI.sub("", text))
        home = str(Path.home())
        homes = _HOMES if home == "/" else rf"{re.escape(home)}(?![\w.-])|{_HOMES}"
        text = re.sub(homes, "~", text)
        names = [one for one in self.users if one not in _NOT_A_PERSON and ":" not in one]
        for name in sorted(names, key=len, reverse=True):
            text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "USER", text)
        return text

    def write(self, file: BinaryIO, title: str) -> None:
        """Write the archive, which begins with the list of its contents."""
        cleaned = {self.clean(path): self.clean(text) for path, text in sorted(self.files.items())}
        self.left_out = [self.clean(one) for one in self.left_out]
        contents = {"CONTENTS.md": _contents(self.clean(title), cleaned, self.left_out)}
        with tarfile.open(fileobj=file, mode="w:gz") as archive:
            for path, text in (contents | cleaned).items():
                data = text.encode()
                member = tarfile.TarInfo(f"bundle/{path}")
                member.size, member.mtime = len(data), int(datetime.now(UTC).timestamp())
                archive.addfile(member, BytesIO(data))


@contextmanager
def new_file(wanted: Path, job: str) -> Iterator[tuple[Path, BinaryIO]]:
    """Create the archive; the file is removed if the bundle fails.

    Args:
        wanted: Path of a new file, or a folder, in which the file is named after job and time.
        job: Name of the job; empty without a job.

    Raises:
        FineTuneError: the file exists, or cannot be created.
    """
    path = wanted
    if wanted.is_dir():
        path = wanted / f"ftctl-{job or 'doctor'}-{datetime.now(UTC):%Y%m%dT%H%M%SZ}.tar.gz"
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError as error:
        raise FineTuneError(f"--bundle {path} exists; name a new file or a folder") from error
    except OSError as error:
        raise FineTuneError(
            f"--bundle {path} cannot be created ({error.strerror}); name another file or folder"
        ) from error
    try:
        with open(descriptor, "wb") as file:
            yield path, file
    except BaseException as error:
        path.unlink()
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise FineTuneError(
                f"--bundle {path} cannot be written ({error.strerror}); name a file on another disk"
            ) from error
        raise


def without_values(value: Any, key: str = "") -> Any:
    """Return a JSON value with redacted texts, and only the names of environment variables."""
    if key == "env" and value:
        names = [one.get("name") if isinstance(one, dict) else one for one in value]
        return [{"name": name, "value": HIDDEN} for name in names]
    if key in _SAMPLES and isinstance(value, list):
        return [HIDDEN] * len(value)
    if isinstance(value, dict):
        kept = {one: part for one, part in value.items() if one != "managedFields"}
        if isinstance(kept.get("annotations"), dict):
            kept["annotations"] = dict.fromkeys(kept["annotations"], HIDDEN)
        return {one: without_values(part, one) for one, part in kept.items()}
    if isinstance(value, list):
        return [without_values(one) for one in value]
    if isinstance(value, str):
        return HIDDEN if redact(f"{key}=value").endswith(HIDDEN) else redact(_ANSI.sub("", value))
    return value


def _log_line(line: str) -> str | None:
    """Return a line, whose escaped texts are redacted if it is JSON; None for samples."""
    try:
        event = json.loads(line) if line.startswith("{") else None
    except ValueError:
        event = None
    if not isinstance(event, dict):
        return line
    if event.get("event") == "answered":
        return None
    return json.dumps(without_values(event), ensure_ascii=False)


def _contents(title: str, files: dict[str, str], left_out: list[str]) -> str:
    rows = [f"| {path} | {len(text.encode())} |" for path, text in files.items()]
    absent = [f"- {one}" for one in (*left_out, *ALWAYS)]
    replaced = f"Credentials are `{HIDDEN}`, home folders `~`, and the name of the user is `USER`."
    head = [f"# {title}", "", f"ftctl {__version__}, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC"]
    table = ["| file | bytes |", "|---|---|", *rows]
    return "\n".join([*head, "", *table, "", "Left out:", "", *absent, "", replaced, ""])
