"""The states of an Azure ML job, and the conversion of polls into an observation. Pure.

`polling` merges all responses about an attempt into one `AttemptView`. Azure ML may restart a run
without notice, report unknown states, and stay in a transient state for hours.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from enum import StrEnum

from finetune_operator.backends.azureml import runs
from finetune_operator.backends.azureml.names import Report
from finetune_operator.backends.azureml.runs import RunEnd, Seen
from finetune_operator.backends.base import AttemptPhase, Effect, Observation, Obstacle
from finetune_trainer.config import Progress, Termination

WAITING_SECONDS, RUNNING_SECONDS, STOPPING_SECONDS = 15.0, 30.0, 5.0
_FRESH_SECONDS = 60.0
_NOT_RESPONDING = "NotResponding"


class AzureMLReason(StrEnum):
    """The reasons why an Azure ML job does not progress."""

    SUBMITTED = "Submitted"
    PREPARING_ENVIRONMENT = "PreparingEnvironment"
    QUEUED = "Queued"
    FINALIZING = "Finalizing"
    CANCELLING = "Cancelling"
    NOT_RESPONDING = "NotResponding"
    NOT_STOPPED = "NotStopped"
    PAUSED = "Paused"
    UNKNOWN_STATE = "UnknownState"
    SERVICE_SILENT = "ServiceSilent"  # while the workspace does not respond
    NOT_SEEN = "NotSeen"  # the operator may not read the job


@dataclass(frozen=True)
class Row:
    """Meaning of a state.

    Attributes:
        phase: Phase of the attempt; None retains the previous phase.
        obstacle: The obstacle; None if there is none.
        limit: Seconds after which the state is reported as stuck; None if it may last.
        remedy: Remedy for a stuck state, besides a look at the job's page.
        is_finished: No part of the attempt lives, and no other state follows.
    """

    phase: AttemptPhase | None
    obstacle: Obstacle | None = None
    limit: float | None = None
    remedy: str = ""
    is_finished: bool = False


_STARTING = Row(
    AttemptPhase.PENDING,
    Obstacle(
        AzureMLReason.SUBMITTED, "Azure ML has accepted the job and prepares to run it", Effect.NONE
    ),
    15 * 60.0,
    "check the health of Azure ML",
)
_STOPPED = Row(None, limit=15 * 60.0, remedy="cancel it there")

STATES = {
    **dict.fromkeys(("NotStarted", "Starting", "Provisioning"), _STARTING),
    "Preparing": Row(
        AttemptPhase.PENDING,
        Obstacle(
            AzureMLReason.PREPARING_ENVIRONMENT,
            "Azure ML builds the job's environment",
            Effect.NONE,
        ),
        2 * 3600.0,
        "see the log of the build, or name an environment that is built already",
    ),
    "Queued": Row(
        AttemptPhase.PENDING,
        Obstacle(
            AzureMLReason.QUEUED, "the job waits for nodes in Azure ML's queue", Effect.QUEUED
        ),
        24 * 3600.0,
        "see the nodes, the quota and the sizes of its compute",
    ),
    runs.RUNNING: Row(AttemptPhase.RUNNING),
    "Finalizing": Row(
        AttemptPhase.RUNNING,
        Obstacle(
            AzureMLReason.FINALIZING,
            "the trainer has ended; Azure ML stores its files",
            Effect.NONE,
        ),
        3600.0,
        "ask Azure's support to end it, because Azure ML refuses to cancel it now",
    ),
    "CancelRequested": Row(
        None,
        Obstacle(AzureMLReason.CANCELLING, "Azure ML is cancelling the job", Effect.NONE),
        15 * 60.0,
        "ask Azure's support to end it while its nodes are allocated",
    ),
    _NOT_RESPONDING: Row(
        None,
        Obstacle(
            AzureMLReason.NOT_RESPONDING, "Azure ML receives no response from the job's nodes"
        ),
        15 * 60.0,
        "check its nodes; to end it, suspend this job or cancel the job in Azure ML",
    ),
    "Paused": Row(
        None, Obstacle(AzureMLReason.PAUSED, "Azure ML has paused the job"), 3600.0, "resume it"
    ),
    runs.COMPLETED: Row(AttemptPhase.SUCCEEDED, is_finished=True),
    runs.FAILED: Row(AttemptPhase.FAILED, is_finished=True),
    runs.CANCELED: Row(AttemptPhase.FAILED, is_finished=True),
    runs.GONE: Row(AttemptPhase.UNKNOWN, is_finished=True),
}


def row_of(state: str) -> Row:
    """Return the row of a state, including unknown ones."""
    if state in STATES:
        return STATES[state]
    text = f"Azure ML shows the job as {state[:40]}, an unknown state"
    return Row(
        None,
        Obstacle(AzureMLReason.UNKNOWN_STATE, text),
        3600.0,
        "end the job there if it does not progress",
    )


@dataclass(frozen=True)
class AttemptView:
    """Facts about an attempt; two views are equal if they are reported in the same way.

    Attributes:
        state: State in Azure ML's spelling.
        since: Time when it entered that state, as far as this process knows.
        disruptions: How often Azure ML has restarted it.
        stop_until: Time by which it must have ended, if the operator has stopped it.
        end: Why it has ended.
        last_words: Termination messages by node number.
        trouble: Why the view is outdated; None while Azure ML responds.
        warning: The part that cannot be read, although the state can; else empty.
        heard: Time of the reporter's last heartbeat, by our clock.
        stamp: The heartbeat itself: the start of the run, and seconds of the reporter's clock.
        is_listening: Whether the reporter is alive and checks the stop tag.
    """

    state: str
    since: datetime
    phase: AttemptPhase
    url: str = ""
    nodes: int = 1
    checkpoints: str = ""
    progress: Progress | None = None
    disruptions: int = 0
    stop_until: datetime | None = None
    end: RunEnd = runs.NO_END
    last_words: Mapping[int, Termination] = field(default_factory=dict)
    trouble: Obstacle | None = None
    warning: str = ""
    heard: datetime | None = field(default=None, compare=False)
    stamp: tuple[int, float] | None = field(default=None, compare=False)
    is_listening: bool = field(default=False, compare=False)

    @property
    def is_running(self) -> bool:
        """Whether its processes run, as far as Azure ML knows."""
        return self.state == runs.RUNNING

    @property
    def is_finished(self) -> bool:
        """Whether no part of it is alive."""
        return row_of(self.state).is_finished


def updated_view(before: AttemptView | None, seen: Seen, now: datetime) -> AttemptView:
    """Return the view after a request; a finished attempt stays finished."""
    if before is not None and before.is_finished:
        return before
    report = seen.report
    old = before or _first_view(seen, now)
    phase = row_of(seen.state).phase or old.phase
    is_moved = old.phase is AttemptPhase.RUNNING and phase is AttemptPhase.PENDING
    moves = ((report.heard and report.heard.starts) or 1) - 1
    return replace(
        _with_sign_of_life(old, report, now),
        state=seen.state,
        since=old.since if old.state == seen.state else now,
        phase=phase,
        url=seen.url or old.url,
        checkpoints=seen.checkpoints or old.checkpoints,
        progress=_newest(report.progress, old.progress),
        disruptions=max(old.disruptions + is_moved, moves),
        stop_until=report.stop_until or old.stop_until,
        nodes=seen.nodes or old.nodes,
        trouble=None,
    )


def _first_view(seen: Seen, now: datetime) -> AttemptView:
    """Return the view before the first poll; a waiting attempt has waited since its creation."""
    has_run = seen.report.heard is not None or seen.report.progress is not None
    waits = row_of(seen.state).phase is AttemptPhase.PENDING and not has_run
    since = (seen.created or now) if waits else now
    return AttemptView(seen.state, since, AttemptPhase.PENDING if waits else AttemptPhase.RUNNING)


def _newest(*found: Progress | None) -> Progress | None:
    """Return the latest values, because the job's tags may be older than the run's tags."""
    return max((one for one in found if one is not None), key=lambda one: one.time, default=None)


def poll_interval_seconds(view: AttemptView | None, now: datetime) -> float:
    """Return the seconds until the next poll: fewer while the attempt stops."""
    if view is None:
        return WAITING_SECONDS
    asked = view.stop_until or (view.since if view.state == "CancelRequested" else None)
    if asked is not None and now < asked + timedelta(minutes=5):
        return STOPPING_SECONDS
    return RUNNING_SECONDS if view.is_running else WAITING_SECONDS


def with_end(
    view: AttemptView, end: RunEnd, report: Report, last_words: Mapping[int, Termination]
) -> AttemptView:
    """Return the view of a finished run with the reported cause of its end."""
    view = replace(
        view, end=end, last_words=last_words, progress=_newest(report.progress, view.progress)
    )
    return replace(view, stop_until=report.stop_until or view.stop_until)


def observation_of(view: AttemptView, now: datetime) -> Observation:
    """Return the observation for a view; its sentences change when a limit has passed."""
    if view.is_finished:
        newest = _newest(view.progress, *(one.progress for one in view.last_words.values()))
        is_ours = view.stop_until is not None
        ended = runs.ended(view.state, view.end, view.last_words, view.url, is_ours=is_ours)
        ended = replace(ended, all_gone=True, disruptions=view.disruptions)
        return replace(ended, progress=newest, checkpoints=view.checkpoints)
    obstacle, wait = _in_the_way(view, now)
    unheard = _unheard(view)
    return Observation(
        view.phase,
        nodes_ready=view.nodes if view.phase is AttemptPhase.RUNNING else 0,
        progress=None if unheard else view.progress,
        unheard=unheard,
        checkpoints=view.checkpoints,
        disruptions=view.disruptions,
        obstacle=obstacle,
        warning=view.warning,
        requeue_seconds=wait,
    )


def _unheard(view: AttemptView) -> str:
    """Return why the progress of a running attempt is unknown; empty if it is known."""
    if view.phase is not AttemptPhase.RUNNING:
        return ""
    if view.trouble is not None and view.trouble.reason == AzureMLReason.SERVICE_SILENT:
        return f"its workspace does not respond; see {view.url} once it does"
    return f"its nodes do not respond; see {view.url}" if view.state == _NOT_RESPONDING else ""


def _with_sign_of_life(old: AttemptView, report: Report, now: datetime) -> AttemptView:
    """Return the view with `heard` and `is_listening` updated; the reporter's clock may differ."""
    if report.heard is None:
        return old
    stamp, heard = (report.heard.starts or 1, report.heard.time), old.heard
    if old.stamp is None:  # the heartbeat may be old
        heard = now if abs(now.timestamp() - report.heard.time) <= _FRESH_SECONDS else None
    elif stamp > old.stamp:
        heard = now
    else:  # a job's tags may be older than its run's
        stamp = old.stamp
    is_fresh = heard is not None and (now - heard).total_seconds() <= _FRESH_SECONDS
    return replace(old, heard=heard, stamp=stamp, is_listening=is_fresh)


def _in_the_way(view: AttemptView, now: datetime) -> tuple[Obstacle | None, float | None]:
    """Return the obstacle, and the seconds after which its message changes."""
    if view.trouble is not None:
        return view.trouble, None
    row, since, obstacle = row_of(view.state), view.since, row_of(view.state).obstacle
    if view.stop_until is not None and view.state not in ("Finalizing", "CancelRequested"):
        both = (row, since), (_STOPPED, view.stop_until)
        row, since = min(both, key=lambda one: one[1].timestamp() + (one[0].limit or float("inf")))
    if row.limit is None:
        return obstacle, None
    left = row.limit - (now - since).total_seconds()
    if left > 0:
        return obstacle, left
    minutes = f"{row.limit / 60:.0f} min"
    how_long = f"{minutes} after its stop" if row is _STOPPED else f"for more than {minutes}"
    text = f"Azure ML shows the job as {view.state[:40]} {how_long}"
    reason = row.obstacle.reason if row.obstacle is not None else AzureMLReason.NOT_STOPPED
    return Obstacle(reason, f"{text}; {row.remedy}: {view.url}", Effect.STALLED), None
