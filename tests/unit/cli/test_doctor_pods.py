"""What `ftctl doctor --cluster` says of pods of the operator that do not run, and what mends it.

The words are those of Kubernetes 1.34 with containerd, for pods of such images.
"""

from typing import Any

import pytest

from finetune_operator.cli.doctor_pods import Owner, Trouble, trouble_of

OWNER = Owner("operators", "ours-finetune-operator", "ours", "a=b")
UPGRADE = "helm upgrade ours charts/finetune-operator -n operators --reset-then-reuse-values"
ANOTHER = (
    f"{UPGRADE} --set image.repository=REGISTRY/finetune-operator"
    "  # built by: REGISTRY=REGISTRY docker buildx bake operator --push"
)
NO_PROGRAM = (
    "failed to create containerd task: failed to create shim task: OCI runtime create failed: runc "
    'create failed: unable to start container process: exec: "finetune-operator": executable file '
    "not found in $PATH: unknown"
)
AS_ROOT = (
    "container has runAsNonRoot and image will run as root "
    '(pod: "root_bad(a47f728b-4537-41d1-b40e-44ebdcecb5e1)", container: operator)'
)


def pod(**state: Any) -> dict[str, Any]:
    """Return a pod whose container is in this state."""
    container = {"name": "operator", "image": "reg/x:1", "state": state, "lastState": {}}
    return {"status": {"containerStatuses": [container]}}


def of(*pods: dict[str, Any], refused: str = "") -> Trouble:
    """Return what is said of a Deployment with these pods, or whose pods are refused so."""
    told = {"type": "ReplicaFailure", "status": "True", "message": refused}
    return trouble_of(OWNER, {"status": {"conditions": [told] * bool(refused)}}, pods)


@pytest.mark.parametrize(
    ("state", "said", "remedy"),
    [
        pytest.param(
            {"waiting": {"reason": "RunContainerError", "message": NO_PROGRAM}},
            "the image reg/x:1 has no program finetune-operator, so it is not the operator's",
            ANOTHER,
            id="without the program",
        ),
        pytest.param(
            {"terminated": {"message": "exec /bin/finetune-operator: exec format error\n"}},
            "the image reg/x:1 is built for another processor than its node has",
            "REGISTRY=REGISTRY docker buildx bake operator --push "
            "--set '*.platform=linux/amd64,linux/arm64'",
            id="for another architecture",
        ),
        pytest.param(
            {"waiting": {"reason": "CreateContainerConfigError", "message": AS_ROOT}},
            "the image reg/x:1 would run as root",
            f"{UPGRADE} --set podSecurityContext.runAsUser=65532",
            id="as root",
        ),
        pytest.param(
            {"waiting": {"reason": "ErrImagePull", "message": "connection refused"}},
            "the image reg/x:1 cannot be pulled (ErrImagePull: connection refused)",
            ANOTHER,
            id="not there",
        ),
        pytest.param(
            {"waiting": {"reason": "ContainerCreating"}},
            "ContainerCreating",
            "kubectl -n operators describe pods -l a=b",
            id="not started yet",
        ),
        pytest.param(
            {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s"}},
            "CrashLoopBackOff: back-off 10s",
            "kubectl -n operators logs -l a=b --tail=20",
            id="another fault",
        ),
    ],
)
def test_an_image_that_cannot_run_is_named_with_the_command_that_mends_it(
    state: dict[str, Any], said: str, remedy: str
) -> None:
    found = of(pod(running={}), pod(**state))
    assert found.why.startswith(said)
    assert found.remedy == remedy


def test_what_a_container_said_before_it_was_started_again_counts() -> None:
    waits = pod(waiting={"reason": "CrashLoopBackOff", "message": "back-off 10s"})
    ended = {"terminated": {"message": "exec /bin/finetune-operator: exec format error"}}
    waits["status"]["containerStatuses"][0]["lastState"] = ended
    assert "another processor" in of(waits).why


@pytest.mark.parametrize(
    ("state", "said", "remedy"),
    [
        pytest.param(
            {"waiting": {"reason": "ErrImagePull", "message": "not found"}},
            "ErrImagePull: not found",
            "kubectl -n operators describe pods -l a=b",
            id="no image",
        ),
        pytest.param(
            {"terminated": {"reason": "Error", "message": "no such folder", "exitCode": 1}},
            "Error: no such folder",
            "kubectl -n operators logs -l a=b -c plugin --tail=20",
            id="failed",
        ),
    ],
)
def test_an_init_container_that_fails_is_named(
    state: dict[str, Any], said: str, remedy: str
) -> None:
    made = pod(waiting={"reason": "PodInitializing"})
    ended = {"name": "other", "state": {"terminated": {"reason": "Completed", "exitCode": 0}}}
    made["status"]["initContainerStatuses"] = [ended, {"name": "plugin", "state": state}]
    assert of(made) == Trouble(f"its init container plugin fails ({said})", remedy)


def test_what_a_pod_that_is_ready_said_earlier_is_no_reason() -> None:
    served = pod(running={})
    ended = {"terminated": {"message": "the API server was away"}}
    served["status"]["containerStatuses"][0]["lastState"] = ended
    served["status"]["conditions"] = [{"type": "Ready", "status": "True"}]
    missing = pod(waiting={"reason": "ErrImagePull", "message": "not found"})
    assert of(served, missing).why.startswith("the image reg/x:1 cannot be pulled")


def test_another_image_is_named_to_kubectl_where_helm_installed_nothing() -> None:
    owner = Owner("operators", "finetune-operator", "", "a=b")
    missing = pod(waiting={"reason": "ErrImagePull", "message": "not found"})
    found = trouble_of(owner, {}, [missing])
    assert found.remedy.startswith(
        "kubectl -n operators set image deployment/finetune-operator operator=REGISTRY/"
    )


def test_another_user_is_given_by_kubectl_where_helm_installed_nothing() -> None:
    owner = Owner("operators", "finetune-operator", "", "a=b")
    as_root = pod(waiting={"reason": "CreateContainerConfigError", "message": AS_ROOT})
    remedy = trouble_of(owner, {}, [as_root]).remedy
    assert remedy.startswith("kubectl -n operators patch deployment finetune-operator -p '{")
    assert '"securityContext":{"runAsUser":65532}' in remedy


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        pytest.param(
            'pods "x-1" is forbidden: exceeded quota: small, requested: limits.memory=512Mi',
            "kubectl -n operators edit resourcequota small  # raise the limit",
            id="quota",
        ),
        pytest.param(
            'pods "x-1" is forbidden: violates PodSecurity "restricted:latest": hostPath volumes',
            "helm get values ours -n operators  # which of them set these fields",
            id="Pod Security",
        ),
        pytest.param(
            'pods "x-1" is forbidden: error looking up service account',
            "kubectl -n operators describe replicasets -l a=b",
            id="another refusal",
        ),
    ],
)
def test_what_refuses_pods_is_told_in_its_own_words(text: str, remedy: str) -> None:
    assert of(refused=text) == Trouble(f"no pod can be created: {text}", remedy)


def test_a_pod_without_a_node_says_why() -> None:
    told = {"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available"}
    found = of({"status": {"conditions": [told]}})
    assert found == Trouble("0/3 nodes are available", "kubectl describe nodes")
