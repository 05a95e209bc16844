"""The verbs of the kubernetes backend that send requests to the cluster.

`KubernetesBackend` creates `LiveAttempts` on first use. Its memory may be lost, because after a
restart all important state is found in the cluster.
"""

from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from datetime import datetime

from finetune_operator.backends.base import (
    AttemptPhase,
    AttemptRef,
    Effect,
    Found,
    Handle,
    Observation,
    Request,
)
from finetune_operator.backends.kubernetes import kept, observe, rank_zero, volumes
from finetune_operator.backends.kubernetes.attempt_profiles import digest_of
from finetune_operator.backends.kubernetes.cancel import Canceller
from finetune_operator.backends.kubernetes.child_names import (
    AttemptFacts,
    AttemptName,
    facts_of,
    is_owned,
    owner_of,
)
from finetune_operator.backends.kubernetes.children import Children
from finetune_operator.backends.kubernetes.ended_pods import EndedPods
from finetune_operator.backends.kubernetes.finality import is_ending
from finetune_operator.backends.kubernetes.judge import judge
from finetune_operator.backends.kubernetes.kueue import Kueue
from finetune_operator.backends.kubernetes.liveness import LivenessKills
from finetune_operator.backends.kubernetes.log_tail import LogTails
from finetune_operator.backends.kubernetes.lost_pods import LostPods
from finetune_operator.backends.kubernetes.outlived import OutlivedTrainers
from finetune_operator.backends.kubernetes.partial_gangs import PartialGangs
from finetune_operator.backends.kubernetes.pod_logs import read_log
from finetune_operator.backends.kubernetes.predecessors import end_earlier, make_way
from finetune_operator.backends.kubernetes.progress import ProgressReader
from finetune_operator.backends.kubernetes.rank_zero import RankZeroNames, address_of
from finetune_operator.backends.kubernetes.reasons import (
    KubernetesReason,
    may_be_explained_by_events,
)
from finetune_operator.backends.kubernetes.silence import silent_component
from finetune_operator.backends.kubernetes.silent_nodes import (
    SilentNodes,
    earliest,
    obstacle_of_unfenced,
    warning_about,
)
from finetune_operator.backends.kubernetes.submit import handle_of, submit
from finetune_operator.backends.kubernetes.upkeep import Upkeep
from finetune_operator.backends.kubernetes.verdict import Verdict
from finetune_operator.backends.kubernetes.warning_events import WarningEvents
from finetune_operator.kube.cluster import Cluster
from finetune_operator.kube.resources import ENDPOINT_SLICES, PODS, Object


class LiveAttempts:
    """Attempts in one cluster.

    Args:
        cluster: The cluster.
        now: Returns the current time, with a time zone.
        progress: Reads the progress of the attempts.
    """

    def __init__(
        self, cluster: Cluster, now: Callable[[], datetime], progress: ProgressReader
    ) -> None:
        self._lost = LostPods(cluster)
        self._children = Children(cluster, self._lost.mark)
        self._progress = progress
        self._names = RankZeroNames()
        self._warnings = WarningEvents()
        self._now = now
        self._kueue = Kueue()
        self._partial = PartialGangs(now)
        self._outlived = OutlivedTrainers(now)
        self._silent = SilentNodes(self._lost)
        self._liveness = LivenessKills()
        self._upkeep = Upkeep()
        self._canceller = Canceller(now)
        self._log_tails = LogTails()
        self._ended = EndedPods(cluster.cache(PODS))
        self._of_job: defaultdict[str, set[str]] = defaultdict(set)  # uids of the job's attempts

    async def close(self) -> None:
        """Cancel pending requests; no further request is sent."""
        await self._progress.close()

    async def submit(self, request: Request) -> Handle:
        """Create or adopt the attempt's objects."""
        handle = await submit(request, self._children)
        self._open(request.job_uid, handle.uid)
        self._names.note_submitted(handle.uid, request.attempt)
        return handle

    async def find(self, name: AttemptName, job_uid: str, *, is_opened: bool) -> Found | None:
        """Return the attempt if its batch Job exists and the job owns it.

        Args:
            name: Name of the attempt.
            job_uid: Uid of the job.
            is_opened: Whether a request without a response may have created it. Its absence from a
                cache, which may be late, is then no proof.

        Raises:
            AlreadyOwnedError: Orphaned pods are alive that no controller ends.
            NotCreatedError: Pods of the attempt are alive without their Job, or another attempt has
                not ended.
            ApiError: The API server does not respond.
        """
        there = await self._children.batch_job(name)
        if is_opened and not is_owned(there, job_uid):
            there = await self._children.ask(name)
            if there is not None and is_owned(there, job_uid):
                self._children.note_response(there)
            else:
                await make_way(self._children, name, job_uid)
        if there is None or not is_owned(there, job_uid):
            return None
        since = datetime.fromisoformat(there["metadata"]["creationTimestamp"])
        return Found(handle_of(name, there), since)

    async def observe(self, ref: AttemptRef) -> Observation:
        """Observe the batch Job and its pods; also publish rank 0's name and read its progress."""
        handle, name = ref.handle, AttemptName.parse(ref.handle.name)
        batch_job = await self._owned(name, handle)
        if batch_job is not None:
            self._open(ref.job_uid, handle.uid)
        there = await self._children.pods(name, handle.uid)
        pods = self._ended.including_gone(handle.uid, there)
        seen = observe.observation_of(batch_job, pods) if batch_job else observe.gone(name, pods)
        if ref.spec is None or ref.spec.deadlines.hang_seconds is not None:
            seen = await self._liveness.explain(
                self._children.cluster.client, handle.uid, seen, pods
            )
        if batch_job is not None:
            seen = self._outlived.withhold(handle.uid, seen, pods, is_ending=is_ending(batch_job))
            if seen.phase is AttemptPhase.FAILED or seen.outlived_by:
                await self._log_tails.keep(self._children, name, batch_job, pods)
            await end_earlier(self._children, name, owner_of(batch_job).get("uid", ""))
        if seen.phase is not AttemptPhase.PENDING:
            self._partial.forget(handle.uid)
        if seen.all_gone:
            self._forget(handle.uid)
        elif batch_job is not None and seen.phase in (AttemptPhase.PENDING, AttemptPhase.RUNNING):
            return await self._observe_unfinished(seen, handle, batch_job, pods)
        if seen.phase is AttemptPhase.FAILED:
            seen = replace(seen, obstacle=obstacle_of_unfenced(pods))
        ends = (self._lost.seconds_left(one.pod) for one in pods if one.holds_node)
        again = earliest(seen.requeue_seconds, *ends)
        return replace(seen, warning=warning_about(pods), requeue_seconds=again)

    async def _observe_unfinished(
        self, seen: Observation, handle: Handle, batch_job: Object, pods: Sequence[Verdict]
    ) -> Observation:
        name, facts = AttemptName.parse(handle.name), facts_of(batch_job)
        pods = [one for one in pods if not one.may_be_replaced]
        if facts.service:
            seen = await self._with_rank_zero(seen, handle, batch_job, pods)
        address = self._names.given(handle.uid)
        upkeep = await self._upkeep.keep(self._children, name, batch_job, handle.digest, address)
        if seen.phase is AttemptPhase.RUNNING:
            seen = await self._with_progress(seen, handle.uid, facts, pods)
        else:
            self._silent.forget(handle.uid)
            seen = await self._with_obstacle(seen, name, batch_job, pods)
        again = earliest(seen.requeue_seconds, upkeep.again_seconds)
        is_named = bool(seen.unheard or seen.gives_up)
        warning = upkeep.message or ("" if is_named else warning_about(pods))
        return replace(seen, warning=warning, requeue_seconds=again)

    async def cancel(self, handle: Handle, until: datetime) -> None:
        """Stop the attempt."""
        name = AttemptName.parse(handle.name)
        seen = await self._seen(name, handle)
        is_done = seen is not None and seen.phase is AttemptPhase.SUCCEEDED
        completed = seen.termination if seen is not None and is_done else None
        await self._canceller.cancel(self._children, name, handle.uid, until, completed)

    async def logs(self, handle: Handle, rank: int, follow: bool) -> AsyncIterator[str]:
        """Yield the lines of the rank's pod."""
        name = AttemptName.parse(handle.name)
        batch_job = await self._owned(name, handle)
        if batch_job is None:
            yield f"Job {name} no longer exists, nor does rank {rank}'s log"
            return
        async for line in read_log(self._children, name, batch_job, rank, follow):
            yield line

    async def collect(self, handle: Handle) -> Sequence[str]:
        """Return a successful attempt's artifacts, or its output folder."""
        name = AttemptName.parse(handle.name)
        batch_job = await self._owned(name, handle)
        if batch_job is None:
            return ()
        seen = await self._seen(name, handle)
        if seen is None or seen.phase is not AttemptPhase.SUCCEEDED:
            return ()
        named = seen.termination.artifacts if seen.termination else ()
        facts = facts_of(batch_job)
        folder = facts.output_folder
        uris = (volumes.output_uri(path, facts.output, folder) for path in named)
        return tuple(dict.fromkeys(uris)) or (facts.output,)

    async def _seen(self, name: AttemptName, handle: Handle) -> Observation | None:
        """Return the observation by the batch Job and its pods; None without the batch Job."""
        batch_job = await self._owned(name, handle)
        if batch_job is None:
            return None
        there = await self._children.pods(name, handle.uid)
        return observe.observation_of(batch_job, self._ended.including_gone(handle.uid, there))

    async def _owned(self, name: AttemptName, handle: Handle) -> Object | None:
        """Return the batch Job, if it has the uid in the handle."""
        batch_job = await self._children.batch_job(name)
        is_owned = batch_job is not None and batch_job["metadata"]["uid"] == handle.uid
        return batch_job if is_owned else None

    async def _with_rank_zero(
        self, seen: Observation, handle: Handle, batch_job: Object, pods: Sequence[Verdict]
    ) -> Observation:
        """Publish the name of rank 0's pod; without it the other pods would wait silently."""
        address = address_of(pods)
        if not address or address == self._names.given(handle.uid):
            return seen
        name = AttemptName.parse(handle.name)
        recorded = None
        if digest_of(batch_job) == handle.digest:
            recorded = kept.wanted(batch_job, name, address).get(ENDPOINT_SLICES)
        obstacle = await self._names.give(self._children, name, batch_job, recorded, address)
        if obstacle is None:
            return seen
        return replace(seen, obstacle=obstacle, requeue_seconds=rank_zero.AGAIN_SECONDS)

    async def _with_progress(
        self, seen: Observation, uid: str, facts: AttemptFacts, pods: Sequence[Verdict]
    ) -> Observation:
        self._warnings.forget(uid)
        address = address_of(pods)
        if not address:
            return self._silent.judge(uid, seen, pods, facts, None)
        interval = facts.status_interval_seconds
        read = await self._progress.read(uid, address, facts.metrics_port, interval)
        seen = replace(seen, progress=read.progress, requeue_seconds=read.requeue_seconds)
        if read.trouble:
            remedy = (
                f"check the pod's node, and that NetworkPolicies let the operator connect to port "
                f"{facts.metrics_port} of the pod"
            )
            seen = replace(seen, unheard=f"{read.trouble}; {remedy}")
        elif read.is_early and read.progress is None:
            seen = replace(seen, is_training=False)
        return self._silent.judge(uid, seen, pods, facts, read.heard_at)

    async def _with_obstacle(
        self, seen: Observation, name: AttemptName, batch_job: Object, pods: Sequence[Verdict]
    ) -> Observation:
        """Complete the obstacle of a pending gang, and let it give way to an older gang."""
        client, uid = self._children.cluster.client, batch_job["metadata"]["uid"]
        obstacle, waits = seen.obstacle, [seen.requeue_seconds]
        if obstacle is not None and obstacle.effect is Effect.QUEUED:
            obstacle, again = await self._kueue.check(client, obstacle)
            waits.append(again)
        elif obstacle is None and may_be_explained_by_events(batch_job, pods):
            obstacle, again = await self._warnings.read(client, name.namespace, uid, pods)
            waits.append(again)
        if obstacle is None:
            facts = [one.pod for one in pods]
            obstacle, again = silent_component(batch_job, facts, self._now())
            waits.append(again)
        if obstacle is not None and obstacle.reason == KubernetesReason.VOLUME_NOT_READY:
            others = [one for one in self._children.cached_pods(name.key) if one.owner_uid != uid]
            if lost := warning_about([judge(one) for one in others]):  # its node holds the volume
                obstacle = replace(obstacle, message=f"{obstacle.message}; {lost}")
        gives_up, again = self._partial.observe(name, batch_job, pods)
        again = earliest(*waits, again)
        return replace(seen, obstacle=obstacle, gives_up=gives_up, requeue_seconds=again)

    def _open(self, job_uid: str, uid: str) -> None:
        self._of_job[job_uid].add(uid)
        self._ended.open(uid)

    def forget(self, job_uid: str) -> None:
        """Drop the in-memory state of the attempts of a finished or deleted job."""
        for uid in self._of_job.pop(job_uid, ()):
            self._forget(uid)
        self._partial.forget_job(job_uid)

    def _forget(self, uid: str) -> None:
        self._progress.forget(uid)
        self._warnings.forget(uid)
        self._names.forget(uid)
        self._upkeep.forget(uid)
        self._canceller.forget(uid)
        self._log_tails.forget(uid)
        self._ended.forget(uid)
        self._outlived.forget(uid)
        self._silent.forget(uid)
        self._liveness.forget(uid)
        self._partial.forget(uid)
