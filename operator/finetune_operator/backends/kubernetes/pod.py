"""The pod that each node of an attempt runs: one container, the trainer. Pure.

All pods of a gang have one template; the batch Job's controller adds each one's index.
"""

from dataclasses import dataclass
from typing import Any

from finetune_operator.api.v1alpha1.job import FineTuneJob
from finetune_operator.api.v1alpha1.profile import FineTuneProfileSpec, ProfileVolume
from finetune_operator.backends.kubernetes import pod_template, scheduling, trackers, volumes
from finetune_operator.backends.kubernetes.attempt_profiles import settings_of
from finetune_operator.backends.kubernetes.child_names import (
    CONFIG_ANNOTATION,
    CONTAINER,
    METRICS_PORT_NAME,
    RENDEZVOUS_PORT,
)
from finetune_operator.backends.kubernetes.init import below_init
from finetune_operator.kube.labels import FENCED_ANNOTATION, GRACE_ANNOTATION, JOB_UID_LABEL
from finetune_trainer.config import (
    ENV_NODE_NAME,
    ENV_RDZV_ENDPOINT,
    ENV_TERMINATION_PATH,
    ENV_VOLUMES,
)

Json = dict[str, Any]

# No autoscaler may remove the node of a training gang: losing one pod loses them all.
STAY_ANNOTATIONS = {
    "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
    "karpenter.sh/do-not-disrupt": "true",
}
HUB_TOKEN = "HF_TOKEN"
_PROBE_SECONDS = 30
EXTRA_GRACE_SECONDS = 10
"""Time of the main process to write a termination message, after it killed its ranks at the end of
the grace period.
"""


@dataclass(frozen=True)
class PodInputs:
    """Inputs from which a pod is rendered.

    Attributes:
        labels: On every pod of the attempt.
        config: The trainer's configuration, as JSON.
        run_dir: Folder of rank 0's progress.json in the pod.
        rendezvous_host: Name of rank 0's pod; empty on a single node.
    """

    job: FineTuneJob
    profile: FineTuneProfileSpec
    labels: dict[str, str]
    config: str
    run_dir: str
    rendezvous_host: str


def pod(inputs: PodInputs) -> Json:
    """Return the pod template of the batch Job."""
    job, profile = inputs.job, inputs.profile
    spec, settings = job.spec, settings_of(job)
    template, security = spec.pod_template, profile.security
    container = _container(inputs)
    pod_spec: Json = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": spec.deadlines.termination_grace_seconds
        + EXTRA_GRACE_SECONDS,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": security.run_as_user,
            "runAsGroup": security.run_as_group,
            "fsGroup": security.fs_group,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "volumes": _volumes(inputs),
    }
    optional: Json = {
        "serviceAccountName": settings.service_account_name or profile.service_account_name,
        "imagePullSecrets": [{"name": name} for name in profile.image_pull_secrets],
        "priorityClassName": profile.priority_class_name,
        "runtimeClassName": profile.runtime_class_name,
        "schedulerName": profile.scheduler_name,
        "nodeSelector": scheduling.node_selector(profile),
        "tolerations": scheduling.tolerations(spec, profile),
        "affinity": scheduling.affinity(
            spec, profile, {JOB_UID_LABEL: inputs.labels[JOB_UID_LABEL]}
        ),
    }
    if inputs.rendezvous_host and profile.rank_zero_name == "service":
        optional["subdomain"] = inputs.rendezvous_host.split(".")[1]
    pod_spec |= {name: value for name, value in optional.items() if value}
    pod_template.merge(template, pod_spec, container)
    roots = ":".join(mount["mountPath"] for mount in container["volumeMounts"])
    container["env"] = [{"name": ENV_VOLUMES, "value": roots}, *container["env"]]
    labels = {**(template.metadata.labels if template else {}), **inputs.labels}
    if profile.workload_identity:
        labels["azure.workload.identity/use"] = "true"
    annotations = {
        **(template.metadata.annotations if template else {}),
        **STAY_ANNOTATIONS,
        GRACE_ANNOTATION: str(spec.deadlines.termination_grace_seconds),
        CONFIG_ANNOTATION: inputs.config,
    }
    if volumes.is_fenced(job, profile):
        annotations[FENCED_ANNOTATION] = "true"
    return {
        "metadata": {"labels": labels, "annotations": annotations},
        "spec": {**pod_spec, "containers": [container]},
    }


def _container(inputs: PodInputs) -> Json:
    job, profile = inputs.job, inputs.profile
    capabilities: Json = {"drop": ["ALL"]}
    if scheduling.uses_rdma(job.spec, profile):
        capabilities["add"] = ["IPC_LOCK"]  # InfiniBand registers memory that may not be swapped
    container: Json = {
        "name": CONTAINER,
        "image": settings_of(job).image or profile.image,
        "command": below_init(
            profile.init, [*profile.command, f"{volumes.CONFIG_FOLDER}/config.json"]
        ),
        "env": _environment(inputs),
        "ports": [
            {"name": METRICS_PORT_NAME, "containerPort": job.spec.observability.metrics_port}
        ],
        "resources": _resources(job, profile),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": capabilities,
        },
        "terminationMessagePath": volumes.TERMINATION_PATH,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": _mounts(inputs),
    }
    if profile.image_pull_policy:
        container["imagePullPolicy"] = str(profile.image_pull_policy)
    if (hang := job.spec.deadlines.hang_seconds) is not None:
        container["livenessProbe"] = _heartbeat(inputs.run_dir, hang)
    return container


def _environment(inputs: PodInputs) -> list[Json]:
    """Return the variables; the controller adds the node's rank as JOB_COMPLETION_INDEX.

    The profile overrides our defaults, but not the variables by which a pod finds its gang.
    """
    job, profile = inputs.job, inputs.profile
    defaults = {
        "HOME": str(volumes.SCRATCH),
        "USER": "trainer",  # names torch's compile cache; the user id has no passwd entry
        "TMPDIR": "/tmp",
        "HF_HOME": f"{profile.cache_directory}/huggingface",
        "PYTHONSAFEPATH": "1",  # Python imports no module from the image's working directory
    }
    if job.spec.topology.nodes > 1 and job.spec.topology.gpus_per_node:
        has_rdma = scheduling.uses_rdma(job.spec, profile)
        defaults |= {"NCCL_IB_DISABLE": "0" if has_rdma else "1", "NCCL_SOCKET_IFNAME": "eth0"}
    owned = {ENV_TERMINATION_PATH: volumes.TERMINATION_PATH}
    if inputs.rendezvous_host:
        owned[ENV_RDZV_ENDPOINT] = f"{inputs.rendezvous_host}:{RENDEZVOUS_PORT}"
    values = defaults | profile.env | owned
    node_name = {"fieldRef": {"fieldPath": "spec.nodeName"}}
    references: list[Json] = [{"name": ENV_NODE_NAME, "valueFrom": node_name}]
    if (token := job.spec.model.token_secret_ref) is not None:
        values.pop(HUB_TOKEN, None)
        secret = {"secretKeyRef": {"name": token.name, "key": token.key}}
        references.append({"name": HUB_TOKEN, "valueFrom": secret})
    return [*({"name": name, "value": text} for name, text in values.items()), *references]


def _resources(job: FineTuneJob, profile: FineTuneProfileSpec) -> Json:
    """Return requests and limits, equal except for cpu: no other resource can be overcommitted."""
    resources = profile.resources
    limits: dict[str, str] = dict(resources.other)
    if resources.memory is not None:
        limits["memory"] = resources.memory
    if (gpus := job.spec.topology.gpus_per_node) > 0:
        limits[resources.gpu] = str(gpus)
    if resources.rdma is not None and scheduling.uses_rdma(job.spec, profile):
        limits[resources.rdma.name] = str(resources.rdma.count)
    requests = {**limits, **({"cpu": resources.cpu} if resources.cpu is not None else {})}
    return {kind: values for kind, values in (("requests", requests), ("limits", limits)) if values}


def _volumes(inputs: PodInputs) -> list[Json]:
    memory: Json = {"medium": "Memory"}
    if (size := inputs.profile.resources.shared_memory) is not None:
        memory["sizeLimit"] = size
    field = {"fieldPath": f"metadata.annotations['{CONFIG_ANNOTATION}']"}
    claims = volumes.claims_of(inputs.job, inputs.profile)
    return [
        {"name": "config", "downwardAPI": {"items": [{"path": "config.json", "fieldRef": field}]}},
        {"name": "dev-shm", "emptyDir": memory},
        {"name": "scratch", "emptyDir": {}},
        *({"name": f"profile-{one.name}", **one.source} for one in inputs.profile.volumes),
        *(
            {"name": f"claim-{at}", "persistentVolumeClaim": {"claimName": claim}}
            for at, claim in enumerate(claims)
        ),
        *trackers.volumes(inputs.job),
    ]


def _mounts(inputs: PodInputs) -> list[Json]:
    claims = volumes.claims_of(inputs.job, inputs.profile)
    return [
        {"name": "config", "mountPath": volumes.CONFIG_FOLDER, "readOnly": True},
        {"name": "dev-shm", "mountPath": "/dev/shm"},
        {"name": "scratch", "mountPath": str(volumes.SCRATCH)},
        {"name": "scratch", "mountPath": "/tmp", "subPath": "tmp"},
        *(_profile_mount(one, inputs) for one in inputs.profile.volumes),
        *(
            {
                "name": f"claim-{at}",
                "mountPath": str(volumes.MOUNT_ROOT / claim),
                "readOnly": is_read_only,
            }
            for at, (claim, is_read_only) in enumerate(claims.items())
        ),
        *trackers.mounts(inputs.job),
    ]


def _profile_mount(volume: ProfileVolume, inputs: PodInputs) -> Json:
    mount: Json = {
        "name": f"profile-{volume.name}",
        "mountPath": volume.mount_path,
        "readOnly": volumes.is_mounted_read_only(volume, inputs.profile),
    }
    if folder := volumes.sub_path_of(volume, inputs.job.metadata.namespace):
        mount["subPath"] = folder
    return mount


def _heartbeat(run_dir: str, hang_seconds: int) -> Json:
    """Return the probe that kills a pod whose trainer can no longer end itself.

    Only rank 0 has a heartbeat, so other pods always pass. The trainer's own watchdog must act
    first, because it logs the stack of every rank. The probe therefore begins to fail after the
    same time, and kills only after it has failed for that time again. Because a probe that times
    out counts as failed, the limit also tolerates storage that hangs for a minute.
    """
    minutes = max(1, -(-hang_seconds // 60))
    test = (
        '[ "$JOB_COMPLETION_INDEX" != 0 ] || '
        f'[ -n "$(find "$0/progress.json" -mmin -{minutes} 2>/dev/null)" ]'
    )
    return {
        # The path comes from the job, so the shell gets it as an argument and never parses it.
        "exec": {"command": ["sh", "-c", test, run_dir]},
        "initialDelaySeconds": 60 * minutes,
        "periodSeconds": _PROBE_SECONDS,
        "timeoutSeconds": 10,
        "failureThreshold": max(2, -(-hang_seconds // _PROBE_SECONDS)),
    }
