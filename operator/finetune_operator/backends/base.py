"""The contract every backend keeps; DESIGN section 5 (Contract C).

`reconcile` decides, a backend acts. A backend never retries, never waits and never writes the
job's status: it renders, submits, observes and cancels one attempt. A plugin inherits `Backend` and
registers its class under the entry-point group `finetune_operator.backends`; `testing/suite.py` is
what "keeps the contract" means.
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
from finetune_operator.planner.plan import Plan
from finetune_trainer.config import FailureClass, Progress, Termination

if TYPE_CHECKING:
    from finetune_operator.kube.cluster import Cluster

T = TypeVar("T")


@dataclass(frozen=True)
class Attempt:
    """One run of a job from start to end.

    Attributes:
        number: Counts up over restarts and resumes, from 1.
    """

    number: int


@dataclass(frozen=True)
class Written:
    """A folder that the attempts of a job write.

    Attributes:
        field: Field of the job that names it.
        uri: What the job calls it.
        place: Where it really is, part by part, from what holds it (a disk, a claim of a namespace)
            down to its name. Two jobs share a folder where one's place begins with the other's.
    """

    field: str
    uri: str
    place: tuple[str, ...]


@dataclass(frozen=True)
class Request:
    """Exactly what `submit` would create; `ftctl render` prints it, goldens compare it.

    Attributes:
        backend: Name of the backend that rendered it.
        job_uid: Owner of everything in it.
        attempt: Number of the attempt.
        name: Deterministic name of the attempt within the backend.
        objects: What is created, in order, as JSON-ready values.
    """

    backend: str
    job_uid: str
    attempt: int
    name: str
    objects: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class Handle:
    """Names one submitted attempt; kept in `status.backendRef`, so it survives a restart.

    Attributes:
        kind: Kind of the thing, such as `Job` or `Process`.
        name: Its name within the backend.
        uid: Its unique id, so that a later thing of the same name is not mistaken for it.
        url: Page about it for people; may be empty.
        digest: Of what the backend keeps beside the attempt for those after it, which others could
            change there; in `job.status.attempts` when the next one is rendered. Empty for nothing.
    """

    kind: str
    name: str
    uid: str = ""
    url: str = ""
    digest: str = ""


@dataclass(frozen=True)
class AttemptRef:
    """One attempt, as verbs are asked about it.

    Attributes:
        job: Its job.
        job_uid: Uid of that job, which another one of its name does not have.
        number: Of the attempt.
        handle: As `submit` or `find` returned it.
        spec: Of the job; None where it cannot be read.
    """

    job: Key
    job_uid: str
    number: int
    handle: Handle
    spec: FineTuneJobSpec | None = None


@dataclass(frozen=True)
class Found:
    """An attempt that exists, as its name led to it.

    Attributes:
        handle: As `submit` returned it.
        since: When it was created, with a zone; None where that is not known.
    """

    handle: Handle
    since: datetime | None = None


class AttemptPhase(StrEnum):
    """How far an attempt is, as the backend sees it."""

    PENDING = "Pending"  # submitted, nothing runs yet
    RUNNING = "Running"  # at least one of its processes runs
    SUCCEEDED = "Succeeded"  # it ended, with exit code 0
    FAILED = "Failed"  # it ended or lost a worker; see termination and all_gone
    UNKNOWN = "Unknown"  # nothing of it can be found; unless all is gone, nobody could observe it


class Effect(StrEnum):
    """What an obstacle does to a job; the obstacle's reason stays an open word."""

    NONE = "None"  # the attempt only takes its time: reported with the next write
    QUEUED = "Queued"  # it waits for admission, and deadlines.pendingSeconds does not run
    DELAYED = "Delayed"  # reported within seconds; may pass by itself
    STALLED = "Stalled"  # somebody must fix the cause; also of an attempt that trains or ends


@dataclass(frozen=True)
class Obstacle:
    """Why an attempt does not go on.

    Attributes:
        reason: One CamelCase word for the conditions, such as `Unschedulable`.
        message: One sentence: what is in the way, and what to do.
    """

    reason: str
    message: str
    effect: Effect = Effect.DELAYED


@dataclass(frozen=True)
class Observation:
    """What a backend sees of one attempt now.

    Attributes:
        phase: How far it is.
        all_gone: No process of the attempt lives; only then may the next one start.
        nodes_ready: Nodes whose main process runs.
        termination: Termination message, once it ended; that of the root cause if a node failed.
        progress: What rank 0 published last; None before that.
        checkpoints: URI of the folder that holds its checkpoints; empty where those have the paths
            that rank 0 names.
        node: Node of the rank whose failure is the root cause, if known.
        disruptions: How often the service has moved it, while the attempt goes on.
        failure_class: Why it ended, where no process has left a termination; None: a lost worker.
        is_training: Whether it trains, where the backend knows; None: `progress` decides.
        obstacle: What is in its way, in every phase; None while nothing is.
        message: One sentence for the conditions; empty when there is nothing to say.
        warning: One sentence for people that decides nothing, such as what others do to the
            attempt; empty when there is nothing to say.
        requeue_seconds: Observe again after so long though no event came; None for events only.
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
    obstacle: Obstacle | None = None
    message: str = ""
    warning: str = ""
    requeue_seconds: float | None = None


@dataclass(frozen=True)
class BackendContext:
    """What a backend is given when it is made.

    Attributes:
        manifest_dir: Folder that `file://./x` is relative to.
        environ: Environment of the caller; a backend reads no other.
        cluster: Client and caches where the operator makes the backend; None elsewhere, where
            only `validate` and `render` are asked of a backend that needs one.
        profiles: FineTuneProfiles by name, known without a cluster.
        now: The time, with a zone.
    """

    manifest_dir: Path
    environ: Mapping[str, str] = field(default_factory=dict)
    cluster: "Cluster | None" = None
    profiles: Mapping[str, FineTuneProfile] = field(default_factory=dict)
    now: Callable[[], datetime] = lambda: datetime.now(UTC)


@dataclass(frozen=True)
class Limits:
    """How many seconds one call of a verb may take, and what the end of an attempt waits for.

    Attributes:
        late_submit: For so long after a submit without an answer its attempt may still appear.
        unconfirmed_cancel: For so long after `until` an accepted cancel may be without effect,
            until a deleted job is let go without its confirmation; None: it never is.
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
    """What the operator lends a backend that it has started, until `close`."""

    def wake(self, job: Key) -> None:
        """Have a job reconciled soon; from any thread."""

    def check_may_write(self) -> None:
        """Ask right before each write, as another replica may lead by now; from any thread.

        Raises:
            NotLeadingError: this process may not write.
        """

    async def run_blocking(self, call: Callable[[], T], seconds: float) -> T:
        """Return what `call` returns in one of the backend's own `threads`.

        No thread can be ended: a call that never returns keeps its thread until the process ends.

        Args:
            call: It may block, and should give up by itself.
            seconds: How long to wait for a free thread and for the call.

        Raises:
            TransientError: it took longer.
        """


class Backend(ABC):
    """Runs attempts of jobs somewhere; made by `Backend(context)`, which asks nobody."""

    name: ClassVar[str]
    needs_finalizer: ClassVar[bool]
    """Whether attempts outlive their FineTuneJob, which then gets a finalizer.

    Objects in the job's namespace of which the job is the owner need none: they go with it.
    """

    finds_from_cache: ClassVar[bool]
    """Whether `find` costs no request, so that a new operator finds each attempt by its name.

    Then the opening of a first attempt, and every handle, may go unwritten for some seconds.
    """

    runs_without_cluster: ClassVar[bool]
    """Whether `ftctl run` and `ftctl dev` may use it."""

    runs_on_this_machine: ClassVar[bool] = False
    """Whether its attempts are processes of this machine: Ctrl-C of `ftctl run` and `ftctl dev`
    stops these with a checkpoint, and leaves all others running."""

    pages_are_scraped: ClassVar[bool] = True
    """Whether Prometheus can read the pages of its nodes; else the operator exports what it is told
    of rank 0 anyway: step, loss, tokens a second, and the age of that."""

    watches: ClassVar[tuple[Watch, ...]] = ()
    """Kinds in the cluster whose events have a job reconciled; may be empty.

    No job is reconciled while a vital one cannot be listed and watched in its namespace.
    """

    threads: ClassVar[int] = 0
    """How many calls `Services.run_blocking` runs at once; 0 for a backend that never blocks."""

    limits: ClassVar[Limits] = Limits()

    @abstractmethod
    def __init__(self, context: BackendContext) -> None:
        """Keep what is given; a library that may be missing is imported in `start`."""

    async def start(self, services: Services) -> None:
        """Begin to work, before the first verb that asks anybody; once in a term of the operator.

        Where it fails or is cancelled it leaves nothing behind, and is tried again later.
        """

    async def close(self) -> None:
        """End what `start` began; the attempts run on, and no other verb is called any more."""

    @abstractmethod
    def validate(self, job: FineTuneJob) -> Sequence[Problem]:
        """List what this backend cannot do; opens no file that the job names."""

    def check_inputs(self, job: FineTuneJob) -> Sequence[Problem]:
        """List what is wrong with what the job names: missing files, folders not writable.

        Called in a thread, so it may block.
        """
        return ()

    def writes(self, job: FineTuneJob) -> Sequence[Written]:
        """List the folders that the job writes and another one could, too; asks nobody."""
        return ()

    @abstractmethod
    def render(self, plan: Plan, attempt: Attempt) -> Request:
        """Return what `submit` would create; pure: same plan and attempt, same request."""

    @abstractmethod
    async def submit(self, request: Request) -> Handle:
        """Create the attempt, or adopt it where it exists already and is the job's own.

        Raises:
            AlreadyOwnedError: something of that name exists and is not the job's.
            NotCreatedError: the attempt does not exist, and what is in its way may pass.
            BackendError: it cannot be created; `retryable` says whether to try again.
        """

    @abstractmethod
    async def find(self, job: FineTuneJob, attempt: Attempt) -> Found | None:
        """Return the job's own attempt where it exists, however little of it; creates nothing.

        For a caller that died before it could write down what `submit` returned. Of an attempt
        that `job.status` has, None must be sure: its job may be reported as suspended.
        """

    @abstractmethod
    async def observe(self, ref: AttemptRef) -> Observation:
        """Return what is known of the attempt by now; waits for nothing to happen."""

    @abstractmethod
    async def cancel(self, ref: AttemptRef, until: datetime) -> bool:
        """Ask the attempt to stop with a checkpoint; what is left of it is killed at `until`.

        Returns without waiting for that, and may be called again, also with an earlier `until`.

        Returns:
            Whether the request was accepted, so that the attempt will end.
        """

    @abstractmethod
    def logs(self, ref: AttemptRef, rank: int, follow: bool = False) -> AsyncIterator[str]:
        """Yield the lines of one rank's log, without line ends; `follow` goes on to its end."""

    @abstractmethod
    async def collect(self, ref: AttemptRef) -> Sequence[str]:
        """Return URIs of what the attempt exported."""

    def forget(self, job_uid: str) -> None:
        """Drop what is kept in memory about a job that is over or gone."""
