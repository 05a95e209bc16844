"""Start each node of an attempt exactly once, however often it is called or killed.

Called by `LocalBackend.submit`. The order is: record of the attempt, configuration, nodes. A node's
lock is taken before its process exists, and that process holds it until it dies. At any moment a
node is therefore in exactly one state: not started, alive, or ended.
"""

import errno
import json
import os
import secrets
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from finetune_operator.backends.base import Request
from finetune_operator.backends.local import locks, records, trackers
from finetune_operator.backends.local.environment import ENV_MARK, mark, passed_on
from finetune_operator.backends.local.layout import AttemptFolder
from finetune_operator.backends.local.records import AttemptRecord
from finetune_operator.errors import AlreadyOwnedError, BackendError, TransientError
from finetune_trainer.config import ENV_RDZV_ENDPOINT

LAUNCHER = "finetune_operator.backends.local.launch"
# Below the ports that the kernel assigns, which begin at 32768 (ip_local_port_range in ip(7)).
_FIRST_PORT, _NUM_PORTS = 10_000, 10_000


def start(request: Request, folder: AttemptFolder, environ: Mapping[str, str]) -> str:
    """Start the nodes of `request` that were never started, and return the attempt's uid.

    The nodes inherit part of `environ`, the caller's environment.

    Raises:
        AlreadyOwnedError: The folder contains another job's attempt, which is left unchanged.
        TransientError: Another process is submitting it.
        BackendError: A file cannot be written, or a process cannot be started.
    """
    attempt, config, *nodes = request.objects
    environment = passed_on(environ)
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
        with locks.held(folder.lock) as is_mine:
            if not is_mine:
                raise TransientError(f"{folder.path} is being submitted by another process")
            record = _claim(folder, AttemptRecord.model_validate(attempt["content"]))
            if not folder.config.exists():
                text = json.dumps(config["content"], indent=2, ensure_ascii=False) + "\n"
                records.write_text(folder.config, text)
            was_stopped = folder.cancel.exists()  # perhaps before its nodes started
            for rank, node in enumerate(nodes):
                if not was_stopped and not folder.node(rank).exists():
                    own = {**environment, **trackers.variables(config["content"], rank, environ)}
                    _start_node(folder, rank, node, _complete(own, node, record))
    except OSError as error:
        raise BackendError(
            f"{folder.path} cannot be used for attempt {request.attempt} ({error}); make room or "
            "choose another spec.backend.local.runDirectory"
        ) from error
    return record.uid


def _claim(folder: AttemptFolder, wanted: AttemptRecord) -> AttemptRecord:
    """Return the attempt's record, after writing `wanted` if there was none."""
    there = records.read(folder.attempt, AttemptRecord)
    if there is None:
        if wanted.nodes > 1:
            endpoint = f"127.0.0.1:{_free_port()}"
            wanted = wanted.model_copy(update={"rendezvous": endpoint})
        records.write(folder.attempt, wanted)
        return wanted
    if there.uid != wanted.uid:
        raise AlreadyOwnedError(
            f"{folder.path} holds attempt {there.uid}, not {wanted.uid}; set another "
            "spec.backend.local.runDirectory, or move the old run aside with --fresh"
        )
    return there


def _complete(
    environment: Mapping[str, str], node: Mapping[str, Any], record: AttemptRecord
) -> dict[str, str]:
    """Add the request's variables and the rendezvous to the environment from the caller."""
    variables = {**environment, **node["environment"], ENV_MARK: mark(record.uid, node["node"])}
    if record.rendezvous is not None:
        variables[ENV_RDZV_ENDPOINT] = record.rendezvous
    return variables


def _start_node(
    folder: AttemptFolder, rank: int, node: Mapping[str, Any], environment: Mapping[str, str]
) -> None:
    lock = locks.opened(folder.node_lock(rank))
    try:
        if not locks.take(lock):
            return  # it was started, and is about to write its record
        if folder.node(rank).exists():
            return  # it was started, and has ended
        # The launcher inherits the lock and retains it over its exec; the trainer closes it in its
        # ranks.
        os.set_inheritable(lock, True)
        launcher = [sys.executable, "-P", "-m", LAUNCHER]
        command = [*launcher, str(folder.node(rank)), str(folder.run_dir)]
        os.posix_spawn(
            sys.executable,
            [*command, *node["command"]],
            environment,
            file_actions=_streams(Path(node["log"])),
            setsid=True,
            setsigdef=(signal.SIGPIPE,),  # Python ignores it, and children would inherit that
        )
    finally:
        os.close(lock)


def _streams(log: Path) -> list[tuple[Any, ...]]:
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    return [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, str(log), flags, 0o644),
        (os.POSIX_SPAWN_DUP2, 1, 2),
    ]


def _free_port() -> int:
    """Return a port without a listener, outside the range that the kernel assigns.

    Node 0 binds it only after its process has started, and a socket opened meanwhile may get a port
    of the kernel's range.
    """
    while True:
        port = _FIRST_PORT + secrets.randbelow(_NUM_PORTS)
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            return port
