"""The log of one rank: its pod's, which all ranks of the node share."""

from collections.abc import AsyncIterator

from finetune_operator.backends.aks.children import Children
from finetune_operator.backends.aks.names import CONTAINER, AttemptFacts, AttemptName
from finetune_operator.backends.aks.words import index_of
from finetune_operator.kube.errors import InvalidError, NotFoundError

TAIL_LINES = 1000


async def read_log(
    children: Children, name: AttemptName, uid: str, facts: AttemptFacts, rank: int, follow: bool
) -> AsyncIterator[str]:
    """Yield the last lines of the pod that `rank` runs in; `follow` goes on to its end.

    Where there is no log, one sentence says why.
    """
    if rank >= facts.nodes * facts.processes_per_node:
        ranks = facts.nodes * facts.processes_per_node
        yield f"there is no rank {rank} in {name}, which has {ranks}"
        return
    index = rank // facts.processes_per_node
    pods = [one for one in await children.pods(name, uid) if index_of(one) == index]
    if not pods:
        yield f"rank {rank} of {name} has no pod now"
        return
    newest = max(pods, key=lambda one: str(one["metadata"].get("creationTimestamp", "")))
    pod = newest["metadata"]["name"]
    client = children.cluster.client
    try:
        lines = client.log(pod, name.namespace, container=CONTAINER, tail=TAIL_LINES, follow=follow)
        async for line in lines:
            yield line
    except (InvalidError, NotFoundError) as error:
        yield f"pod {pod} of rank {rank} has no log ({error})"
