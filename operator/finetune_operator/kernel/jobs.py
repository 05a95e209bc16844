"""FineTuneJobs as the kernel sees them: parsed, planned and validated.

A job travels through the kernel as one value, a `JobView`, which `JobIndex` builds from the object
in the cache and from the job's `JobMemory`. This module neither decides nor writes.
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
from finetune_operator.api.v1alpha1.topology import backend_name
from finetune_operator.backends.base import AttemptRef, Handle
from finetune_operator.backends.instances import Backends
from finetune_operator.errors import FineTuneError, UnknownBackendError
from finetune_operator.kernel.job_memory import JobMemory
from finetune_operator.kube.cache import Key, key_of
from finetune_operator.kube.packed_jobs import size_of, unpack
from finetune_operator.kube.resources import Object
from finetune_operator.planner.hardware import expect
from finetune_operator.planner.plan import Expectation, Plan, make_plan
from finetune_operator.reconcile import attempts
from finetune_operator.reconcile.conditions import ConditionType, Reason, is_finished, is_true
from finetune_operator.reconcile.decide import Rejection


@dataclass(frozen=True)
class JobView:
    """State of one job as this process sees it.

    Attributes:
        key: Namespace and name.
        packed: The object in the cache (see `pack`).
        raw: The object as the API server has it.
        parsed: The object as a model, with `status`; None if the spec cannot be parsed.
        written: The status in `raw`; an empty status if it cannot be parsed.
        status: `written` with the decisions and handles that are not written yet.
        memory: The in-memory state of the job.
        rejection: Why the spec cannot be parsed.
    """

    key: Key
    packed: Object
    raw: Object
    parsed: FineTuneJob | None
    written: FineTuneJobStatus
    status: FineTuneJobStatus
    memory: JobMemory
    rejection: Rejection | None = None

    @property
    def job(self) -> FineTuneJob:
        """The parsed job. Only valid if the spec parsed."""
        assert self.parsed is not None, f"the spec of {self.key} cannot be parsed"
        return self.parsed

    @property
    def attempt(self) -> AttemptStatus | None:
        """The open attempt; None between attempts."""
        return attempts.current(self.status)

    @property
    def handle(self) -> Handle | None:
        """Handle of the newest attempt; None if the attempt is not known to exist."""
        return attempts.handle_of(self.status)

    @property
    def ref(self) -> AttemptRef | None:
        """Reference to the newest attempt for its backend; None without a handle."""
        if (handle := self.handle) is None:
            return None
        spec = self.parsed.spec if self.parsed is not None else None
        return AttemptRef(self.key, self.uid, self.status.attempt, handle, spec)

    @property
    def metadata(self) -> ObjectMeta:
        """Metadata of the job."""
        if self.parsed is not None:
            return self.parsed.metadata
        return ObjectMeta.model_validate(self.raw["metadata"])

    @property
    def uid(self) -> str:
        """Uid of the job; an earlier job of the same name has another."""
        return str(self.raw["metadata"]["uid"])

    @property
    def finalizers(self) -> Sequence[str]:
        """Finalizers, which block deletion."""
        return self.raw["metadata"].get("finalizers") or ()

    @property
    def backend(self) -> str:
        """Name of the backend."""
        return backend_name(self.raw["spec"].get("backend"))

    @property
    def is_deleted(self) -> bool:
        """Whether deletion was requested and waits for finalizers."""
        return bool(self.raw["metadata"].get("deletionTimestamp"))

    @property
    def has_to_stop(self) -> bool:
        """Whether the open attempt has to stop, if there is one."""
        is_ending = self.is_deleted or is_finished(self.status)
        return is_ending or self.job.spec.suspend or is_true(self.status, ConditionType.SUSPENDED)

    @property
    def is_ours(self) -> bool:
        """Whether `spec.managedBy` names this controller."""
        return is_ours(self.raw)

    def with_status(self, status: FineTuneJobStatus) -> "JobView":
        """Return the job with another status that is not written yet."""
        if status is self.status:
            return self
        parsed = self.parsed and self.parsed.model_copy(update={"status": status})
        return replace(self, parsed=parsed, status=status)

    def with_known_handle(self) -> "JobView":
        """Return the job with the handle of its open attempt, if only the memory has it."""
        attempt, submitted = self.attempt, self.memory.submitted
        if self.status.backend_ref is not None or attempt is None or submitted is None:
            return self
        number, handle = submitted
        if number != attempt.number:
            return self
        return self.with_status(attempts.with_handle(self.status, handle))


def is_ours(obj: Object) -> bool:
    """Whether `spec.managedBy` of an object, packed or not, names this controller."""
    return bool(obj["spec"].get("managedBy", MANAGED_BY) == MANAGED_BY)


def read_job(obj: Object, memory: JobMemory | None = None) -> JobView:
    """Parse an object of the API server, packed or not, which has its defaults."""
    key, raw, memory = key_of(obj), unpack(obj), memory or JobMemory()
    try:
        job = FineTuneJob.model_validate(raw)
    except ValidationError as error:
        problems = (
            Problem(show_path(tuple(detail["loc"])), detail["msg"]) for detail in error.errors()[:8]
        )
        text = "; ".join(str(problem) for problem in problems)
        status = _read_status(raw)
        rejection = Rejection(Reason.INVALID_SPEC, text)
        return JobView(key, obj, raw, None, status, status, memory, rejection)
    return JobView(key, obj, raw, job, job.status, job.status, memory)


def _read_status(raw: Object) -> FineTuneJobStatus:
    try:
        return FineTuneJobStatus.model_validate(raw.get("status") or {})
    except ValidationError:
        return FineTuneJobStatus()


_VIEWS_BYTES = 2**19
_VIEW_BYTES = 2**12  # of a view, besides its text


@dataclass(frozen=True, slots=True)
class _Known:
    """A job that has been read.

    Attributes:
        uid: Uid of the job.
        backend: Name of its backend.
        memory: Its in-memory state.
    """

    uid: str
    backend: str
    memory: JobMemory


class JobIndex:
    """Jobs of the cache, each planned once per spec.

    The jobs read last are retained parsed, up to `_VIEWS_BYTES` of JSON text. A parsed job takes
    about ten times the memory of its text, and a reconcile reads its job several times.

    Args:
        find: Returns the object of a job.
        backends: Validate jobs, and discard their state of a finished or deleted job.
    """

    def __init__(self, find: Callable[[Key], Object | None], backends: Backends) -> None:
        self._find = find
        self._backends = backends
        self._known: dict[Key, _Known] = {}
        self._views: dict[Key, JobView] = {}  # ordered by last use
        self._views_bytes = 0

    def get(self, key: Key) -> JobView | None:
        """Return the job as the cache has it now, with the handle of its newest attempt."""
        obj, known = self._find(key), self._known.get(key)
        if known is not None and (obj is None or obj["metadata"]["uid"] != known.uid):
            self._forget(key, known.backend, known.uid)
            known = None
        if obj is None:
            return None
        view = self._take(key)
        if view is None or view.packed is not obj:
            view = read_job(obj, known.memory if known is not None else None)
        self._known[key] = _Known(view.uid, view.backend, view.memory)
        self._retain(view)
        return view.with_known_handle()

    def is_current(self, view: JobView) -> bool:
        """Whether the cache still has the object that the view was built from."""
        return self._find(view.key) is view.packed

    def is_new(self, key: Key) -> bool:
        """Whether the job does not have a status yet."""
        obj = self._find(key)
        return obj is not None and not (obj.get("status") or {}).get("observedGeneration")

    def forget(self, view: JobView) -> None:
        """Drop the memory of a job that is finished or gone, here and in its backend."""
        self._forget(view.key, view.backend, view.uid)

    def _forget(self, key: Key, backend: str, uid: str) -> None:
        self._known.pop(key, None)
        self._take(key)
        with contextlib.suppress(FineTuneError):  # a backend that cannot be used has no memory
            self._backends.get(backend).forget(uid)

    def _take(self, key: Key) -> JobView | None:
        """Remove and return the parsed job, if it is retained."""
        if (view := self._views.pop(key, None)) is not None:
            self._views_bytes -= size_of(view.packed) + _VIEW_BYTES
        return view

    def _retain(self, view: JobView) -> None:
        """Retain a parsed job, and drop the least recently used ones with their plans."""
        self._views[view.key] = view
        self._views_bytes += size_of(view.packed) + _VIEW_BYTES
        while self._views_bytes > _VIEWS_BYTES and len(self._views) > 1:
            if (oldest := self._take(next(iter(self._views)))) is not None:
                oldest.memory.plan = None

    def plan(self, view: JobView) -> Plan | Rejection:
        """Return the job's plan, which depends on the spec alone."""
        generation = view.job.metadata.generation
        if view.memory.plan is None or view.memory.plan[0] != generation:
            plan: Plan | Rejection
            try:
                plan = make_plan(view.job)
            except InvalidJobError as error:
                plan = _rejection(error.problems)
            view.memory.plan = (generation, plan)
        return view.memory.plan[1]

    def validate(self, view: JobView) -> Plan | Rejection:
        """Return the plan if spec and profile allow an attempt, else the rejection.

        The result may change while the spec does not, because profiles change. Without a request.
        """
        job = view.job
        found = [
            Problem(show_path(problem.path), problem.message) for problem in check_built(view.raw)
        ]
        if found:
            return _rejection(found)
        try:
            problems = self._backends.of(job).validate(job)
        except FineTuneError as error:
            return unusable(error)
        errors = [problem for problem in problems if problem.severity is Severity.ERROR]
        if errors:
            return _rejection(errors)
        plan = self.plan(view)
        return plan if isinstance(plan, Rejection) else self._expected(view, plan)

    def _expected(self, view: JobView, plan: Plan) -> Plan | Rejection:
        """Return the plan with its forecast, or refuse a new run that cannot fit."""
        job, spec = view.job, view.job.spec
        found = self._expectation(view)
        has_checkpoint = spec.take_over or spec.checkpoint.resume_from not in ("auto", "none")
        is_new = not (job.status.attempt or has_checkpoint)
        is_checked = spec.training.check_memory is not False
        if found is not None and found.fits is False and is_checked and is_new:
            return Rejection(Reason.DOES_NOT_FIT, found.message)
        return replace(plan, expectation=found)

    def _expectation(self, view: JobView) -> Expectation | None:
        """Return the forecast, computed once for each spec and its GPU sizes."""
        job = view.job
        if not job.spec.topology.gpus_per_node:
            return None
        try:
            sizes = tuple(self._backends.of(job).gpu_sizes(job))
        except FineTuneError as error:
            return Expectation(None, Reason.CAPACITY_UNKNOWN, str(error))
        key = (job.metadata.generation, sizes)
        if view.memory.expectation is None or view.memory.expectation[0] != key:
            view.memory.expectation = (key, expect(job, sizes))
        return view.memory.expectation[1]

    async def check_inputs(self, view: JobView, plan: Plan) -> Plan | Rejection:
        """Return the plan of a valid job if its inputs exist, else the rejection.

        Not for a refused job, whose author could otherwise have requests sent with the operator's
        identity.
        """
        try:
            problems = await self._backends.of(view.job).check_inputs(view.job)
        except FineTuneError as error:
            return unusable(error)
        errors = [problem for problem in problems if problem.severity is Severity.ERROR]
        return _rejection(errors) if errors else plan


def unusable(error: FineTuneError, advice: str = "") -> Rejection:
    """Return the rejection of a job whose backend cannot be used."""
    is_missing = isinstance(error, UnknownBackendError)
    reason = Reason.BACKEND_NOT_FOUND if is_missing else Reason.BACKEND_FAILED
    return Rejection(reason, f"{error}{advice}")


def _rejection(problems: Iterable[Problem]) -> Rejection:
    return Rejection(Reason.INVALID_SPEC, "; ".join(str(problem) for problem in problems))
