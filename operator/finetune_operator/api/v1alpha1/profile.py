"""`FineTuneProfile`: settings of a cluster administrator for all jobs of kubernetes or azureml.

Cluster-scoped. A job names a profile and gets its image, volumes and node pools, or its workspace,
compute and datastore. `allow` lists the namespaces that may use it, and the other resources that
such a job may name. Everything else is refused, because users who may create FineTuneJobs but not
pods must not gain permissions through them.
"""

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import Field

from finetune_operator.api.schema import ApiModel, Rule
from finetune_operator.api.v1alpha1.allowances import Allowances, Quantity
from finetune_operator.api.v1alpha1.azureml_profile import AzureMLSettings
from finetune_operator.api.v1alpha1.job import ObjectMeta
from finetune_operator.api.v1alpha1.lifecycle import LabelValue
from finetune_operator.api.v1alpha1.pod_fields import VOLUME_SOURCE
from finetune_operator.api.v1alpha1.topology import Image, Name
from finetune_operator.api.v1alpha1.training import INT32_MAX

LabelKey = Annotated[str, Field(max_length=317)]
Text = Annotated[str, Field(max_length=4096)]
Path = Annotated[
    str,
    Field(min_length=1, max_length=1024),
    Rule("self.startsWith('/')", "must be an absolute path; start it with /"),
]
WHOLE_GPU = "nvidia.com/gpu"
"""Resource of whole GPUs; others, such as nvidia.com/mig-1g.10gb, may be parts of one."""
_SEGMENT = "([A-Za-z0-9_-][A-Za-z0-9._-]*|[{]namespace[}])"
SubPath = Annotated[
    str,
    Field(min_length=1, max_length=253),
    Rule(
        f"self.matches('^{_SEGMENT}(/{_SEGMENT})*$')",
        "must be a relative path of names, each of letters, digits, '.', '_' and '-' without a "
        "leading '.', or '{namespace}', which is replaced by the namespace of the job",
    ),
]
ResourceName = Annotated[str, Field(min_length=1, max_length=317)]
UserId = Annotated[int, Field(ge=1, le=INT32_MAX)]


class Toleration(ApiModel):
    """A toleration of the pods, as in a PodSpec."""

    key: LabelKey | None = None
    """Key of the taint."""
    operator: Annotated[str, Field(pattern="^(Exists|Equal)$", max_length=16)] = "Equal"
    """Equal compares the value, Exists matches any value."""
    value: LabelValue | None = None
    """Value of the taint."""
    effect: Annotated[str, Field(pattern="^No(Schedule|Execute)$", max_length=16)] | None = None
    """NoSchedule or NoExecute; absent means both."""


class NodeSettings(ApiModel):
    """Nodes for the pods."""

    agent_pools: Annotated[list[Name], Field(max_length=64)] = Field([])
    """Names of AKS node pools; empty means any."""
    instance_types: Annotated[list[Name], Field(max_length=64)] = Field([])
    """VM sizes; a job may select a size of this list. Empty means any."""
    gpu_memory_gib: Annotated[float, Field(ge=1, le=4096)] | None = Field(
        None, alias="gpuMemoryGiB"
    )
    """Memory of each GPU in GiB, for the forecast whether a job fits; only without instanceTypes,
    whose memory is known."""
    selector: Annotated[dict[str, LabelValue], Field(max_length=64)] = Field({})
    """Labels that a node must have, in addition to kubernetes.io/os: linux."""
    tolerations: Annotated[list[Toleration], Field(max_length=64)] = Field([])
    """Taints that the pods tolerate, in addition to the taints of spot pools and, with GPUs,
    sku=gpu and nvidia.com/gpu."""
    topology_key: LabelKey = "topology.kubernetes.io/zone"
    """Label with an equal value on all nodes of a job under placement pack: zone, or proximity
    placement group. Empty leaves it to the scheduler."""
    unreachable_seconds: Annotated[int, Field(ge=30, le=3600)] | None = None
    """Time after which a node that does not respond counts as lost, if the attempt makes no
    progress and its folders are shared by all nodes. The next attempt then starts on other nodes.
    Absent means 60."""

    cel_rules = (
        Rule(
            "!has(self.gpuMemoryGiB) || !has(self.instanceTypes) || self.instanceTypes.size() == 0",
            "has no effect with instanceTypes, whose GPUs are known; remove it",
            field="gpuMemoryGiB",
        ),
    )


class RdmaResource(ApiModel):
    """Resource that gives a pod InfiniBand; its name depends on the configuration of the plugin."""

    name: ResourceName = "rdma/ib"
    """Resource name, such as rdma/ib or rdma/shared_ib."""
    count: Annotated[int, Field(ge=1, le=64)] = 1
    """Number of devices that each pod requests."""


class ResourceSettings(ApiModel):
    """Resources of each pod."""

    cpu: Quantity | None = None
    """CPU request, such as 8 or 500m."""
    memory: Quantity | None = None
    """Memory request and limit, including shared memory."""
    shared_memory: Quantity | None = None
    """Size of /dev/shm; absent means no limit other than the memory limit."""
    gpu: ResourceName = WHOLE_GPU
    """Resource name of a GPU."""
    rdma: RdmaResource | None = None
    """InfiniBand; absent means that the nodes have no InfiniBand."""
    other: Annotated[dict[str, Quantity], Field(max_length=16)] = Field({})
    """Additional resources by name, as request and limit."""


class ProfileVolume(ApiModel):
    """A volume of every pod. A job may name it if `allow.volumes` lists it."""

    name: Annotated[str, Field(pattern="^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=50)]
    """Name of the volume; pvc://NAME/PATH in a job is a path on it."""
    mount_path: Path
    """Mount path."""
    sub_path: SubPath | None = None
    """Folder of the volume that pods mount in place of its root. {namespace} is replaced by the
    namespace of the job, so that namespaces that share the volume have separate files. The folder
    should exist and belong to the group of the pods; the kubelet creates a missing one as root.
    Absent means the root, with the files of all namespaces."""
    read_only: bool = False
    """Mount the volume read-only. A volume that no job may name is always read-only, unless
    cacheDirectory or a variable of env is a path on it."""
    shared: bool | None = None
    """Whether all nodes see the same files, as on a cluster file system that is mounted on the
    nodes. Only then may another attempt start while a lost node may still run pods. Absent means
    true for claims, NFS, Azure Files and Azure Blob, else false."""
    source: Annotated[dict[str, Any], Field(max_length=1)] = Field(json_schema_extra=VOLUME_SOURCE)
    """Source of the volume as in a PodSpec: persistentVolumeClaim, csi, hostPath, …"""

    cel_rules = (
        Rule(
            "!(has(self.shared) && self.shared) || "
            "!(has(self.source.emptyDir) || has(self.source.ephemeral))",
            "must not set shared to true for an emptyDir or ephemeral volume, since each pod has "
            "its own",
        ),
    )


class SecuritySettings(ApiModel):
    """User and groups of the containers; root is refused."""

    run_as_user: UserId = 1000
    """User id."""
    run_as_group: UserId = 1000
    """Group id."""
    fs_group: UserId = 1000
    """Group id that owns mounted volumes."""


class MetricsReader(ApiModel):
    """Pods that may scrape the metrics of training pods."""

    namespace: Annotated[str, Field(min_length=1, max_length=63)]
    """Namespace of the pods."""
    labels: Annotated[dict[str, LabelValue], Field(max_length=16)] = Field({})
    """Labels of the pods; empty means all pods of the namespace."""


class NetworkSettings(ApiModel):
    """Pods that may connect to training pods, besides pods of the same job and the operator."""

    policy: bool = True
    """Create a NetworkPolicy for each job."""
    metrics_readers: Annotated[list[MetricsReader], Field(max_length=16)] = Field(
        [
            MetricsReader(namespace="monitoring"),
            MetricsReader(namespace="kube-system", labels={"rsName": "ama-metrics"}),
        ]
    )
    """Pods that may scrape metrics. By default the pods of the namespace monitoring, and the pods
    of managed Prometheus in AKS."""


class RankZeroName(StrEnum):
    """How pods resolve the address of rank 0 in a job with several nodes."""

    ENDPOINT_SLICE = "endpointSlice"
    SERVICE = "service"


class ImagePullPolicy(StrEnum):
    """When a node pulls the image, as in a PodSpec."""

    ALWAYS = "Always"
    IF_NOT_PRESENT = "IfNotPresent"
    NEVER = "Never"


class GpuMetrics(StrEnum):
    """Source of GPU metrics."""

    OWN = "own"
    DCGM = "dcgm"
    NONE = "none"


class FineTuneProfileSpec(ApiModel):
    """Settings of every job that names the profile, and the options that such a job may choose."""

    image: Image | None = None
    """Trainer image; only in a profile of the kubernetes backend."""
    azureml: AzureMLSettings | None = None
    """Azure ML workspace; only in a profile of the azureml backend."""
    command: Annotated[list[Text], Field(min_length=1, max_length=64)] = Field(
        ["python", "-m", "finetune_trainer"]
    )
    """Command of each pod; the path of its configuration is appended."""
    init: Annotated[list[Text], Field(max_length=16)] | None = None
    """Init process that starts the command, forwards signals and returns its exit code, such as
    [tini, --]. Absent means a short sh script, so the image must contain sh. With an empty list the
    command is PID 1, and a stop within its first moments is lost."""
    env: Annotated[dict[str, Text], Field(max_length=256)] = Field({})
    """Environment variables of every pod."""
    image_pull_secrets: Annotated[list[Name], Field(max_length=16)] = Field([])
    """Secrets of the job's namespace with which nodes pull the image."""
    image_pull_policy: ImagePullPolicy | None = None
    """When nodes pull the image: IfNotPresent uses an image on the node, Always checks the registry
    at every start, Never uses only images that are preloaded on the nodes. Absent means Always for
    the tag latest and without a tag, else IfNotPresent."""
    service_account_name: Name | None = None
    """Service account of the pods; absent means the default of the namespace."""
    workload_identity: bool = False
    """Let the pods authenticate to Azure with the identity of their service account."""
    priority_class_name: Name | None = None
    """PriorityClass of the pods."""
    runtime_class_name: Name | None = None
    """RuntimeClass of the pods."""
    scheduler_name: Name | None = None
    """Scheduler of the pods; absent means the default scheduler."""
    nodes: NodeSettings = NodeSettings()
    """Nodes for the pods."""
    resources: ResourceSettings = ResourceSettings()
    """Resources of each pod."""
    volumes: Annotated[list[ProfileVolume], Field(max_length=32)] = Field([])
    """Volumes of every pod. A job may name a volume that allow.volumes lists."""
    cache_directory: Path = "/scratch/cache"
    """Folder of downloaded models and tokenized data. Jobs share it if it is below the mountPath of
    a volume; otherwise each pod has its own."""
    listing_lag_seconds: Annotated[float, Field(ge=0, le=300)] | None = None
    """Maximum time until a new file appears in listings of its folder, on the file systems that
    jobs write to. Attempts wait this long before they conclude that no other process writes there.
    Absent means 0 on a local disk and 2 on any other file system."""
    security: SecuritySettings = SecuritySettings()
    """User and groups of the pods."""
    network: NetworkSettings = NetworkSettings()
    """Pods that may connect to the training pods."""
    rank_zero_name: RankZeroName = RankZeroName.ENDPOINT_SLICE
    """How nodes resolve the address of rank 0: an EndpointSlice that the operator writes
    (cheapest), or a Service that selects the pod, if the operator has no permission for
    EndpointSlices."""
    gpu_metrics: GpuMetrics = GpuMetrics.OWN
    """Source of GPU metrics: own (each pod queries the driver), dcgm (NVIDIA's DCGM exporter; a pod
    publishes only which GPU each rank uses), or none."""
    allow: Allowances = Allowances()
    """Namespaces that may use the profile, and the resources that their jobs may name."""

    cel_rules = (
        Rule(
            "has(self.image) != has(self.azureml)",
            "must set exactly one of image (kubernetes backend) and azureml",
        ),
    )


class FineTuneProfile(ApiModel):
    """A blueprint for jobs of the kubernetes or the azureml backend."""

    api_version: Literal["finetune.dev/v1alpha1"] = "finetune.dev/v1alpha1"
    kind: Literal["FineTuneProfile"] = "FineTuneProfile"
    metadata: ObjectMeta
    spec: FineTuneProfileSpec
