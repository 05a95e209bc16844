"""The kubernetes backend: an attempt is one Indexed Job in the job's own namespace.

This file only connects the verbs to their modules. Verbs that send requests are in `live_attempts`,
so that `ftctl render` and `validate` do not import its libraries.
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, ClassVar

from finetune_operator.api.problems import Problem, Severity
from finetune_operator.api.v1alpha1.job import FineTuneJob
from finetune_operator.api.v1alpha1.profile import WHOLE_GPU
from finetune_operator.backends.base import (
    Attempt,
    AttemptRef,
    Backend,
    BackendContext,
    Found,
    Handle,
    Limits,
    Observation,
    Request,
    Written,
)
from finetune_operator.backends.kubernetes import pod_checks
from finetune_operator.backends.kubernetes.attempt_profiles import FIELD, AttemptProfiles
from finetune_operator.backends.kubernetes.child_names import BACKEND, AttemptName
from finetune_operator.backends.kubernetes.render import render
from finetune_operator.backends.kubernetes.watched import WATCHES
from finetune_operator.backends.kubernetes.written import written
from finetune_operator.backends.profiles import ProfileError, profile_to_render
from finetune_operator.errors import BackendError
from finetune_operator.kube.watch import Watch
from finetune_operator.planner.catalogue import GpuSize, size_of, size_with
from finetune_operator.planner.plan import Plan

if TYPE_CHECKING:
    from finetune_operator.backends.kubernetes.live_attempts import LiveAttempts

NAMESPACE_VARIABLE = "FINETUNE_OPERATOR_LEASE_NAMESPACE"
DEFAULT_NAMESPACE = "finetune-operator"


class KubernetesBackend(Backend):
    """Backend `kubernetes`: node pools of the cluster that the operator runs in.

    Args:
        context: Contains the cluster in the operator. Elsewhere it contains the known profiles, and
            only `validate` and `render` work.
    """

    name: ClassVar[str] = BACKEND
    needs_finalizer: ClassVar[bool] = False
    finds_from_cache: ClassVar[bool] = True
    runs_without_cluster: ClassVar[bool] = False
    watches: ClassVar[tuple[Watch, ...]] = WATCHES
    # The limits are generous, because each request to the API server has its own timeout with a
    # more precise error.
    limits: ClassVar[Limits] = Limits(
        submit=120.0, find=60.0, observe=60.0, cancel=60.0, collect=60.0
    )

    first_progress_seconds: ClassVar[float] = 2.0
    """Delay from the first observation that an attempt runs until its progress is first read."""

    def __init__(self, context: BackendContext) -> None:
        self._cluster = context.cluster
        self._now = context.now
        self._profiles = AttemptProfiles(context.cluster, context.profiles)
        self._operator_namespace = context.environ.get(NAMESPACE_VARIABLE) or DEFAULT_NAMESPACE
        self._attempts: LiveAttempts | None = None

    def validate(self, job: FineTuneJob) -> Sequence[Problem]:
        """List unsupported features, and fields that the job's profile forbids."""
        found = pod_checks.impossible(job)
        if any(one.severity is Severity.ERROR for one in found):
            return found
        try:
            profile = self._profiles.of(job)
        except ProfileError as error:
            return [*found, error.problem(FIELD)]
        return [*found, *pod_checks.forbidden(job, profile)]

    def gpu_sizes(self, job: FineTuneJob) -> Sequence[GpuSize]:
        """List the size of the job, or else the sizes of its profile or the memory of its GPUs.

        The memory of MIG slices and other parts of a GPU is only known from the profile.
        """
        own = super().gpu_sizes(job)
        try:
            profile = self._profiles.of(job).spec
        except ProfileError:
            return own
        if profile.nodes.gpu_memory_gib is not None and not own:
            return (size_with(profile.nodes.gpu_memory_gib),)
        if profile.resources.gpu != WHOLE_GPU:
            return ()
        return own or [size_of(name) for name in profile.nodes.instance_types]

    async def close(self) -> None:
        """Cancel open requests to pods."""
        if self._attempts is not None:
            await self._attempts.close()

    def writes(self, job: FineTuneJob) -> Sequence[Written]:
        """List the folders that the job writes, resolved by its profile if that is known."""
        try:
            return written(job, self._profiles.of(job).spec)
        except ProfileError:
            return written(job, None)

    def render(self, plan: Plan, attempt: Attempt) -> Request:
        """Return the attempt's manifests.

        Raises:
            BackendError: The job's profile is unknown or no longer allows the job, or the
                configuration
                is too long.
        """
        profile = profile_to_render(self, plan.job, self._profiles.of, FIELD)
        return render(plan, profile, attempt, operator_namespace=self._operator_namespace)

    async def submit(self, request: Request) -> Handle:
        """Create the attempt's objects; adopt objects that the job already owns."""
        return await self._live().submit(request)

    async def find(self, job: FineTuneJob, attempt: Attempt) -> Found | None:
        """Return the attempt if its batch Job exists; for an opened attempt, ask the API server."""
        metadata = job.metadata
        name = AttemptName(metadata.namespace, metadata.name, attempt.number)
        is_opened = attempt.number <= job.status.attempt
        return await self._live().find(name, metadata.uid, is_opened=is_opened)

    async def observe(self, ref: AttemptRef) -> Observation:
        """Observe the attempt, and publish the address of rank 0's pod once it has one."""
        seen = await self._live().observe(ref)
        uri = ref.spec.checkpoint.uri if ref.spec is not None else None
        return replace(seen, checkpoints=uri or "")

    async def cancel(self, ref: AttemptRef, until: datetime) -> bool:
        """Stop the attempt permanently; its batch Job remains as the record."""
        await self._live().cancel(ref.handle, until)
        return True

    def logs(self, ref: AttemptRef, rank: int, follow: bool = False) -> AsyncIterator[str]:
        """Yield the last lines of the pod that the rank runs in."""
        return self._live().logs(ref.handle, rank, follow)

    async def collect(self, ref: AttemptRef) -> Sequence[str]:
        """Return the exported artifacts as `pvc://` URIs."""
        return await self._live().collect(ref.handle)

    def forget(self, job_uid: str) -> None:
        """Drop the in-memory state of a job that has finished or was deleted."""
        if self._attempts is not None:
            self._attempts.forget(job_uid)

    def _live(self) -> "LiveAttempts":
        if self._attempts is None:
            from finetune_operator.backends.kubernetes.live_attempts import LiveAttempts
            from finetune_operator.backends.kubernetes.progress import ProgressReader

            if self._cluster is None:
                raise BackendError(
                    "backend kubernetes runs jobs through the operator; apply the manifest with "
                    "kubectl"
                )
            self._attempts = LiveAttempts(
                self._cluster, self._now, ProgressReader(self.first_progress_seconds)
            )
        return self._attempts
