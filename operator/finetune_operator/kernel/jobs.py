"""FineTuneJobs as the kernel holds them: parsed, planned, and judged fit for an attempt.

A job travels through the kernel as one value, a `JobView`, which `JobBook` makes. Parsing and
planning are pure, so their results are kept as long as the object is the same.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint, entry_points

from pydantic import ValidationError

from finetune_operator.api.paths import show_path
from finetune_operator.api.problems import InvalidJobError, Problem, Severity
from finetune_operator.api.unbuilt import check_built
from finetune_operator.api.v1alpha1 import FineTuneJob, FineTuneJobStatus, ObjectMeta
from finetune_operator.api.v1alpha1.job import MANAGED_BY
from finetune_operator.api.v1alpha1.status import AttemptStatus
from finetune_operator.backends import registry
from finetune_operator.backends.base import Backend, BackendContext, Handle
from finetune_operator.errors import BrokenBackendError, FineTuneError, UnknownBackendError
from finetune_operator.kube.cache import Key, key_of
from finetune_operator.kube.resources import Object
from finetune_operator.planner.plan import Plan, make_plan
from finetune_operator.reconcile import attempts
from finetune_operator.reconcile.conditions import Reason, is_finished
from finetune_operator.reconcile.decide import Refusal

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class JobView:
    """One job as this process sees it: the object, and what no status holds yet of its attempt.

    Attributes:
        key: Its namespace and name.
        raw: The object as the API server has it.
        parsed: The object as a model, with `status`; None where its spec cannot be read.
        written: The status in `raw`; what cannot be read of it counts as never written.
        status: The same with what is decided or known and not written yet.
        refusal: Why its spec cannot be read.
    """

    key: Key
    raw: Object
    parsed: FineTuneJob | None
    written: FineTuneJobStatus
    status: FineTuneJobStatus
    refusal: Refusal | None = None

    @property
    def job(self) -> FineTuneJob:
        """The job; for whoever has seen to it that its spec can be read."""
        assert self.parsed is not None, f"the spec of {self.key} cannot be read"
        return self.parsed

    @property
    def attempt(self) -> AttemptStatus | None:
        """The open attempt; None between attempts."""
        return attempts.current(self.status)

    @property
    def handle(self) -> Handle | None:
        """Of the newest attempt; None where it is not known to exist."""
        return attempts.handle_of(self.status)

    @property
    def metadata(self) -> ObjectMeta:
        """Its metadata."""
        if self.parsed is not None:
            return self.parsed.metadata
        return ObjectMeta.model_validate(self.raw["metadata"])

    @property
    def uid(self) -> str:
        """What tells it from another job of its name."""
        return str(self.raw["metadata"]["uid"])

    @property
    def finalizers(self) -> Sequence[str]:
        """What keeps it when it is deleted."""
        return self.raw["metadata"].get("finalizers") or ()

    @property
    def backend(self) -> str:
        """Name of its backend; empty where the spec does not tell."""
        return str((self.raw["spec"].get("backend") or {}).get("type", ""))

    @property
    def is_deleted(self) -> bool:
        """Whether somebody deleted it, and finalizers keep it."""
        return bool(self.raw["metadata"].get("deletionTimestamp"))

    @property
    def is_ours(self) -> bool:
        """Whether this controller acts on it."""
        return bool(self.raw["spec"].get("managedBy", MANAGED_BY) == MANAGED_BY)

    def with_status(self, status: FineTuneJobStatus) -> "JobView":
        """Return the same job with another status, which is not written yet."""
        if status is self.status:
            return self
        parsed = self.parsed and self.parsed.model_copy(update={"status": status})
        return replace(self, parsed=parsed, status=status)


def read_job(raw: Object) -> JobView:
    """Return the job in an object of the API server, which has its defaults."""
    key = key_of(raw)
    try:
        job = FineTuneJob.model_validate(raw)
    except ValidationError as error:
        problems = (Problem(show_path(tuple(one["loc"])), one["msg"]) for one in error.errors()[:8])
        text = "; ".join(str(problem) for problem in problems)
        status = _read_status(raw)
        return JobView(key, raw, None, status, status, Refusal(Reason.INVALID_SPEC, text))
    return JobView(key, raw, job, job.status, job.status)


def _read_status(raw: Object) -> FineTuneJobStatus:
    try:
        return FineTuneJobStatus.model_validate(raw.get("status") or {})
    except ValidationError:
        return FineTuneJobStatus()


class PendingStatuses:
    """What this process knows of open attempts and no status holds yet, of each job the newest.

    First attempts whose opening waits to be written, and handles. Nothing here is needed: after a
    crash it is found again, at the cost of calls.
    """

    def __init__(self) -> None:
        self._opened: dict[Key, tuple[str, FineTuneJobStatus]] = {}
        self._submitted: dict[Key, tuple[str, int, Handle]] = {}

    def __contains__(self, key: Key) -> bool:
        """Say whether the opening of the job's first attempt waits to be written."""
        return key in self._opened

    def note_opened(self, view: JobView, status: FineTuneJobStatus) -> None:
        """Keep a status that opens the first attempt of the job."""
        self._opened[view.key] = (view.uid, status)

    def note_written(self, key: Key) -> None:
        """Drop the opening: the status tells of the attempt now, or that there is none."""
        self._opened.pop(key, None)

    def note_handle(self, view: JobView, number: int, handle: Handle) -> None:
        """Keep the handle of an attempt that was submitted, or found."""
        self._submitted[view.key] = (view.uid, number, handle)

    def forget(self, key: Key) -> None:
        """Drop what is known of a job that is over."""
        self._opened.pop(key, None)
        self._submitted.pop(key, None)

    def opened(self, view: JobView) -> FineTuneJobStatus:
        """Return the written status with the first attempt that it does not hold yet."""
        noted_for, status = self._opened.get(view.key, ("", view.written))
        # Whoever wrote that the job is finished did not know of the attempt; it is found again.
        is_lacking = not view.written.attempt and not is_finished(view.written)
        return status if noted_for == view.uid and is_lacking else view.written

    def added_to(self, view: JobView) -> JobView:
        """Return the job with the attempt and the handle that its written status lacks."""
        status = self.opened(view)
        attempt, noted = attempts.current(status), self._submitted.get(view.key)
        if status.backend_ref is None and noted and attempt:
            uid, number, handle = noted
            if (uid, number) == (view.uid, attempt.number):
                status = attempts.with_handle(status, handle)
        return view.with_status(status)


class Backends:
    """Backends by name, each made once.

    Args:
        context: What each is given.
        points: Entry points besides those of installed packages.
        given: By name, in place of those of installed packages; None for those.
    """

    def __init__(
        self,
        context: BackendContext,
        points: Iterable[EntryPoint],
        given: Mapping[str, Backend] | None = None,
    ) -> None:
        self._context = context
        installed = entry_points(group=registry.GROUP) if given is None else ()
        self._points = [*installed, *points]
        self._has_only_given = given is not None
        self._made: dict[str, Backend] = dict(given or {})

    def load_all(self) -> dict[str, Backend | FineTuneError]:
        """Return every registered backend by its name, or why it cannot be used."""
        found: dict[str, Backend | FineTuneError] = {}
        for name in {*self._made, *registry.available(self._points)}:
            try:
                found[name] = self.get(name)
            except FineTuneError as error:
                found[name] = error
        return found

    def get(self, name: str) -> Backend:
        """Return the backend of that name.

        Raises:
            UnknownBackendError: none is registered under it.
            BrokenBackendError: it cannot be imported or made.
        """
        if name not in self._made:
            if self._has_only_given and name not in registry.available(self._points):
                raise UnknownBackendError(
                    f"spec.backend.type {name} does not run here (available: "
                    f"{', '.join(self._made)}); use one of these, or apply the job to a cluster"
                )
            kind = registry.load(name, self._points)
            try:
                self._made[name] = kind(self._context)
            except Exception as error:
                raise BrokenBackendError(
                    f"spec.backend.type {name} cannot be used here "
                    f"({type(error).__name__}: {error}); mend that, or use another backend"
                ) from error
        return self._made[name]

    def of(self, job: FineTuneJob) -> Backend:
        """Return the backend of a job.

        Raises:
            UnknownBackendError: none is registered under its name.
            BrokenBackendError: it cannot be imported or made.
        """
        return self.get(job.spec.backend.type)

    def live_in_cluster(self, name: str) -> bool | None:
        """Say whether the backend's attempts do; None where it cannot be used."""
        try:
            return self.get(name).lives_in_cluster
        except FineTuneError:
            return None

    def live_outside(self, name: str) -> bool:
        """Say whether they outlive their jobs: nothing in the cluster would collect them."""
        return self.live_in_cluster(name) is False


class JobBook:
    """Jobs as this process sees them; parsed and planned once for each object and each spec.

    Args:
        find: Returns the object of a job.
        backends: Who knows whether a job can run.
        pending: What no status holds yet.
    """

    def __init__(
        self, find: Callable[[Key], Object | None], backends: Backends, pending: PendingStatuses
    ) -> None:
        self._find = find
        self._backends = backends
        self._pending = pending
        self._read: dict[Key, JobView] = {}
        self._plans: dict[Key, tuple[str, int, Plan | Refusal]] = {}

    def get(self, key: Key) -> JobView | None:
        """Return the job as it is seen now, or None if there is none."""
        raw = self._find(key)
        if raw is None:
            self._read.pop(key, None)
            self._plans.pop(key, None)
            return None
        there = self._read.get(key)
        if there is None or there.raw is not raw:
            there = self._read[key] = read_job(raw)
        return self._pending.added_to(there)

    def plan(self, job: FineTuneJob) -> Plan | Refusal:
        """Return the job's plan; the spec alone decides it."""
        metadata = job.metadata
        key = Key(metadata.namespace, metadata.name)
        there = self._plans.get(key)
        if there is not None and there[:2] == (metadata.uid, metadata.generation):
            return there[2]
        made: Plan | Refusal
        try:
            made = make_plan(job)
        except InvalidJobError as error:
            made = _refusal(error.problems)
        self._plans[key] = (metadata.uid, metadata.generation, made)
        return made

    def judge(self, view: JobView) -> Plan | Refusal:
        """Return the plan of a job that an attempt may be opened for, or why it may not.

        Looks at more than the spec: profiles and files may come and go.
        """
        job = view.job
        found = [Problem(show_path(one.path), one.message) for one in check_built(view.raw)]
        if found:
            return _refusal(found)
        try:
            backend = self._backends.get(job.spec.backend.type)
        except FineTuneError as error:
            return Refusal(Reason.BACKEND_NOT_FOUND, str(error))
        try:
            problems = [*backend.validate(job), *backend.check_inputs(job)]
        except Exception as error:
            # A plugin's fault; without a word in the status nobody would look for it.
            log.exception("backend cannot check a job", extra={"job": str(job.metadata.name)})
            return Refusal(Reason.BACKEND_FAILED, fault_of(job, error))
        errors = [one for one in problems if one.severity is Severity.ERROR]
        return _refusal(errors) if errors else self.plan(job)


def fault_of(job: FineTuneJob, error: Exception) -> str:
    """Return the sentence about a fault of the job's backend itself."""
    return (
        f"spec.backend.type {job.spec.backend.type} failed ({type(error).__name__}: {error}); the "
        "operator's log has the traceback"
    )


def _refusal(problems: Iterable[Problem]) -> Refusal:
    return Refusal(Reason.INVALID_SPEC, "; ".join(str(problem) for problem in problems))
