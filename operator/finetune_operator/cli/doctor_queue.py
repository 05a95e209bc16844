"""`ftctl doctor --cluster`: check Kueue and the queues that the namespace's jobs name."""

from finetune_operator.cli.cluster_probe import Probe
from finetune_operator.cli.top_rows import get_in
from finetune_operator.kube.api_errors import NotFoundError
from finetune_operator.kube.resources import FINE_TUNE_JOBS, KUEUE_GROUP, Resource
from finetune_operator.reconcile.conditions import ConditionType

_TOPIC = "queues (Kueue)"
_RELEASES = "https://github.com/kubernetes-sigs/kueue/releases"
_INSTALL = f"kubectl apply --server-side -f {_RELEASES}/latest/download/manifests.yaml"
_FINAL = (ConditionType.COMPLETE, ConditionType.FAILED)


async def check_queue(probe: Probe) -> None:
    """Check that Kueue is installed, and that each queue of an unfinished job exists and works."""
    jobs = await probe.list(_TOPIC, "FineTuneJobs", FINE_TUNE_JOBS, probe.namespace) or []
    waiting: dict[str, list[str]] = {}
    for one in jobs:
        conditions = get_in(one, "status", "conditions") or ()
        is_final = any(c["type"] in _FINAL and c["status"] == "True" for c in conditions)
        if (queue := get_in(one, "spec", "queue", "name")) and not is_final:
            waiting.setdefault(str(queue), []).append(one["metadata"]["name"])
    try:
        found = await probe.ask(_TOPIC, "Kueue", probe.get_path(f"/apis/{KUEUE_GROUP}"))
    except NotFoundError:
        _not_installed(probe, waiting)
        return
    if found is None:
        return
    version = str(get_in(found, "preferredVersion", "version"))
    probe.ok(_TOPIC, "Kueue", f"serves {KUEUE_GROUP}/{version}")
    resource = Resource(KUEUE_GROUP, version, "localqueues", "LocalQueue")
    queues = await probe.list(_TOPIC, "LocalQueues", resource, probe.namespace)
    if queues is None:
        return
    for queue in queues:
        name, state = queue["metadata"]["name"], _inactive(queue)
        waiting.pop(name, None)
        if state is None:
            probe.ok(_TOPIC, name, f"of ClusterQueue {get_in(queue, 'spec', 'clusterQueue')}")
        else:
            remedy = f"kubectl describe localqueue {name} -n {probe.namespace}"
            probe.wrong(_TOPIC, name, f"admits no job: {state}", remedy)
    for name, names in sorted(waiting.items()):
        text = f"does not exist in {probe.namespace}; {', '.join(sorted(names))} cannot start"
        remedy = f"kubectl get clusterqueue  # LocalQueue {name} needs a ClusterQueue"
        probe.wrong(_TOPIC, name, text, remedy)
    if not queues and not waiting:
        probe.absent(_TOPIC, "LocalQueues", f"none in {probe.namespace}; spec.queue needs one")


def _not_installed(probe: Probe, waiting: dict[str, list[str]]) -> None:
    names = sorted(name for names in waiting.values() for name in names)
    if names:
        text = f"not installed, so {', '.join(names)} cannot start"
        probe.wrong(_TOPIC, "Kueue", text, _INSTALL)
    else:
        probe.absent(_TOPIC, "Kueue", "not installed; only jobs with spec.queue need it")


def _inactive(queue: dict[str, object]) -> str | None:
    """Return why a LocalQueue admits no job; None if it works or has no condition."""
    for one in get_in(queue, "status", "conditions") or ():
        if one["type"] == "Active" and one["status"] == "False":
            return str(one.get("message") or one.get("reason") or "no reason given")
    return None
