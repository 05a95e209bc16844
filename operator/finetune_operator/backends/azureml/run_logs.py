"""Reads the logs of a run: the lines of one rank, and the nodes' termination messages.

Run history returns signed URLs of the log files. Anyone with such a URL can read the file, so the
URLs are not stored and not part of any message.
"""

import asyncio
import codecs
import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.alias_generators import to_camel

from finetune_operator.backends.azureml.names import NO_REPORT, Report, report_of
from finetune_operator.backends.azureml.runs import RunEnd
from finetune_operator.backends.azureml.states import row_of
from finetune_operator.backends.azureml.workspace_client import Workspace
from finetune_operator.backends.base import AttemptRef
from finetune_operator.backends.budget import Priority
from finetune_operator.backends.ranks import node_of
from finetune_operator.backends.redaction import without_secrets
from finetune_operator.errors import BackendError, TransientError
from finetune_trainer.config import Termination

_NODE = re.compile(r"(?:^|/)std_log(?:_process_(\d+))?\.txt$")
_RETRY = re.compile(r"(?:^|/)retry-(\d+)/")

_AGAIN_SECONDS = 5.0
_DETAILS_EACH = 3  # every third read refreshes the details
_CHUNK_BYTES = 1 << 20
_END_BYTES = 16 << 10  # a termination message has at most 4 KiB
_LINES_AFTER_LAST_WORDS = 20
_FILES_AT_ONCE = 4
_PATIENCE_SECONDS = 300.0


@dataclass(frozen=True)
class SignedUrl:
    """A URL with which anyone can read the file."""

    value: str = field(repr=False)


@dataclass(frozen=True)
class Details:
    """Record of a run in the run history.

    Attributes:
        state: State in Azure ML's spelling.
        end: Why it has ended.
        report: Contents of its tags.
        log_files: Signed URLs of the log files, by path.
    """

    state: str
    end: RunEnd
    report: Report
    log_files: Mapping[str, SignedUrl]

    @property
    def logs(self) -> dict[int, str]:
        """Path of each node's newest log, by the node's number."""
        newest: dict[int, tuple[int, str]] = {}
        for path in self.log_files:
            if (node := _NODE.search(path)) is not None:
                retry = _RETRY.search(path)
                one = (int(retry[1]) if retry else 0, path)
                number = int(node[1] or 0)
                newest[number] = max(newest.get(number, one), one)
        return {number: path for number, (_, path) in sorted(newest.items())}


async def read_details(
    workspace: Workspace, name: str, priority: Priority = Priority.READ
) -> Details:
    """Return the record of a run in the run history; one request.

    Raises:
        TransientError: There is no response.
        BackendError: The request is refused, or the response is not about a run.
    """
    path = f"/history/v1.0{{ws}}/runs/{name}/details"
    try:
        parsed = _History.model_validate(await workspace.get(path, priority=priority))
    except ValidationError:  # the error's text would contain the URLs
        text = "Azure ML's response to runs/details is not about a run; update this operator"
        raise BackendError(text) from None
    error = (parsed.error and parsed.error.error) or _RootError()
    by, creator = parsed.last_modified_by or _User(), parsed.created_by or _User()
    is_other = by != creator
    end = RunEnd(
        code=without_secrets(error.code or ""),
        text=without_secrets(error.message or ""),
        cancelled_by=without_secrets(by.user_name or "") if is_other else "",
        cancel_reason=without_secrets(parsed.cancelation_reason or ""),
    )
    files = {path: SignedUrl(url) for path, url in (parsed.log_files or {}).items()}
    return Details(parsed.status, end, report_of(parsed.tags or {}), files)


async def read_end(
    workspace: Workspace, name: str, *, is_last_try: bool
) -> tuple[RunEnd, Report, dict[int, Termination]]:
    """Return why a run has ended, the contents of its tags, and its nodes' termination messages.

    Args:
        workspace: Workspace of the run.
        name: Name of the run.
        is_last_try: Accept an incomplete result.

    Raises:
        BackendError: A part cannot be read; not at the last try.
    """
    try:
        details = await read_details(workspace, name, Priority.END)
    except BackendError as error:
        if not is_last_try:
            raise
        return RunEnd(text=f"the reason for its end cannot be read: {error}"), NO_REPORT, {}
    free = asyncio.Semaphore(_FILES_AT_ONCE)

    async def read(path: str) -> Termination | None:
        async with free:
            url = details.log_files[path].value
            try:
                end = await workspace.get_range(url, -_END_BYTES, _END_BYTES, Priority.END)
                return _last_words(end)
            except BackendError:
                if not is_last_try:
                    raise
                return None

    nodes = details.logs
    messages = await asyncio.gather(*(read(path) for path in nodes.values()))
    words = {node: one for node, one in zip(nodes, messages, strict=True) if one is not None}
    return details.end, details.report, words


async def read_log(
    workspace: Workspace, ref: AttemptRef, rank: int, follow: bool
) -> AsyncIterator[str]:
    """Yield the lines of the node that `rank` runs in; `follow` continues to the end of the run.

    If there is no log, the only line is a sentence about that. With `follow`, minutes without a
    response are tolerated.

    Raises:
        NoSuchRankError: The attempt has no such rank.
        TransientError: The log cannot be read now.
        BackendError: Azure ML refuses.
    """
    node, name = node_of(ref, rank), ref.handle.name.rpartition("/")[2]
    details, is_old = await read_details(workspace, name), False
    file, tries, now = _LogFile(""), 0, asyncio.get_running_loop().time
    heard = now()
    while True:
        wait = _AGAIN_SECONDS
        try:
            if is_old:
                details = await read_details(workspace, name)
            path = details.logs.get(node)
            if path is not None and path != file.path:
                if file.rest:
                    yield file.rest
                file = _LogFile(path)
            if path is not None:
                async for line in file.new_lines(workspace, details.log_files[path].value):
                    yield line
            if row_of(details.state).is_finished or not follow:
                break
            heard, tries = now(), tries + 1
            is_old = (
                path is None or tries % _DETAILS_EACH == 0
            )  # the state may have changed, and URLs expire
        except TransientError as error:
            wait = max(wait, error.retry_after or 0.0)
            if not follow or now() + wait - heard > _PATIENCE_SECONDS:
                raise
            is_old = True
        await asyncio.sleep(wait)
    if not file.path:
        yield f"rank {rank} of {name} has no log yet; Azure ML shows the job as {details.state}"
    elif file.rest:
        yield file.rest


class _LogFile:
    """A log, and the position up to which it was read.

    Attributes:
        path: Path of the file; empty before it exists. Each start of the run has its own file.
        rest: The incomplete last line.
    """

    def __init__(self, path: str) -> None:
        self.path, self.rest = path, ""
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    async def new_lines(self, workspace: Workspace, url: str) -> AsyncIterator[str]:
        """Yield the lines that were written since the last call."""
        while chunk := await workspace.get_range(url, self._offset, _CHUNK_BYTES):
            self._offset += len(chunk)
            *lines, self.rest = (self.rest + self._decoder.decode(chunk)).split("\n")
            for line in lines:
                yield line.removesuffix("\r")
            if len(chunk) < _CHUNK_BYTES:
                break


def _last_words(end: bytes) -> Termination | None:
    """Return the termination message at the end of a node's log; a few lines may follow it."""
    for line in reversed(end.rstrip().split(b"\n")[-_LINES_AFTER_LAST_WORDS - 1 :]):
        try:
            return Termination.model_validate_json(line)
        except ValidationError:
            continue
    return None  # the node was killed


class _Part(BaseModel):
    """Part of a response of the run history, which may contain further fields and nulls."""

    model_config = ConfigDict(frozen=True, extra="ignore", alias_generator=to_camel)


class _RootError(_Part):
    code: str | None = None
    message: str | None = None


class _Error(_Part):
    error: _RootError | None = None


class _User(_Part):
    user_object_id: str | None = None
    user_name: str | None = None


class _History(_Part):
    status: str
    error: _Error | None = None
    tags: dict[str, str] | None = None
    log_files: dict[str, str] | None = None
    created_by: _User | None = None
    last_modified_by: _User | None = None
    cancelation_reason: str | None = None
