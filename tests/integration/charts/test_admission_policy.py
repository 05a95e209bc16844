"""The chart's admission policy: what a thief of the operator's token would do is refused.

On a real API server with the chart's own roles and the operator's own service account.
"""

from collections.abc import Callable, Iterator

import pytest

from finetune_operator.kube.api_errors import AlreadyExistsError, ForbiddenError
from finetune_operator.kube.resources import (
    CONFIG_MAPS,
    ENDPOINT_SLICES,
    FINE_TUNE_JOBS,
    JOBS,
    NAMESPACES,
    NETWORK_POLICIES,
    PODS,
    SERVICES,
    Object,
    Resource,
)
from support.charts.helm_chart import needs_helm
from support.cluster.admitted import POLICIES, Release, Thief, installed
from support.cluster.operators import KUBECONFIG, Api, open_api, wait_until
from support.kubernetes.kubernetes_cases import CASES

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(KUBECONFIG is None, reason="FINETUNE_TEST_KUBECONFIG names no cluster"),
    needs_helm,
]
CHILDREN = (JOBS, SERVICES, ENDPOINT_SLICES, NETWORK_POLICIES)
KINDS = {one.kind: one for one in CHILDREN}
TOKEN = {"sources": [{"serviceAccountToken": {"path": "token"}}]}
UNCONFINED = {"type": "Unconfined"}
APP_ARMOR = "container.apparmor.security.beta.kubernetes.io/trainer"
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
def test_children_of_the_operator_are_admitted(thief: Thief, kind: Resource) -> None:
    made = thief.create(kind, thief.child(kind))

    thief.patch(kind, made["metadata"]["name"], {"metadata": {"annotations": {"a": "b"}}})


def on_pod(**spec: object) -> Callable[[Object], None]:
    """Return a change of the pods of a batch Job."""
    return lambda made: made["spec"]["template"]["spec"].update(spec)


def on_security(**security: object) -> Callable[[Object], None]:
    """Return a change of the security of a batch Job's pods."""
    return lambda job: job["spec"]["template"]["spec"]["securityContext"].update(security)


def by_annotation(job: Object) -> None:
    job["spec"]["template"]["metadata"]["annotations"][APP_ARMOR] = "unconfined"


def without_seccomp(job: Object) -> None:
    del job["spec"]["template"]["spec"]["securityContext"]["seccompProfile"]


def with_an_init_container(**security: object) -> Callable[[Object], None]:
    """Return a change that adds an init container with this security."""

    def change(job: Object) -> None:
        pod = job["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        allowed = {**container["securityContext"], **security}
        pod["initContainers"] = [{"name": "first", "image": "a", "securityContext": allowed}]

    return change


def owned_by(*changes: Object) -> Callable[[Object], None]:
    """Return a change that adds an owner for each of these, which differ so from the job."""

    def change(job: Object) -> None:
        (ours,) = job["metadata"]["ownerReferences"]
        job["metadata"]["ownerReferences"] = [
            {**ours, "controller": at == 0, **one} for at, one in enumerate(changes)
        ]

    return change


def inline(driver: str, **attributes: str) -> Callable[[Object], None]:
    """Return a change that adds an inline CSI volume."""
    return with_volume(csi={"driver": driver, "volumeAttributes": attributes})


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
        pytest.param(JOBS, on_pod(hostIPC=True), "hostIPC", id="the node's memory"),
        pytest.param(
            JOBS, on_pod(shareProcessNamespace=True), "shareProcessNamespace", id="shared processes"
        ),
        pytest.param(
            JOBS,
            on_security(sysctls=[{"name": "kernel.shm_rmid_forced", "value": "1"}]),
            "sysctls",
            id="sysctls",
        ),
        pytest.param(JOBS, on_security(seccompProfile=UNCONFINED), "seccomp", id="no seccomp"),
        pytest.param(JOBS, without_seccomp, "seccomp", id="seccomp left out"),
        pytest.param(
            JOBS, on_container(seccompProfile=UNCONFINED), "seccomp", id="a container's seccomp"
        ),
        pytest.param(
            JOBS,
            with_an_init_container(seccompProfile=UNCONFINED),
            "seccomp",
            id="an init container's seccomp",
        ),
        pytest.param(
            JOBS, with_an_init_container(**PRIVILEGED), "root", id="a privileged init container"
        ),
        pytest.param(
            JOBS,
            on_pod(priorityClassName="system-node-critical"),
            "priority class",
            id="a priority of the system",
        ),
        pytest.param(JOBS, on_pod(nodeName="control-plane"), "nodeName", id="a node by its name"),
        pytest.param(JOBS, on_security(appArmorProfile=UNCONFINED), "AppArmor", id="no AppArmor"),
        pytest.param(
            JOBS, on_container(appArmorProfile=UNCONFINED), "AppArmor", id="a container's AppArmor"
        ),
        pytest.param(JOBS, by_annotation, "AppArmor", id="AppArmor by annotation"),
        pytest.param(
            JOBS, on_security(seLinuxOptions={"type": "spc_t"}), "SELinux", id="SELinux options"
        ),
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
            JOBS,
            with_volume(nfs={"server": "nfs.test", "path": "/"}),
            "admissionPolicy.volumes",
            id="a kind of volume",
        ),
        pytest.param(
            JOBS,
            with_volume(gitRepo={"repository": "https://git.test/a"}),
            "admissionPolicy.volumes",
            id="a repository",
        ),
        pytest.param(JOBS, inline("csi.test"), "csiDrivers", id="a CSI driver"),
        pytest.param(
            JOBS,
            inline("file.csi.azure.com", SecretNamespace="kube-system", secretName="a"),
            "Secret of another namespace",
            id="a CSI driver's Secret of another namespace",
        ),
        pytest.param(
            JOBS,
            inline("blob.csi.azure.com", **{"csi.storage.k8s.io/pvc/namespace": "kube-system"}),
            "Secret of another namespace",
            id="a CSI driver's claim of another namespace",
        ),
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
        pytest.param(
            JOBS,
            owned_by({}, {"apiVersion": "v1", "kind": "ConfigMap", "name": "a", "uid": "u"}),
            "only owner",
            id="a second owner",
        ),
        pytest.param(
            SERVICES, owned_by({}, {"name": "a", "uid": "u"}), "only owner", id="a second job"
        ),
        pytest.param(
            JOBS,
            owned_by({"apiVersion": "finetune.dev/v9"}),
            "children of a FineTuneJob",
            id="an owner of another version",
        ),
        pytest.param(
            JOBS, owned_by({"controller": False}), "children of a FineTuneJob", id="no controller"
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


CLAIM = {"spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}}


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(with_volume(hostPath={"path": "/data/sets"}), id="a folder that values name"),
        pytest.param(inline("blob.csi.azure.com", containerName="a"), id="a Blob container"),
        pytest.param(inline("file.csi.azure.com", secretName="a", shareName="b"), id="a share"),
        pytest.param(with_volume(ephemeral={"volumeClaimTemplate": CLAIM}), id="a disk of a pod"),
        pytest.param(with_volume(emptyDir={"sizeLimit": "1Gi"}), id="a folder of a pod"),
        pytest.param(with_volume(secret={"secretName": "a"}), id="a Secret"),
        pytest.param(with_volume(image={"reference": "a"}), id="an image"),
    ],
)
def test_volumes_of_profiles_are_admitted(
    thief: Thief, change: Callable[[Object], None], request: pytest.FixtureRequest
) -> None:
    name = request.node.callspec.id.replace(" ", "-").lower()
    child = thief.child(JOBS, name=name)
    change(child)

    assert thief.create(JOBS, child)["metadata"]["name"] == name


@pytest.mark.parametrize("case", CASES)
def test_every_manifest_of_the_backend_is_admitted(thief: Thief, case: str) -> None:
    for child in thief.children(case):
        assert thief.create(KINDS[child["kind"]], child)["metadata"]["uid"]


def test_others_may_add_owners_and_the_operator_none(api: Api, thief: Thief) -> None:
    child = thief.create(JOBS, thief.child(JOBS, name="shared"))
    (ours,) = child["metadata"]["ownerReferences"]
    # It exists, since the garbage collector removes a reference to an owner that does not.
    theirs = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "theirs"}}
    uid = api.run(api.client.create(CONFIG_MAPS, theirs, thief.namespace))["metadata"]["uid"]
    other = {"apiVersion": "v1", "kind": "ConfigMap", "name": "theirs", "uid": uid}
    owners = {"metadata": {"ownerReferences": [ours, other]}}
    with pytest.raises(ForbiddenError, match="adds no other owner"):
        thief.patch(JOBS, "shared", owners)
    api.run(api.client.patch(JOBS, "shared", thief.namespace, owners))

    again = {"metadata": {"ownerReferences": [other, ours], "annotations": {"a": "b"}}}
    assert thief.patch(JOBS, "shared", again)["metadata"]["annotations"]["a"] == "b"


def test_a_job_of_an_earlier_policy_can_be_suspended(api: Api, thief: Thief) -> None:
    child = thief.child(JOBS, name="earlier")
    with_volume(nfs={"server": "nfs.test", "path": "/"})(child)
    api.run(api.client.create(JOBS, child, thief.namespace))

    assert thief.patch(JOBS, "earlier", {"spec": {"suspend": True}})["spec"]["suspend"]


@pytest.mark.parametrize("namespace", ["kube-system", "kube-public"])
def test_nothing_is_made_in_a_system_namespace(thief: Thief, namespace: str) -> None:
    with pytest.raises(ForbiddenError, match="nothing in a system namespace"):
        thief.create(JOBS, thief.child(JOBS, name="stolen"), namespace)


def test_no_object_is_created_in_a_listed_namespace(api: Api, thief: Thief) -> None:
    api.run(api.client.create(NAMESPACES, {"metadata": {"name": "tigera-operator"}}))
    try:
        with pytest.raises(ForbiddenError, match="nothing in a system namespace"):
            thief.create(JOBS, thief.child(JOBS, name="stolen"), "tigera-operator")
    finally:
        api.run(api.client.delete(NAMESPACES, "tigera-operator"))


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
