"""Faults of a job of the kubernetes backend in a cluster that is played in virtual time."""

from collections.abc import Awaitable, Callable
from itertools import count

from finetune_operator.api.v1alpha1.status import JobPhase
from finetune_operator.backends.kubernetes.child_names import CONTAINER
from finetune_operator.kube.api_errors import ThrottledError, UnavailableError
from finetune_operator.kube.resources import (
    ENDPOINT_SLICES,
    EVENTS,
    JOBS,
    KUEUE_GROUP,
    NETWORK_POLICIES,
    PODS,
    SERVICES,
    Object,
    Resource,
)
from finetune_trainer.config import ExitCode, FailureClass
from support.chaos.case import LAST_STEP, THE_START, Budget, Case, Truth
from support.chaos.played_cluster import ROOM, WAITS, PlayedCluster
from support.kernel.kernel_world import WRITES, Crash
from support.kubernetes.kubernetes_world import NODES

ClusterAct = Callable[[PlayedCluster], Awaitable[None]]

PENDING = {"deadlines": {"pendingSeconds": 300}}
NOT_FINITE = "the loss of step 46 is not finite; set a lower spec.training.learningRate"
NO_ROWS = "spec.dataset.source: /mnt/data/train.jsonl does not exist; correct the path"
PREEMPTION = "preempting to accommodate a higher priority pod"
NO_IMAGE = 'Back-off pulling image "registry.test/trainer:1"'
QUOTA = "exceeded quota: team, requested: pods=2, used: pods=10, limited: pods=10"
REMEDY_OF_DEADLINE = "remove this obstacle or raise the limit, then create the job again"
CHILD = "tiny-finetune"
CHILDREN = (NETWORK_POLICIES, SERVICES, ENDPOINT_SLICES)


def setting(**values: object) -> ClusterAct:
    """Return an act that sets attributes of the cluster."""

    async def act(cluster: PlayedCluster) -> None:
        for name, value in values.items():
            setattr(cluster, name, value)

    return act


def ending(*indexes: int, code: int, words: str = "", failure: FailureClass) -> ClusterAct:
    """Return an act that ends pods of the first attempt."""

    async def act(cluster: PlayedCluster) -> None:
        await cluster.end(1, *indexes, code=code, words=words, failure=failure)

    return act


def killing(*indexes: int) -> ClusterAct:
    """Return an act that kills the processes of pods of the first attempt."""
    return ending(*indexes, code=ExitCode.KILLED, failure=FailureClass.WORKER_LOST)


async def delete_pod(cluster: PlayedCluster) -> None:
    await cluster.api.delete(PODS, "tiny-1-1", "ns", grace_seconds=30)


async def preempt_pod(cluster: PlayedCluster) -> None:
    target = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}
    status: Object = {"conditions": [{**target, "message": PREEMPTION}]}
    await cluster.api.patch(PODS, "tiny-1-1", "ns", {"status": status}, subresource="status")
    await cluster.end_pods(1, 1, code=ExitCode.KILLED)


async def exceed_memory(cluster: PlayedCluster) -> None:
    state = {"terminated": {"exitCode": ExitCode.KILLED, "reason": "OOMKilled"}}
    status: Object = {
        "phase": "Failed",
        "containerStatuses": [{"name": CONTAINER, "state": state}],
    }
    await cluster.api.patch(PODS, "tiny-1-1", "ns", {"status": status}, subresource="status")


async def fail_on_data(cluster: PlayedCluster) -> None:
    async def end(pod: Object) -> bool:
        await cluster.run_pods(1, *range(NODES))
        await cluster.end(1, 0, code=ExitCode.DATA, words=NO_ROWS, failure=FailureClass.DATA_ERROR)
        return False

    cluster.ready_before_start = end


async def hang_in_init_container(cluster: PlayedCluster) -> None:
    async def prepare(pod: Object) -> bool:
        index = int(pod["metadata"]["name"][-1])
        if "initContainerStatuses" not in pod["status"]:
            await cluster.prepare_pod(1, index, copy={"running": {}})
        return False

    cluster.ready_before_start = prepare


async def take_image(cluster: PlayedCluster) -> None:
    async def refuse(pod: Object) -> bool:
        waiting = {"waiting": {"reason": "ImagePullBackOff", "message": NO_IMAGE}}
        status: Object = {"containerStatuses": [{"name": CONTAINER, "state": waiting}]}
        name = pod["metadata"]["name"]
        await cluster.api.patch(PODS, name, "ns", {"status": status}, subresource="status")
        return False

    cluster.ready_before_start = refuse


async def use_up_quota(cluster: PlayedCluster) -> None:
    cluster.has_job_controller = False
    created = cluster.api.after
    numbers = count()

    def note(verb: str, resource: Resource, name: str) -> None:
        created(verb, resource, name)
        if (verb, resource) == ("create", JOBS):
            (batch_job,) = cluster.api.objects(JOBS)
            about = {"kind": "Job", "name": name, "uid": batch_job["metadata"]["uid"]}
            event = {
                "metadata": {"name": f"quota-{next(numbers)}", "namespace": "ns"},
                "type": "Warning",
                "reason": "FailedCreate",
                "message": QUOTA,
                "involvedObject": about,
            }
            cluster.api.load(EVENTS, event)

    cluster.api.after = note


async def run_all(cluster: PlayedCluster) -> None:
    """Let controllers and nodes work again."""
    cluster.has_job_controller = cluster.has_scheduler = True
    cluster.room = NODES
    cluster.ready_before_start = lambda pod: True


async def install_kueue(cluster: PlayedCluster) -> None:
    cluster.api.groups.add(KUEUE_GROUP)
    await cluster.suspend(1, False)


async def remove_kueue(cluster: PlayedCluster) -> None:
    cluster.api.groups.clear()


async def suspend_batch_job(cluster: PlayedCluster) -> None:
    await cluster.suspend(1)


async def suspend_in_restart(cluster: PlayedCluster) -> None:
    """Kill a rank, and suspend the job while its attempt is replaced."""
    await cluster.end_pods(1, 1, code=ExitCode.KILLED)
    await cluster.live(2)
    await cluster.change(suspend=True)


async def pass_deadline(cluster: PlayedCluster) -> None:
    await cluster.live(60)


async def close_page(cluster: PlayedCluster) -> None:
    await cluster.close_page()


async def open_page(cluster: PlayedCluster) -> None:
    await cluster.open_page()


async def delete_children(cluster: PlayedCluster) -> None:
    for kind in CHILDREN:
        await cluster.api.delete(kind, CHILD, "ns")


async def children_are_there(cluster: PlayedCluster) -> None:
    await cluster.live(10)
    assert all(len(cluster.api.objects(kind)) == 1 for kind in CHILDREN)


async def fail_requests(cluster: PlayedCluster) -> None:
    """Refuse each fifth request, by 429 and 500 in turn."""
    numbers = count(1)

    def refuse(verb: str, resource: Resource, name: str) -> None:
        number = next(numbers) if cluster.is_operator else 1
        if number % 10 == 0:
            raise ThrottledError(429, "TooManyRequests", "slow down", 1.0)
        if number % 10 == 5:
            raise UnavailableError(500, "InternalError", "etcd has no leader")

    cluster.api.before = refuse
    try:
        await cluster.live(300)
    finally:
        cluster.api.before = lambda verb, resource, name: None


async def kill_operator(cluster: PlayedCluster) -> None:
    """Kill a rank, and the operator after each of its next 20 writes."""
    written = cluster.api.after
    numbers = count(1)

    def die(verb: str, resource: Resource, name: str) -> None:
        written(verb, resource, name)
        if cluster.is_operator and verb in WRITES and next(numbers) <= 20:
            raise Crash

    await cluster.end_pods(1, 1, code=ExitCode.KILLED)
    cluster.api.after = die


WORKER_LOST = Truth(
    failure=FailureClass.WORKER_LOST, budget=Budget.COUNTED, resumes=40, words=("was killed",)
)

ENDED = (
    Case(
        "rank 0 is killed",
        "SIGKILL of the main process of a pod",
        WORKER_LOST,
        inject=killing(0),
        is_starred=True,
    ),
    Case(
        "rank 1 is killed",
        "SIGKILL of the main process of the other pod",
        Truth(
            failure=FailureClass.WORKER_LOST,
            budget=Budget.COUNTED,
            resumes=40,
            words=("pod tiny-1-1 was killed",),
        ),
        inject=killing(1),
    ),
    Case(
        "a rank is killed and no restart is left",
        "SIGKILL with `maxRestarts: 0`",
        Truth(
            failure=FailureClass.WORKER_LOST,
            words=("pod tiny-1-1 was killed",),
            remedy="create the job again",
            phase=JobPhase.FAILED,
            final="RestartLimitExceeded",
            resumes=THE_START,
        ),
        inject=killing(1),
        spec={"restartPolicy": {"maxRestarts": 0}},
    ),
    Case(
        "the job is suspended while a killed rank is replaced",
        "SIGKILL, then `spec.suspend` two seconds later",
        Truth(
            failure=FailureClass.WORKER_LOST,
            words=("pod tiny-1-1 was killed",),
            phase=JobPhase.SUSPENDED,
        ),
        inject=suspend_in_restart,
    ),
    Case(
        "a job takes longer than its deadline",
        "`deadlines.activeSeconds` passes while it trains",
        Truth(
            failure=FailureClass.PREEMPTED,
            words=("the job was active for deadlines.activeSeconds 90",),
            remedy="raise the limit",
            phase=JobPhase.FAILED,
            final="ActiveDeadlineExceeded",
        ),
        inject=pass_deadline,
        spec={"deadlines": {"activeSeconds": 90}},
    ),
    Case(
        "a pod is deleted",
        "DELETE of a pod that trains",
        Truth(
            failure=FailureClass.PREEMPTED,
            budget=Budget.FREE,
            resumes=LAST_STEP,
            words=("stopped with a checkpoint",),
        ),
        inject=delete_pod,
        is_starred=True,
    ),
    Case(
        "the scheduler preempts a pod",
        "condition DisruptionTarget, then SIGKILL",
        Truth(
            failure=FailureClass.PREEMPTED,
            budget=Budget.FREE,
            resumes=40,
            words=(PREEMPTION, "node-1"),
        ),
        inject=preempt_pod,
    ),
    Case(
        "a pod reaches its memory limit",
        "termination reason OOMKilled",
        Truth(
            failure=FailureClass.OUT_OF_MEMORY,
            budget=Budget.COUNTED,
            resumes=40,
            words=("memory limit", "microBatchSize"),
        ),
        inject=exceed_memory,
        is_starred=True,
    ),
    Case(
        "the loss is not finite",
        "exit code 93 with the trainer's message",
        Truth(
            failure=FailureClass.DO_NOT_RESTART,
            words=("the loss of step 46 is not finite",),
            remedy="set a lower spec.training.learningRate",
            phase=JobPhase.FAILED,
            final="DoNotRestart",
        ),
        inject=ending(
            0,
            1,
            code=ExitCode.DO_NOT_RESTART,
            words=NOT_FINITE,
            failure=FailureClass.DO_NOT_RESTART,
        ),
    ),
    Case(
        "the data set is missing",
        "exit code 65 with the trainer's message",
        Truth(
            failure=FailureClass.DATA_ERROR,
            words=("/mnt/data/train.jsonl does not exist",),
            remedy="correct the path",
            phase=JobPhase.FAILED,
            final="DataError",
        ),
        at_step=None,
        inject=fail_on_data,
    ),
    Case(
        "a batch Job is suspended by another client",
        "PATCH of `spec.suspend` of the batch Job",
        Truth(
            failure=FailureClass.PREEMPTED,
            budget=Budget.FREE,
            resumes=LAST_STEP,
            words=("stopped with a checkpoint",),
        ),
        inject=suspend_batch_job,
    ),
    Case(
        "the operator is killed after each of 20 writes",
        "a new operator process after each write, while a killed rank is replaced",
        WORKER_LOST,
        inject=kill_operator,
        is_starred=True,
    ),
)

WAITING = (
    Case(
        "a rank does not arrive",
        "rank 0 waits at the rendezvous for 600 s",
        Truth(
            failure=FailureClass.HUNG,
            budget=Budget.COUNTED,
            resumes=THE_START,
            words=(WAITS, "see the logs"),
        ),
        at_step=None,
        inject=setting(late={1}),
        is_starred=True,
    ),
    Case(
        "no node has room, then an autoscaler adds nodes",
        "the scheduler refuses all pods",
        Truth(reason="Unschedulable", words=(ROOM,)),
        at_step=None,
        inject=setting(room=0),
        repair=run_all,
    ),
    Case(
        "no node has room",
        "the scheduler refuses all pods for longer than `pendingSeconds`",
        Truth(
            failure=FailureClass.NOT_STARTED,
            words=(ROOM,),
            remedy=REMEDY_OF_DEADLINE,
            phase=JobPhase.FAILED,
            final="PendingDeadlineExceeded",
        ),
        at_step=None,
        inject=setting(room=0),
        spec=PENDING,
        is_starred=True,
        stride=5,
    ),
    Case(
        "no scheduler serves the pods",
        "`schedulerName` of no scheduler",
        Truth(reason="SchedulerNotResponding", words=("scheduler volcano", "profile")),
        at_step=None,
        inject=setting(has_scheduler=False),
        repair=run_all,
        is_starred=True,
    ),
    Case(
        "the Job controller is down",
        "no pods are created for a batch Job",
        Truth(reason="PodsNotCreated", words=("Job controller",)),
        at_step=None,
        inject=setting(has_job_controller=False),
        repair=run_all,
    ),
    Case(
        "a quota is used up",
        "Event FailedCreate of the batch Job",
        Truth(reason="PodsNotCreated", words=(QUOTA,)),
        at_step=None,
        inject=use_up_quota,
        repair=run_all,
        is_starred=True,
    ),
    Case(
        "an init container hangs",
        "an injected init container runs without end",
        Truth(reason="InitContainerRunning", words=("init container copy", "kubectl logs")),
        at_step=None,
        inject=hang_in_init_container,
        repair=run_all,
    ),
    Case(
        "the kubelet is silent",
        "no report about a placed pod",
        Truth(reason="PodNotStarted", words=("kubelet of node node-0",)),
        at_step=None,
        inject=setting(ready_before_start=lambda pod: False),
        repair=run_all,
    ),
    Case(
        "the image cannot be pulled",
        "container state ImagePullBackOff",
        Truth(reason="ImagePullFailed", words=(NO_IMAGE,)),
        at_step=None,
        inject=take_image,
        repair=run_all,
        is_starred=True,
    ),
    Case(
        "a queue without Kueue",
        "the API server does not serve `kueue.x-k8s.io`",
        Truth(reason="KueueNotInstalled", words=("no Kueue",), remedy="spec.queue"),
        at_step=None,
        inject=remove_kueue,
        repair=install_kueue,
        spec={"queue": {"name": "team"}},
    ),
)

UNHARMED = (
    Case(
        "the page of rank 0 is unreachable",
        "connections to port 9400 are refused",
        Truth(
            reason="ProgressUnknown",
            words=("does not respond (connection refused)", "its last report was of step"),
            within=120,
        ),
        inject=close_page,
        repair=open_page,
        is_starred=True,
    ),
    Case(
        "NetworkPolicy, Service and EndpointSlice are deleted",
        "DELETE of the three while the job trains",
        Truth(words=("attempt 1 trains",)),
        inject=delete_children,
        check=children_are_there,
        is_starred=True,
    ),
    Case(
        "the API server fails each fifth request",
        "429 and 500 in turn for 300 s",
        Truth(words=("attempt 1 trains",)),
        inject=fail_requests,
        is_starred=True,
    ),
)

CASES = (*ENDED, *WAITING, *UNHARMED)
