"""`FineTuneProfile`: what a cluster's administrator decides for all jobs of aks or azureml.

Cluster-scoped. A job names a profile and gets its image, volumes and node pools, or its workspace,
compute and datastore; `allow` says who may do so, and what else such a job may name. Everything
that it does not allow is refused, as users who may create FineTuneJobs but no pods must not gain
rights through them.
"""

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import Field

from finetune_operator.api.schema import ApiModel, Rule
from finetune_operator.api.v1alpha1.allowances import Allowances, Quantity
from finetune_operator.api.v1alpha1.azureml_profile import AzureMLSettings
from finetune_operator.api.v1alpha1.job import ObjectMeta
from finetune_operator.api.v1alpha1.lifecycle import LabelValue
from finetune_operator.api.v1alpha1.topology import Image, Name
from finetune_operator.api.v1alpha1.training import INT32_MAX

LabelKey = Annotated[str, Field(max_length=317)]
Text = Annotated[str, Field(max_length=4096)]
Path = Annotated[
    str,
    Field(min_length=1, max_length=1024),
    Rule("self.startsWith('/')", "must be an absolute path; start it with /"),
]
ResourceName = Annotated[str, Field(min_length=1, max_length=317)]
UserId = Annotated[int, Field(ge=1, le=INT32_MAX)]


class Toleration(ApiModel):
    """A toleration of the pods, as in a PodSpec."""

    key: LabelKey | None = None
    """Key of the taint."""
    operator: Annotated[str, Field(pattern="^(Exists|Equal)$", max_length=16)] = "Equal"
    """Equal compares value, Exists takes any."""
    value: LabelValue | None = None
    """Value of the taint."""
    effect: Annotated[str, Field(pattern="^No(Schedule|Execute)$", max_length=16)] | None = None
    """NoSchedule or NoExecute; absent means both."""


class NodeSettings(ApiModel):
    """Which nodes the pods are for."""

    agent_pools: Annotated[list[Name], Field(max_length=64)] = Field([])
    """AKS node pools, by name; empty means any."""
    instance_types: Annotated[list[Name], Field(max_length=64)] = Field([])
    """VM sizes; a job may name one of them. Empty means any."""
    selector: Annotated[dict[str, LabelValue], Field(max_length=64)] = Field({})
    """Labels that a node must have, besides kubernetes.io/os: linux."""
    tolerations: Annotated[list[Toleration], Field(max_length=64)] = Field([])
    """Taints the pods tolerate, besides those of spot pools and, with GPUs, sku=gpu and
    nvidia.com/gpu."""
    topology_key: LabelKey = "topology.kubernetes.io/zone"
    """Label whose value the nodes of one job share under placement pack: zone, or proximity
    placement group. Empty leaves it to the scheduler."""


class RdmaResource(ApiModel):
    """The resource by which a pod gets InfiniBand; its name differs by how the plugin is set up."""

    name: ResourceName = "rdma/ib"
    """Name, such as rdma/ib or rdma/shared_ib."""
    count: Annotated[int, Field(ge=1, le=64)] = 1
    """How many each pod asks for."""


class ResourceSettings(ApiModel):
    """What each pod asks of its node."""

    cpu: Quantity | None = None
    """CPU request, such as 8 or 500m."""
    memory: Quantity | None = None
    """Memory request and limit; shared memory counts against it."""
    shared_memory: Quantity | None = None
    """Size of /dev/shm; absent takes no more than the memory limit."""
    gpu: ResourceName = "nvidia.com/gpu"
    """Resource name of a GPU."""
    rdma: RdmaResource | None = None
    """InfiniBand; absent means that these nodes have none."""
    other: Annotated[dict[str, Quantity], Field(max_length=16)] = Field({})
    """Further resources by name, requested and limited."""


class ProfileVolume(ApiModel):
    """A volume that every pod gets, and that a job may name where `allow.volumes` lists it."""

    name: Annotated[str, Field(pattern="^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=50)]
    """Its name; pvc://NAME/PATH in a job is a path on it."""
    mount_path: Path
    """Where it is mounted."""
    read_only: bool = False
    """Mount it read-only."""
    source: Annotated[dict[str, Any], Field(max_length=1)] = Field(
        json_schema_extra={"x-kubernetes-preserve-unknown-fields": True}
    )
    """The volume's source as in a PodSpec: persistentVolumeClaim, csi, hostPath, …"""


class SecuritySettings(ApiModel):
    """As whom the containers run; root never."""

    run_as_user: UserId = 1000
    """User id."""
    run_as_group: UserId = 1000
    """Group id."""
    fs_group: UserId = 1000
    """Group that owns mounted volumes."""


class MetricsReader(ApiModel):
    """Pods that may read the metrics of training pods."""

    namespace: Annotated[str, Field(min_length=1, max_length=63)]
    """Their namespace."""
    labels: Annotated[dict[str, LabelValue], Field(max_length=16)] = Field({})
    """Labels they have; empty means all of the namespace."""


class NetworkSettings(ApiModel):
    """Who may connect to training pods, besides those of the same job and the operator."""

    policy: bool = True
    """Make a NetworkPolicy for each job."""
    metrics_readers: Annotated[list[MetricsReader], Field(max_length=16)] = Field(
        [
            MetricsReader(namespace="monitoring"),
            MetricsReader(namespace="kube-system", labels={"rsName": "ama-metrics"}),
        ]
    )
    """Pods that may read metrics. By default those of the namespace monitoring, and those of AKS's
    managed Prometheus."""


class RankZeroName(StrEnum):
    """How the pods of several nodes find rank 0."""

    ENDPOINT_SLICE = "endpointSlice"
    SERVICE = "service"


class ImagePullPolicy(StrEnum):
    """When a node asks the registry for an image, as in a PodSpec."""

    ALWAYS = "Always"
    IF_NOT_PRESENT = "IfNotPresent"
    NEVER = "Never"


class GpuMetrics(StrEnum):
    """Where metrics of GPUs come from."""

    OWN = "own"
    DCGM = "dcgm"
    NONE = "none"


class FineTuneProfileSpec(ApiModel):
    """What every job that names the profile gets, and what it may ask for besides."""

    image: Image | None = None
    """Image of the trainer, in a profile of the aks backend."""
    azureml: AzureMLSettings | None = None
    """The workspace, in a profile of the azureml backend."""
    command: Annotated[list[Text], Field(min_length=1, max_length=64)] = Field(
        ["python", "-m", "finetune_trainer"]
    )
    """What a pod runs; the path of its configuration is appended."""
    init: Annotated[list[Text], Field(max_length=16)] | None = None
    """What starts the command, passes signals on to it and returns its exit code, such as [tini,
    --]. Absent means some lines of sh, which the image must have then; an empty list means nothing:
    the command is PID 1, and a stop in its first moments is lost."""
    env: Annotated[dict[str, Text], Field(max_length=256)] = Field({})
    """Environment variables of every pod."""
    image_pull_secrets: Annotated[list[Name], Field(max_length=16)] = Field([])
    """Secrets of the job's namespace to pull the image with."""
    image_pull_policy: ImagePullPolicy | None = None
    """When nodes ask the registry for it: IfNotPresent takes an image that is there, Always asks at
    every start, Never takes only those that were put on the nodes. Absent means Always for the tag
    latest and for no tag, else IfNotPresent."""
    service_account_name: Name | None = None
    """Service account of the pods; absent means the namespace's default."""
    workload_identity: bool = False
    """Let the pods log in to Azure as their service account's identity."""
    priority_class_name: Name | None = None
    """PriorityClass of the pods."""
    runtime_class_name: Name | None = None
    """RuntimeClass of the pods."""
    scheduler_name: Name | None = None
    """Scheduler; absent means the default."""
    nodes: NodeSettings = NodeSettings()
    """Which nodes the pods are for."""
    resources: ResourceSettings = ResourceSettings()
    """What each pod asks of its node."""
    volumes: Annotated[list[ProfileVolume], Field(max_length=32)] = Field([])
    """Volumes that every pod gets, and that every job may name."""
    cache_directory: Path = "/scratch/cache"
    """Folder of downloaded models and tokenized data; below a volume's mountPath jobs share it,
    else each pod has its own."""
    listing_lag_seconds: Annotated[float, Field(ge=0, le=300)] | None = None
    """How long a new file may be missing from a listing of its folder on what jobs write to:
    attempts wait so long before they trust that nobody else writes there. Absent means 0 on a local
    disk and 2 on any other file system."""
    security: SecuritySettings = SecuritySettings()
    """As whom the pods run."""
    network: NetworkSettings = NetworkSettings()
    """Who may connect to the pods."""
    rank_zero_name: RankZeroName = RankZeroName.ENDPOINT_SLICE
    """How several nodes find rank 0: by an EndpointSlice that the operator writes (cheapest), or by
    a Service that selects the pod, where the operator may not write those."""
    gpu_metrics: GpuMetrics = GpuMetrics.OWN
    """Where metrics of GPUs come from: own, which each pod asks the driver for; dcgm, which leaves
    them to NVIDIA's DCGM exporter and tells only which GPU a rank has; or none."""
    allow: Allowances = Allowances()
    """Who may use the profile, and what their jobs may name."""

    cel_rules = (
        Rule(
            "has(self.image) != has(self.azureml)",
            "must set exactly one of image (aks backend) and azureml",
        ),
    )


class FineTuneProfile(ApiModel):
    """A blueprint for jobs of the aks or the azureml backend."""

    api_version: Literal["finetune.dev/v1alpha1"] = "finetune.dev/v1alpha1"
    kind: Literal["FineTuneProfile"] = "FineTuneProfile"
    metadata: ObjectMeta
    spec: FineTuneProfileSpec
