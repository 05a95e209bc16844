"""FineTuneJobs as the kernel sees them: read, planned, validated, and with their attempt observed.

A job travels through the kernel as one value, a `JobView`: `JobIndex` makes it of the object in the
cache and of what no status holds yet, `Observer` adds an attempt that nobody wrote down. Nothing
here decides or writes.
"""

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from pydantic import ValidationError

from finetune_operator.api.paths import show_path
from finetune_operator.api.problems import InvalidJobError, Problem, Severity
from finetune_operator.api.unbuilt import check_built
from finetune_operator.api.v1alpha1 import FineTuneJob, FineTuneJobStatus, ObjectMeta
from finetune_operator.api.v1alpha1.job import MANAGED_BY
from finetune_operator.api.v1alpha1.status import AttemptStatus
from finetune_operator.backends.base import AttemptRef, Handle
from finetune_operator.backends.instances import Backends
from finetune_operator.errors import FineTuneError, UnknownBackendError
from finetune_operator.kube.cache import Key, key_of
from finetune_operator.kube.resources import Object
from finetune_operator.planner.plan import Plan, make_plan
from finetune_operator.reconcile import attempts
from finetune_operator.reconcile.conditions import ConditionType, Reason, is_finished, is_true
from finetune_operator.reconcile.decide import Rejection


@dataclass(frozen=True)
class JobView:
    """One job as this process sees it: the object, and what no status holds yet of its attempt.

    Attributes:
        key: Its namespace and name.
        raw: The object as the API server has it.
        parsed: The object as a model, with `status`; None where its spec cannot be read.
        written: The status in `raw`; what cannot be read of it counts as never written.
        status: The same with what is decided or known and not written yet.
        rejection: Why its spec cannot be read.
    """

    key: Key
    raw: Object
    parsed: FineTuneJob | None
    written: FineTuneJobStatus
    status: FineTuneJobStatus
    rejection: Rejection | None = None

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
    def ref(self) -> AttemptRef | None:
        """The newest attempt, for its backend; None where it is not known to exist."""
        if (handle := self.handle) is None:
            return None
        spec = self.parsed.spec if self.parsed is not None else None
        return AttemptRef(self.key, self.uid, self.status.attempt, handle, spec)

    @property
    def metadata(self) -> ObjectMeta:
        """Its metadata."""
        if self.parsed is not None:
            return self.parsed.metadata
        return ObjectMeta.model_validate(self.raw["metadata"])

    @property
    def uid(self) -> str:
        """Its uid, which another job of its name does not have."""
        return str(self.raw["metadata"]["uid"])

    @property
    def finalizers(self) -> Sequence[str]:
        """What keeps it when it is deleted."""
        return self.raw["metadata"].get("finalizers") or ()

    @property
    def backend(self) -> str:
        """Name of its backend; empty where the spec does not name it."""
        return str((self.raw["spec"].get("backend") or {}).get("type", ""))

    @property
    def is_deleted(self) -> bool:
        """Whether somebody deleted it, and finalizers keep it."""
        return bool(self.raw["metadata"].get("deletionTimestamp"))

    @property
    def is_told_to_stop(self) -> bool:
        """Whether its open attempt may not go on, if it exists."""
        is_over = self.is_deleted or is_finished(self.status)
        return is_over or self.job.spec.suspend or is_true(self.status, ConditionType.SUSPENDED)

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
        return JobView(key, raw, None, status, status, Rejection(Reason.INVALID_SPEC, text))
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
        """Drop the opening: the status has the attempt now, or says that there is none."""
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


class JobIndex:
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
        self._plans: dict[Key, tuple[str, int, Plan | Rejection]] = {}

    def get(self, key: Key) -> JobView | None:
        """Return the job as it is seen now, or None if there is none."""
        raw, there = self._find(key), self._read.get(key)
        if there is not None and (raw is None or raw["metadata"]["uid"] != there.uid):
            self._read.pop(key)
            self._plans.pop(key, None)
            self.forget(there)
        if raw is None:
            return None
        if there is None or there.raw is not raw:
            there = self._read[key] = read_job(raw)
        return self._pending.added_to(there)

    def is_current(self, view: JobView) -> bool:
        """Say whether the object is still the one that the view was made of."""
        return self._find(view.key) is view.raw

    def is_new(self, key: Key) -> bool:
        """Say whether nothing was written about the job, and no attempt of it opened."""
        raw = self._find(key)
        if raw is None or key in self._pending:
            return False
        return not (raw.get("status") or {}).get("observedGeneration")

    def forget(self, view: JobView) -> None:
        """Have its backend drop what it keeps about a job that is over or gone."""
        with contextlib.suppress(FineTuneError):  # one that cannot be used keeps nothing
            self._backends.get(view.backend).forget(view.uid)

    def plan(self, job: FineTuneJob) -> Plan | Rejection:
        """Return the job's plan; the spec alone decides it."""
        metadata = job.metadata
        key = Key(metadata.namespace, metadata.name)
        there = self._plans.get(key)
        if there is not None and there[:2] == (metadata.uid, metadata.generation):
            return there[2]
        made: Plan | Rejection
        try:
            made = make_plan(job)
        except InvalidJobError as error:
            made = _rejection(error.problems)
        self._plans[key] = (metadata.uid, metadata.generation, made)
        return made

    async def validate(self, view: JobView) -> Plan | Rejection:
        """Return the plan of a job that an attempt may be opened for, or why it may not.

        Reads more than the spec: profiles and files may come and go.
        """
        job = view.job
        found = [Problem(show_path(one.path), one.message) for one in check_built(view.raw)]
        if found:
            return _rejection(found)
        try:
            backend = self._backends.of(job)
            problems = [*backend.validate(job), *await backend.check_inputs(job)]
        except UnknownBackendError as error:
            return Rejection(Reason.BACKEND_NOT_FOUND, str(error))
        except FineTuneError as error:
            return Rejection(Reason.BACKEND_FAILED, str(error))
        errors = [one for one in problems if one.severity is Severity.ERROR]
        return _rejection(errors) if errors else self.plan(job)


def _rejection(problems: Iterable[Problem]) -> Rejection:
    return Rejection(Reason.INVALID_SPEC, "; ".join(str(problem) for problem in problems))
