"""The contract of all backends.

`reconcile` decides and a backend acts: it renders, submits, observes and cancels one attempt. A
backend never retries, never waits, and never writes the job's status. A plugin inherits `Backend`
and registers its class under the entry-point group `finetune_operator.backends`; `testing/suite.py`
tests the contract.
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

from finetune_operator.api.problems import Problem
from finetune_operator.api.v1alpha1.job import FineTuneJob, FineTuneJobSpec
from finetune_operator.api.v1alpha1.profile import FineTuneProfile
from finetune_operator.kube.cache import Key
from finetune_operator.kube.watch import Watch
from finetune_operator.planner.catalogue import GpuSize, size_of
from finetune_operator.planner.plan import Plan
from finetune_trainer.config import FailureClass, Progress, Termination

if TYPE_CHECKING:
    from finetune_operator.kube.cluster import Cluster

T = TypeVar("T")


@dataclass(frozen=True)
class Attempt:
    """A run of a job from start to end.

    Attributes:
        number: Number of the attempt, counted from 1 over restarts and resumes.
    """

    number: int


@dataclass(frozen=True)
class Written:
    """A folder that the attempts of a job write.

    Attributes:
        field: Field of the job that names it.
        uri: URI in the job.
        place: Identity of its storage, from the container (a disk, a claim of a namespace) to the
            folder's name. Two folders overlap if the place of one begins with the place of the
            other.
    """

    field: str
    uri: str
    place: tuple[str, ...]


@dataclass(frozen=True)
class Request:
    """The exact objects that `submit` would create; `ftctl render` prints them.

    Attributes:
        backend: Name of the backend that rendered it.
        job_uid: Uid of the job that owns the objects.
        attempt: Number of the attempt.
        name: Deterministic name of the attempt within the backend.
        objects: The objects in order of creation, as JSON-ready values.
    """

    backend: str
    job_uid: str
    attempt: int
    name: str
    objects: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class Handle:
    """Identifies one submitted attempt; stored in `status.backendRef`.

    Attributes:
        kind: Kind of the object, such as `Job` or `Process`.
        name: Its name within the backend.
        uid: Its unique id, so that a later object of the same name is not mistaken for it.
        url: Page about it for people; may be empty.
        digest: Digest of the data that the backend stores with the attempt for later attempts,
            where others could change it. `job.status.attempts` contains it when a later attempt is
            rendered. May be empty.
    """

    kind: str
    name: str
    uid: str = ""
    url: str = ""
    digest: str = ""


@dataclass(frozen=True)
class AttemptRef:
    """An attempt, as passed to verbs.

    Attributes:
        job: Its job.
        job_uid: Uid of the job.
        number: Number of the attempt.
        handle: Result of `submit` or `find`.
        spec: Spec of the job; None if it cannot be read.
    """

    job: Key
    job_uid: str
    number: int
    handle: Handle
    spec: FineTuneJobSpec | None = None


@dataclass(frozen=True)
class Found:
    """An existing attempt, found by its name.

    Attributes:
        handle: Same as the result of `submit`.
        since: When it was created, with a time zone; None if unknown.
    """

    handle: Handle
    since: datetime | None = None


class AttemptPhase(StrEnum):
    """Phase of an attempt in the view of its backend."""

    PENDING = "Pending"  # submitted, no process runs yet
    RUNNING = "Running"  # at least one process runs
    SUCCEEDED = "Succeeded"  # it ended, with exit code 0
    FAILED = "Failed"  # it ended or lost a worker; see `termination` and `all_gone`
    UNKNOWN = "Unknown"  # it cannot be found; unless `all_gone`, it could not be observed


class Effect(StrEnum):
    """Effect of an obstacle on a job; backends choose the obstacle's reason freely."""

    NONE = "None"  # the attempt is only slow; reported with the next write of the status
    QUEUED = "Queued"  # it waits for admission, and deadlines.pendingSeconds does not run
    DELAYED = "Delayed"  # reported within seconds; may pass by itself
    STALLED = "Stalled"  # a person must fix the cause; also while an attempt trains or ends
    UNADMITTED = "Unadmitted"  # no queue can admit it until a person fixes the cause


@dataclass(frozen=True)
class Obstacle:
    """Why an attempt does not progress.

    Attributes:
        reason: One CamelCase word for the conditions, such as `Unschedulable`.
        message: One sentence: the obstacle, and the remedy.
    """

    reason: str
    message: str
    effect: Effect = Effect.DELAYED

    @property
    def is_stalled(self) -> bool:
        """Whether a person must fix the cause."""
        return self.effect in (Effect.STALLED, Effect.UNADMITTED)


@dataclass(frozen=True)
class Observation:
    """A backend's current view of one attempt.

    Attributes:
        phase: Phase of the attempt.
        all_gone: No process of the attempt lives; only then may the next one start.
        nodes_ready: Nodes whose main process runs.
        termination: Termination message after the end; if a node failed, the root cause's message.
        progress: Last progress of rank 0; None before that.
        checkpoints: URI of the folder of its checkpoints; empty if their URIs are the paths that
            rank 0 reports.
        node: Node of the rank whose failure is the root cause, if known.
        disruptions: How often the service has moved it during the attempt.
        failure_class: Failure class that the backend has decided, which no exit code overrides;
            None for the class of `termination`, or of a lost worker without one.
        is_training: Whether it trains; None if only `progress` shows it.
        unheard: Why the progress of rank 0 cannot be read, and the remedy; empty if it can be read,
            or may be soon. `progress` is then None.
        obstacle: The current obstacle, in every phase; None if there is none.
        gives_up: Termination to record if the operator must end the attempt, None otherwise. Its
            class is `Preempted` if the attempt gives way to another job before it trains, and the
            restart is then not counted; or `NodeLost`.
        outlived_by: Containers that still run long after all processes of the attempt have ended,
            so that the operator must end it; empty otherwise.
        message: One sentence for the conditions; may be empty.
        warning: One sentence for people without effect on decisions, such as interference by other
            clients; may be empty.
        requeue_seconds: Observe again after this time even without an event; None for events only.
    """

    phase: AttemptPhase
    all_gone: bool = False
    nodes_ready: int = 0
    termination: Termination | None = None
    progress: Progress | None = None
    checkpoints: str = ""
    node: str = ""
    disruptions: int = 0
    failure_class: FailureClass | None = None
    is_training: bool | None = None
    unheard: str = ""
    obstacle: Obstacle | None = None
    gives_up: Termination | None = None
    outlived_by: str = ""
    message: str = ""
    warning: str = ""
    requeue_seconds: float | None = None


@dataclass(frozen=True)
class BackendContext:
    """Arguments of a backend's constructor.

    Attributes:
        manifest_dir: Folder that `file://./x` is relative to.
        environ: Environment of the caller; backends do not read `os.environ`.
        cluster: Client and caches, in the operator; None elsewhere, where a backend that needs them
            is only asked to `validate` and `render`.
        profiles: FineTuneProfiles by name, known without a cluster.
        now: Returns the current time, with a time zone.
    """

    manifest_dir: Path
    environ: Mapping[str, str] = field(default_factory=dict)
    cluster: "Cluster | None" = None
    profiles: Mapping[str, FineTuneProfile] = field(default_factory=dict)
    now: Callable[[], datetime] = lambda: datetime.now(UTC)


@dataclass(frozen=True)
class Limits:
    """Timeouts of the verbs in seconds, and bounds for the end of an attempt.

    Attributes:
        late_submit: Time after a submit without a response in which its attempt may still appear.
        unconfirmed_cancel: Time after `until` after which a deleted job is released although an
            accepted cancel had no visible effect; None means never.
    """

    submit: float = 30.0
    find: float = 10.0
    observe: float = 10.0
    cancel: float = 10.0
    collect: float = 30.0
    check_inputs: float = 30.0
    start: float = 30.0
    late_submit: float = 0.0
    unconfirmed_cancel: float | None = None


class Services(Protocol):
    """Services that the operator provides to a started backend until `close`."""

    def wake(self, job: Key) -> None:
        """Requeue a job soon; callable from any thread."""

    def check_may_write(self) -> None:
        """Check that this process may still write; call it before each write, from any thread.

        Raises:
            NotLeadingError: This process may not write.
        """

    async def run_blocking(self, call: Callable[[], T], seconds: float) -> T:
        """Run `call` in a thread of the backend (see `threads`) and return its result.

        A thread cannot be interrupted, so a call that never returns occupies its thread until the
        process ends.

        Args:
            call: May block, and should have a timeout of its own.
            seconds: How long to wait for a free thread and for the call.

        Raises:
            TransientError: The call took longer.
        """


class Backend(ABC):
    """Runs attempts of jobs; the constructor `Backend(context)` sends no request."""

    name: ClassVar[str]
    needs_finalizer: ClassVar[bool]
    """Whether attempts outlive their FineTuneJob, which then gets a finalizer.

    Objects in the job's namespace that the job owns do not need one, because they are deleted with
    it.
    """

    finds_from_cache: ClassVar[bool]
    """Whether `find` sends no request, so that a new operator can find every attempt by its name.

    The handle of an attempt is then written with the next status, up to 30 seconds later.
    """

    runs_without_cluster: ClassVar[bool]
    """Whether `ftctl run` and `ftctl dev` may use it."""

    runs_on_this_machine: ClassVar[bool] = False
    """Whether its attempts are processes of this machine. Ctrl-C in `ftctl run` and `ftctl dev`
    stops such attempts with a checkpoint, and leaves all others running.
    """

    pages_are_scraped: ClassVar[bool] = True
    """Whether Prometheus can scrape the pages of its nodes. Otherwise the operator exports the
    step, loss and tokens per second that rank 0 reported, and their age.
    """

    watches: ClassVar[tuple[Watch, ...]] = ()
    """Kinds in the cluster whose events requeue a job; may be empty.

    No job is reconciled while a vital kind cannot be listed and watched in its namespace.
    """

    threads: ClassVar[int] = 0
    """How many calls `Services.run_blocking` runs at once; 0 for a backend that never blocks."""

    limits: ClassVar[Limits] = Limits()

    @abstractmethod
    def __init__(self, context: BackendContext) -> None:
        """Store the arguments; import libraries that may be missing only in `start`."""

    async def start(self, services: Services) -> None:
        """Start; called before the first verb that sends a request, once per leader term.

        If it fails or is cancelled it leaves no state behind, and is retried later.
        """

    async def close(self) -> None:
        """Undo `start`; attempts continue to run, and no other verb is called afterwards."""

    @abstractmethod
    def validate(self, job: FineTuneJob) -> Sequence[Problem]:
        """List features of the job that this backend lacks; files of the job are not opened."""

    def gpu_sizes(self, job: FineTuneJob) -> Sequence[GpuSize]:
        """List the GPU sizes on which the job may run; empty if they are not known.

        Raises:
            CatalogueError: A size is unknown or retired.
        """
        name = job.spec.topology.instance_type
        return () if name is None else (size_of(name),)

    def check_inputs(self, job: FineTuneJob) -> Sequence[Problem]:
        """List problems of the job's inputs: missing files, folders that cannot be written.

        Called in a thread, so it may block.
        """
        return ()

    def writes(self, job: FineTuneJob) -> Sequence[Written]:
        """List the folders that the job writes and other jobs could write; sends no request."""
        return ()

    @abstractmethod
    def render(self, plan: Plan, attempt: Attempt) -> Request:
        """Return the objects that `submit` would create; pure and deterministic."""

    @abstractmethod
    async def submit(self, request: Request) -> Handle:
        """Create the attempt, or adopt the existing one if the job owns it.

        Raises:
            AlreadyOwnedError: An object of that name exists and the job does not own it.
            NotCreatedError: The attempt does not exist, and the obstacle may pass.
            BackendError: The attempt cannot be created; `retryable` is whether a retry may succeed.
        """

    @abstractmethod
    async def find(self, job: FineTuneJob, attempt: Attempt) -> Found | None:
        """Return the job's attempt if any part of it exists; does not create objects.

        Used after a crash between `submit` and the write of its result. If `job.status` has the
        attempt, return None only if it certainly does not exist, because its job may then be
        reported as suspended.
        """

    @abstractmethod
    async def observe(self, ref: AttemptRef) -> Observation:
        """Return the current state of the attempt without waiting for a change."""

    @abstractmethod
    async def cancel(self, ref: AttemptRef, until: datetime) -> bool:
        """Ask the attempt to stop with a checkpoint; remaining processes are killed at `until`.

        Returns at once, and may be called again, also with an earlier `until`.

        Returns:
            Whether the request was accepted, so that the attempt will end.
        """

    @abstractmethod
    def logs(self, ref: AttemptRef, rank: int, follow: bool = False) -> AsyncIterator[str]:
        """Yield the lines of one rank's log, without line ends; `follow` continues to its end.

        Raises:
            NoSuchRankError: the attempt has no such rank.
            NoLogYetError: the rank has not started; `ftctl logs` gives the job's reason.
        """

    @abstractmethod
    async def collect(self, ref: AttemptRef) -> Sequence[str]:
        """Return URIs of the exported artifacts."""

    def forget(self, job_uid: str) -> None:
        """Drop the in-memory state of a finished or deleted job."""
