"""The log of a rank, which is its pod's log and shared by all ranks of the node."""

from collections.abc import AsyncIterator

from finetune_operator.backends.base import AttemptPhase
from finetune_operator.backends.kubernetes.child_names import CONTAINER, AttemptName, facts_of
from finetune_operator.backends.kubernetes.children import Children
from finetune_operator.backends.kubernetes.judge import judge
from finetune_operator.backends.kubernetes.log_tail import kept_tail
from finetune_operator.backends.kubernetes.observe import observation_of
from finetune_operator.backends.kubernetes.verdict import PodState
from finetune_operator.errors import NoLogYetError, NoSuchRankError
from finetune_operator.kube.api_errors import InvalidError, NotFoundError
from finetune_operator.kube.resources import Object

TAIL_LINES = 1000


async def read_log(
    children: Children, name: AttemptName, batch_job: Object, rank: int, follow: bool
) -> AsyncIterator[str]:
    """Yield the last lines of the pod that `rank` runs in; `follow` continues to its end.

    Without a log, a sentence gives the reason, and the stored lines of the attempt's log follow.

    Raises:
        NoSuchRankError: the attempt has no such rank.
        NoLogYetError: the rank's pod does not exist yet, or has not started.
    """
    facts = facts_of(batch_job)
    world_size = facts.nodes * facts.processes_per_node
    if rank >= world_size:
        ranks = "rank 0 alone" if world_size == 1 else f"ranks 0 to {world_size - 1}"
        raise NoSuchRankError(f"rank {rank} does not exist; {name} has {ranks}")
    index = rank // facts.processes_per_node
    found = await children.pods(name, batch_job["metadata"]["uid"])
    pods = [one for one in found if one.index == index]
    if not pods:
        seen = observation_of(batch_job, [judge(one) for one in found])
        if seen.phase is AttemptPhase.PENDING and not kept_tail(batch_job):
            raise NoLogYetError(f"the pod of rank {rank} of {name} does not exist yet")
        yield f"the pod of rank {rank} of {name} no longer exists"
        for line in kept_tail(batch_job):
            yield line
        return
    newest = judge(max(pods, key=lambda one: one.created))
    pod = newest.pod.name
    client, has_lines, failure = children.cluster.client, False, ""
    try:
        lines = client.log(pod, name.namespace, container=CONTAINER, tail=TAIL_LINES, follow=follow)
        async for line in lines:
            has_lines = True
            yield line
    except (InvalidError, NotFoundError) as error:
        failure = f"pod {pod} of rank {rank} has no log ({error})"
    # The log of a pod without a node is empty, and the API server refuses to read the log of a
    # container that waits.
    if not has_lines and newest.state is PodState.WAITING:
        raise NoLogYetError(f"pod {pod} of rank {rank} has not started")
    if failure:
        yield failure
