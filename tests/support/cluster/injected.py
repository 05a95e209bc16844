"""Containers that a cluster adds to pods of jobs, as service meshes and policies do."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

from finetune_operator.kube.resources import Object
from support.cluster.operators import wait_until
from support.cluster.real_cluster import RealCluster

KINDS = "mutatingadmissionpolicies.admissionregistration.k8s.io"
GROUP = "admissionregistration.k8s.io"
_SAFE = (
    "securityContext: Object.spec.{kind}.securityContext{{allowPrivilegeEscalation: false, "
    'capabilities: Object.spec.{kind}.securityContext.capabilities{{drop: ["ALL"]}}}}'
)


def version_of_policies(cluster: RealCluster) -> str:
    """Return the version of MutatingAdmissionPolicy; empty if the API server does not serve it."""
    for version in ("v1", "v1beta1"):
        found = cluster.run("kubectl", "get", "--raw", f"/apis/{GROUP}/{version}")
        if found.returncode == 0 and KINDS.partition(".")[0] in found.stdout:
            return version
    return ""


@contextmanager
def injected(
    cluster: RealCluster, namespace: str, programs: Mapping[str, tuple[str, str, str]]
) -> Iterator[None]:
    """Add a container to each pod of some jobs, with the image of its trainer.

    Args:
        cluster: A cluster that serves MutatingAdmissionPolicy.
        namespace: Of the jobs.
        programs: By the job's name: `containers` or `initContainers`, a Python program, and the
            limit of its ephemeral storage.
    """
    version, names = version_of_policies(cluster), []
    for job, (kind, program, disk) in programs.items():
        name = f"inject-{job}"
        names.append(name)
        cluster.apply(*_policy(version, name, namespace, job, kind, program, disk))
        wait_until(partial(_is_added, cluster, namespace, job), 60, f"{name} has an effect")
    try:
        yield
    finally:
        for name in names:
            both = f"{KINDS},mutatingadmissionpolicybindings.{GROUP}"
            cluster.kubectl("delete", both, name, "--ignore-not-found")


def _policy(
    version: str, name: str, namespace: str, job: str, kind: str, program: str, disk: str
) -> list[Object]:
    safe = _SAFE.format(kind=kind)
    resources = (
        f'resources: Object.spec.{kind}.resources{{limits: {{"ephemeral-storage": "{disk}"}}}}'
    )
    container = (
        f'Object.spec.{kind}{{name: "added", image: object.spec.containers[0].image, '
        f'command: ["python", "-c", {json.dumps(program)}], {safe}, {resources}}}'
    )
    patch = f'JSONPatch{{op: "add", path: "/spec/{kind}/-", value: {container}}}'
    if kind == "initContainers":  # the trainer's pods have none
        patch = f'JSONPatch{{op: "add", path: "/spec/{kind}", value: []}}, {patch}'
    rule = {
        "apiGroups": [""],
        "apiVersions": ["v1"],
        "operations": ["CREATE"],
        "resources": ["pods"],
    }
    has_label = "has(object.metadata.labels) && 'finetune.dev/job' in object.metadata.labels"
    is_of_job = f"object.metadata.labels['finetune.dev/job'] == '{job}'"
    head = {"apiVersion": f"{GROUP}/{version}", "metadata": {"name": name}}
    spec: Object = {
        "matchConstraints": {
            "resourceRules": [rule],
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
        },
        "matchConditions": [{"name": "job", "expression": f"{has_label} && {is_of_job}"}],
        "failurePolicy": "Fail",
        "reinvocationPolicy": "Never",
        "mutations": [
            {"patchType": "JSONPatch", "jsonPatch": {"expression": f"[{patch}]"}},
        ],
    }
    return [
        {**head, "kind": "MutatingAdmissionPolicy", "spec": spec},
        {**head, "kind": "MutatingAdmissionPolicyBinding", "spec": {"policyName": name}},
    ]


def _is_added(cluster: RealCluster, namespace: str, job: str) -> bool:
    """Return whether a pod of the job would have the container."""
    probe = f"probe-{job}"
    command = ("kubectl", "run", probe, "--image=probe", f"--labels=finetune.dev/job={job}")
    done = cluster.run(*command, f"--namespace={namespace}", "--dry-run=server", "--output=json")
    return '"added"' in done.stdout or "added" in done.stderr
