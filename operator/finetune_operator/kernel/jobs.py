"""FineTuneJobs as the kernel holds them: parsed, planned, and judged fit for an attempt.

Parsing and planning are pure, so their results are kept as long as the object is the same.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points

from pydantic import ValidationError

from finetune_operator.api.paths import show_path
from finetune_operator.api.problems import InvalidJobError, Problem, Severity
from finetune_operator.api.unbuilt import check_built
from finetune_operator.api.v1alpha1 import FineTuneJob, FineTuneJobStatus, ObjectMeta
from finetune_operator.api.v1alpha1.job import MANAGED_BY
from finetune_operator.backends import registry
from finetune_operator.backends.base import Backend, BackendContext
from finetune_operator.errors import BrokenBackendError, FineTuneError, UnknownBackendError
from finetune_operator.kube.cache import Key
from finetune_operator.kube.resources import Object
from finetune_operator.planner.plan import Plan, make_plan
from finetune_operator.reconcile.conditions import Reason
from finetune_operator.reconcile.decide import Refusal

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class KnownJob:
    """One job as last seen.

    Attributes:
        raw: The object itself.
        job: The object as a model; where its spec cannot be read, None.
        status: Its status; what cannot be read of it counts as never written.
        refusal: Why its spec cannot be read.
    """

    raw: Object
    job: FineTuneJob | None
    status: FineTuneJobStatus
    refusal: Refusal | None = None

    @property
    def metadata(self) -> ObjectMeta:
        """Its metadata."""
        return ObjectMeta.model_validate(self.raw["metadata"])

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


def read_job(raw: Object) -> KnownJob:
    """Return the job in an object of the API server, which has its defaults."""
    try:
        job = FineTuneJob.model_validate(raw)
    except ValidationError as error:
        problems = (Problem(show_path(tuple(one["loc"])), one["msg"]) for one in error.errors()[:8])
        text = "; ".join(str(problem) for problem in problems)
        return KnownJob(raw, None, _read_status(raw), Refusal(Reason.INVALID_SPEC, text))
    return KnownJob(raw, job, job.status)


def _read_status(raw: Object) -> FineTuneJobStatus:
    try:
        return FineTuneJobStatus.model_validate(raw.get("status") or {})
    except ValidationError:
        return FineTuneJobStatus()


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

    def live_in_cluster(self, name: str) -> bool | None:
        """Say whether the backend's attempts do; None where it cannot be used."""
        try:
            return self.get(name).lives_in_cluster
        except FineTuneError:
            return None


class JobBook:
    """Parsed jobs and their plans, kept while the objects they were made from are the same."""

    def __init__(self, find: Callable[[Key], Object | None], backends: Backends) -> None:
        self._find = find
        self._backends = backends
        self._known: dict[Key, KnownJob] = {}
        self._plans: dict[Key, tuple[str, int, Plan | Refusal]] = {}

    def get(self, key: Key) -> KnownJob | None:
        """Return the job as last seen, or None if there is none."""
        raw = self._find(key)
        if raw is None:
            self._known.pop(key, None)
            self._plans.pop(key, None)
            return None
        there = self._known.get(key)
        if there is None or there.raw is not raw:
            there = self._known[key] = read_job(raw)
        return there

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

    def judge(self, known: KnownJob) -> Plan | Refusal:
        """Return the plan of a job that an attempt may be opened for, or why it may not.

        Looks at more than the spec: profiles and files may come and go.
        """
        job = known.job
        if job is None or known.refusal is not None:
            return known.refusal or _refusal([])
        found = [Problem(show_path(one.path), one.message) for one in check_built(known.raw)]
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
