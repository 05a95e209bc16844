"""The chart's admission policy: what a thief of the operator's token would do is refused.

On a real API server with the chart's own roles and the operator's own service account.
"""

from collections.abc import Callable, Iterator

import pytest

from finetune_operator.kube.api_errors import AlreadyExistsError, ForbiddenError
from finetune_operator.kube.resources import (
    ENDPOINT_SLICES,
    FINE_TUNE_JOBS,
    JOBS,
    NETWORK_POLICIES,
    PODS,
    SERVICES,
    Object,
    Resource,
)
from support.charts.helm_chart import needs_helm
from support.cluster.admitted import POLICIES, Release, Thief, installed
from support.cluster.operators import KUBECONFIG, Api, open_api, wait_until

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(KUBECONFIG is None, reason="FINETUNE_TEST_KUBECONFIG names no cluster"),
    needs_helm,
]
CHILDREN = (JOBS, SERVICES, ENDPOINT_SLICES, NETWORK_POLICIES)
TOKEN = {"sources": [{"serviceAccountToken": {"path": "token"}}]}
PRIVILEGED = {"privileged": True, "allowPrivilegeEscalation": True}


@pytest.fixture(scope="module")
def api() -> Iterator[Api]:
    assert KUBECONFIG is not None
    with open_api(KUBECONFIG) as made:
        yield made


@pytest.fixture(scope="module")
def release(api: Api, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Release]:
    folder = tmp_path_factory.mktemp("release")
    with (
        api.namespace("policy") as namespace,
        installed(api, namespace, folder, hostPaths=["/data"]) as made,
    ):
        yield made


@pytest.fixture(scope="module")
def thief(api: Api, release: Release) -> Iterator[Thief]:
    made = Thief(api, release, api.apply(release.namespace, "owner"))
    try:
        # The API server takes a moment to know a new policy.
        wait_until(lambda: is_refused(made), 30, "the policy is known")
        yield made
    finally:
        made.close()


def is_refused(thief: Thief) -> bool:
    try:
        thief.create(JOBS, thief.child(JOBS, name="probe", ownerReferences=[]))
    except (AlreadyExistsError, ForbiddenError) as error:
        return isinstance(error, ForbiddenError)
    return False


def test_the_policy_is_understood_as_it_is_written(api: Api, release: Release) -> None:
    def status() -> Object | None:
        found: Object = api.run(api.client.get(POLICIES, release.policy)).get("status", {})
        return found if "typeChecking" in found else None

    found = wait_until(status, 30, "it is checked")
    assert found is not None
    assert found["typeChecking"] == {}


@pytest.mark.parametrize("kind", CHILDREN, ids=str)
def test_what_the_operator_makes_is_let_in(thief: Thief, kind: Resource) -> None:
    made = thief.create(kind, thief.child(kind))

    thief.patch(kind, made["metadata"]["name"], {"metadata": {"annotations": {"a": "b"}}})


def on_pod(**spec: object) -> Callable[[Object], None]:
    """Return a change of the pods of a batch Job."""
    return lambda made: made["spec"]["template"]["spec"].update(spec)


def on_container(**security: object) -> Callable[[Object], None]:
    """Return a change of the security of a batch Job's container."""

    def change(made: Object) -> None:
        (container,) = made["spec"]["template"]["spec"]["containers"]
        container["securityContext"] |= security

    return change


def with_host_port(made: Object) -> None:
    (container,) = made["spec"]["template"]["spec"]["containers"]
    container["ports"] = [{"containerPort": 80, "hostPort": 80}]


def with_volume(**source: object) -> Callable[[Object], None]:
    """Return a change that gives the pods of a batch Job one more volume."""
    return lambda made: made["spec"]["template"]["spec"]["volumes"].append({"name": "x", **source})


def without_owner(made: Object) -> None:
    made["metadata"]["ownerReferences"] = []


def for_the_world(made: Object) -> None:
    made["spec"] |= {"clusterIP": "", "type": "LoadBalancer"}


def for_others_pods(made: Object) -> None:
    made["spec"] |= {"selector": {"app": "theirs"}}


def for_others_service(made: Object) -> None:
    made["metadata"]["labels"]["kubernetes.io/service-name"] = "theirs"


def for_all_pods(made: Object) -> None:
    made["spec"]["podSelector"] = {}


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        pytest.param(JOBS, on_pod(hostNetwork=True), "hostNetwork", id="the node's network"),
        pytest.param(JOBS, on_pod(hostPID=True), "hostPID", id="the node's processes"),
        pytest.param(JOBS, with_host_port, "hostPort", id="a port of the node"),
        pytest.param(JOBS, on_container(**PRIVILEGED), "privileged", id="privilege"),
        pytest.param(JOBS, on_container(runAsNonRoot=False), "root", id="root"),
        pytest.param(
            JOBS, on_pod(securityContext={"runAsUser": 0}), "root", id="root by the pod's word"
        ),
        pytest.param(
            JOBS, on_container(capabilities={"add": ["SYS_ADMIN"]}), "IPC_LOCK", id="a capability"
        ),
        pytest.param(
            JOBS, on_pod(automountServiceAccountToken=True), "token", id="a mounted token"
        ),
        pytest.param(JOBS, with_volume(projected=TOKEN), "token", id="a projected token"),
        pytest.param(
            JOBS, with_volume(hostPath={"path": "/etc"}), "hostPaths", id="the node's files"
        ),
        pytest.param(
            JOBS,
            with_volume(hostPath={"path": "/database"}),
            "hostPaths",
            id="a folder named alike",
        ),
        pytest.param(SERVICES, for_the_world, "headless", id="a Service for the world"),
        pytest.param(SERVICES, for_others_pods, "pods of their job", id="a Service of other pods"),
        pytest.param(
            ENDPOINT_SLICES, for_others_service, "Service of their job", id="others' traffic"
        ),
        pytest.param(
            NETWORK_POLICIES, for_all_pods, "pods of their job", id="a door to other pods"
        ),
        *(
            pytest.param(kind, without_owner, "children of a FineTuneJob", id=f"{kind} of nobody")
            for kind in CHILDREN
        ),
    ],
)
def test_what_a_thief_of_the_token_would_make_is_refused(
    thief: Thief, kind: Resource, change: Callable[[Object], None], words: str
) -> None:
    made = thief.child(kind, name="stolen")
    change(made)

    with pytest.raises(ForbiddenError, match="denied request: the operator ") as refused:
        thief.create(kind, made)

    assert words in str(refused.value)


def test_a_folder_of_the_node_that_the_values_name_is_let_in(thief: Thief) -> None:
    made = thief.child(JOBS, name="folder")
    with_volume(hostPath={"path": "/data/sets"})(made)

    assert thief.create(JOBS, made)["metadata"]["name"] == "folder"


@pytest.mark.parametrize("namespace", ["kube-system", "kube-public"])
def test_nothing_is_made_in_a_system_namespace(thief: Thief, namespace: str) -> None:
    with pytest.raises(ForbiddenError, match="nothing in a system namespace"):
        thief.create(JOBS, thief.child(JOBS, name="stolen"), namespace)


def test_objects_of_others_are_neither_changed_nor_deleted(api: Api, thief: Thief) -> None:
    for kind in CHILDREN:
        made = thief.child(kind, name="theirs", ownerReferences=[], labels={"app": "theirs"})
        api.run(api.client.create(kind, made, thief.namespace))  # nobody else is looked at
        adopted = {"metadata": {"ownerReferences": [thief.reference]}}
        with pytest.raises(ForbiddenError, match="only what carries the label"):
            thief.patch(kind, "theirs", adopted)
    with pytest.raises(ForbiddenError, match="only what carries the label"):
        thief.delete(JOBS, "theirs")
    body = {"metadata": {"name": "theirs"}, "spec": {"containers": [{"name": "a", "image": "b"}]}}
    api.run(api.client.create(PODS, body, thief.namespace))
    with pytest.raises(ForbiddenError, match="only what carries the label"):
        thief.delete(PODS, "theirs")


def test_the_jobs_of_users_are_theirs_to_change_and_to_delete(thief: Thief) -> None:
    with pytest.raises(ForbiddenError, match="changes no spec of a FineTuneJob"):
        thief.patch(FINE_TUNE_JOBS, thief.job, {"spec": {"suspend": True}})
    # Of an owner that does not exist, Kubernetes deletes the dependent.
    nobody = {**thief.reference, "name": "nobody", "uid": "11111111-1111-1111-1111-111111111111"}
    with pytest.raises(ForbiddenError, match="changes no owner of a FineTuneJob"):
        thief.patch(FINE_TUNE_JOBS, thief.job, {"metadata": {"ownerReferences": [nobody]}})
    with pytest.raises(ForbiddenError, match="only FineTuneJobs that set ttlSecondsAfterFinished"):
        thief.delete(FINE_TUNE_JOBS, thief.job)
