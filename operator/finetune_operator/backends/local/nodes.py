"""Observe an attempt's nodes, and kill them after their grace period.

Called by `LocalBackend.observe` and `cancel`; it never waits. Because this machine has no kubelet,
an observation also performs overdue actions: the kill after the grace period, and the kill of
processes that outlived their node's main process.
"""

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from pydantic import ValidationError

from finetune_operator.backends.base import AttemptPhase, Handle, Observation
from finetune_operator.backends.local import locks, proc, records
from finetune_operator.backends.local.environment import ENV_MARK, mark
from finetune_operator.backends.local.layout import AttemptFolder
from finetune_operator.backends.local.records import (
    AttemptRecord,
    CancelRecord,
    ExitRecord,
    NodeRecord,
)
from finetune_operator.backends.root_cause import (
    STOPPED_BY_SIGNAL,
    TERMINATED,
    root_cause_order,
    stopped_by_signal,
    with_seen_exit_code,
)
from finetune_trainer.config import (
    ExitCode,
    FailureClass,
    Phase,
    Progress,
    Termination,
    read_progress,
)

SOON_SECONDS = 0.1
STEADY_SECONDS = 0.5
_STEADY_PHASES = frozenset({Phase.TRAINING, Phase.EVALUATING, Phase.ANSWERING, Phase.TOKENIZING})


class NodeState(StrEnum):
    """State of a node's main process."""

    STARTING = "Starting"  # its process exists and has not written its record yet
    ALIVE = "Alive"
    ENDED = "Ended"


@dataclass(frozen=True)
class Node:
    """The current state of a node.

    Attributes:
        rank: Its number, from 0.
        process: Its main process; None before its record exists, and if it was never started.
        termination: How it ended, after its end.
        is_victim: Whether it ended because it was stopped.
    """

    rank: int
    state: NodeState
    process: proc.Process | None = None
    termination: Termination | None = None
    is_victim: bool = False


def owned(folder: AttemptFolder, handle: Handle) -> AttemptRecord | None:
    """Return the attempt's record if the folder still holds the attempt that `handle` names."""
    record = records.read(folder.attempt, AttemptRecord)
    return record if record is not None and record.uid == handle.uid else None


def observation_of(folder: AttemptFolder, handle: Handle, now: float) -> Observation:
    """Return the observation of the attempt at `now` (seconds since the epoch)."""
    record = owned(folder, handle)
    if record is None:
        alive = proc.marked(ENV_MARK, mark(handle.uid))
        return Observation(
            AttemptPhase.FAILED if alive else AttemptPhase.UNKNOWN,
            all_gone=not alive,
            message=f"{folder.path} no longer holds attempt {handle.uid}",
            requeue_seconds=SOON_SECONDS,
        )
    enforce(folder, record, now)
    nodes = observe_nodes(folder, record)
    ended = [node for node in nodes if node.state is NodeState.ENDED]
    are_clean = [end_strays(record, node) for node in ended]
    progress, complaint = _progress(folder)
    cause = _root_cause(ended)
    phase = _phase(nodes)
    failed = phase is AttemptPhase.FAILED
    return Observation(
        phase=phase,
        all_gone=len(ended) == record.nodes and all(are_clean),
        nodes_ready=sum(node.state is NodeState.ALIVE for node in nodes),
        termination=cause.termination if cause and phase is not AttemptPhase.RUNNING else None,
        progress=progress,
        node=f"node-{cause.rank}" if cause and failed else "",
        message=cause.termination.message if cause and cause.termination and failed else complaint,
        requeue_seconds=_requeue_seconds(folder, nodes, progress),
    )


def observe_nodes(folder: AttemptFolder, record: AttemptRecord) -> list[Node]:
    """Return every node of the attempt as it is now."""
    cancel = records.read(folder.cancel, CancelRecord)
    return [_node(folder, rank, cancel) for rank in range(record.nodes)]


def send(record: AttemptRecord, nodes: Sequence[Node], number: signal.Signals) -> None:
    """Send a signal to the main process of every node that runs."""
    for node in nodes:
        if node.state is NodeState.ALIVE and node.process is not None:
            node.process.send(number)
        elif node.state is NodeState.STARTING:
            for process in proc.marked(ENV_MARK, mark(record.uid, node.rank)):
                process.send(number)


def enforce(folder: AttemptFolder, record: AttemptRecord, now: float) -> None:
    """Kill processes that still run after the deadline on disk, the end of the grace period."""
    cancel = records.read(folder.cancel, CancelRecord)
    if cancel is None or now < cancel.deadline:
        return
    running = [node for node in observe_nodes(folder, record) if node.state is not NodeState.ENDED]
    if running:
        records.write(folder.cancel, cancel.model_copy(update={"was_enforced": True}))
        send(record, running, signal.SIGKILL)


def end_strays(record: AttemptRecord, node: Node) -> bool:
    """Kill processes that outlived their node's main process; return whether there were none.

    The kernel kills ranks with their parent, so such processes exist only if that failed.
    """
    strays = proc.marked(ENV_MARK, mark(record.uid, node.rank))
    for process in strays:
        process.send(signal.SIGKILL)
    return not strays


def _node(folder: AttemptFolder, rank: int, cancel: CancelRecord | None) -> Node:
    record = records.read(folder.node(rank), NodeRecord)
    if record is None:
        if _is_about_to_start(folder, rank):
            return Node(rank, NodeState.STARTING)
        # The lock is held from before the process exists until it dies. Now the lock is free, so
        # no process can still write a record.
        record = records.read(folder.node(rank), NodeRecord)
    if record is None:
        failure, code = FailureClass.ERROR, 1
        text = f"node {rank} could not be started; see {folder.log(rank)}"
        if cancel is not None:
            failure, code = FailureClass.PREEMPTED, TERMINATED
            text = f"node {rank} was stopped before it had begun"
        ended = Termination(failure_class=failure, exit_code=code, message=text)
        return Node(rank, NodeState.ENDED, termination=ended, is_victim=cancel is not None)
    process = proc.Process(record.pid, record.start_time, record.boot_id)
    if process.is_alive():
        return Node(rank, NodeState.ALIVE, process)
    ended = _termination(folder, rank, record.pid, cancel)
    killed = cancel is not None and cancel.was_enforced and ended.exit_code == ExitCode.KILLED
    stopped = cancel is not None and ended.exit_code == TERMINATED
    return Node(rank, NodeState.ENDED, process, ended, is_victim=killed or stopped)


def _is_about_to_start(folder: AttemptFolder, rank: int) -> bool:
    """Return whether the node's process exists, or may be starting."""
    with locks.held(folder.lock) as is_free:
        if not is_free:
            return True
        with locks.held(folder.node_lock(rank)) as is_free:
            return not is_free


def _termination(
    folder: AttemptFolder, rank: int, pid: int, cancel: CancelRecord | None
) -> Termination:
    """Combine the node's termination message with its exit code, if known."""
    termination: Termination | None = None
    doubt = ""
    try:
        termination = Termination.read(folder.termination(rank))
    except FileNotFoundError:
        doubt = "without a termination message"
    except ValidationError as error:
        doubt = f"and its termination message cannot be read ({error.errors()[0]['msg']})"
    code = _exit_code(folder, rank, pid)
    if termination is not None:
        return (
            termination if code is None else with_seen_exit_code(f"node {rank}", termination, code)
        )
    return _without_message(rank, code, doubt, folder, cancel)


def _without_message(
    rank: int, code: int | None, doubt: str, folder: AttemptFolder, cancel: CancelRecord | None
) -> Termination:
    """Return the termination of a node that left no message.

    A node without an exit code was killed, because it would otherwise have written a message. This
    is also assumed after a cancel, which another node's failure may have caused.
    """
    code = ExitCode.KILLED if code is None else code
    if code in STOPPED_BY_SIGNAL:
        return stopped_by_signal(f"node {rank}", code)
    failure = FailureClass.ERROR
    if code == ExitCode.DONE:
        failure, text = FailureClass.COMPLETED, f"node {rank} ended with exit code 0 {doubt}"
    elif code == ExitCode.KILLED:
        failure = FailureClass.WORKER_LOST
        text = f"node {rank} was killed (SIGKILL) {doubt}"
        if cancel is not None and cancel.was_enforced:
            text = f"node {rank} was killed {cancel.grace_seconds:g} s after it was asked to stop"
    elif code > 128:
        text = f"node {rank} was ended by signal {code - 128} {doubt}; see {folder.log(rank)}"
    else:
        text = f"node {rank} ended with exit code {code} {doubt}; see {folder.log(rank)}"
    return Termination(failure_class=failure, exit_code=code, message=text)


def _exit_code(folder: AttemptFolder, rank: int, pid: int) -> int | None:
    """Return the exit code of a node, if its parent could record it; else None.

    It is recorded before the process is reaped, because the kernel reports it only once.
    """
    seen = records.read(folder.exit(rank), ExitRecord)
    if seen is not None:
        return seen.exit_code
    try:
        result = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    if result is None:
        return None
    by_signal = result.si_code in (os.CLD_KILLED, os.CLD_DUMPED)
    code = 128 + result.si_status if by_signal else result.si_status
    records.write(folder.exit(rank), ExitRecord(exit_code=code))
    os.waitpid(pid, 0)
    return code


def _phase(nodes: Sequence[Node]) -> AttemptPhase:
    ended = [node.termination for node in nodes if node.termination is not None]
    if any(one.exit_code != ExitCode.DONE for one in ended):
        return AttemptPhase.FAILED
    if len(ended) == len(nodes):
        return AttemptPhase.SUCCEEDED
    if all(node.state is NodeState.STARTING for node in nodes):
        return AttemptPhase.PENDING
    return AttemptPhase.RUNNING


def _root_cause(ended: Sequence[Node]) -> Node | None:
    """Return the node whose failure is the root cause; the first of several."""

    def key(node: Node) -> int:
        code = node.termination.exit_code if node.termination else ExitCode.ERROR
        return root_cause_order(code, is_victim=node.is_victim)

    return min(ended, key=key, default=None)


def _progress(folder: AttemptFolder) -> tuple[Progress | None, str]:
    """Return the last progress of rank 0 in this attempt, and a complaint if it cannot be read."""
    path = folder.run_dir / "progress.json"
    try:
        progress = read_progress(folder.run_dir)
    except FileNotFoundError:
        return None, ""
    except ValidationError as error:
        return None, f"{path} cannot be read ({error.errors()[0]['msg']})"
    return (progress, "") if progress.attempt == folder.number else (None, "")


def _requeue_seconds(
    folder: AttemptFolder, nodes: Sequence[Node], progress: Progress | None
) -> float:
    """Return the delay before the next observation: short while the state is about to change."""
    all_alive = all(node.state is NodeState.ALIVE for node in nodes)
    is_steady = progress is not None and progress.phase in _STEADY_PHASES
    if all_alive and is_steady and not folder.cancel.exists():
        return STEADY_SECONDS
    return SOON_SECONDS
