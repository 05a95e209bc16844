"""Compute resources of a job: `spec.topology`, `spec.capacity` and `spec.backend`."""

from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field, model_validator

from finetune_operator.api.placeholders import ONLY_KNOWN
from finetune_operator.api.schema import ApiModel, OmitDefault, Rule

KUBERNETES = "kubernetes"
AKS = "aks"
"""The name of `kubernetes` in release 0.1.0. Stored jobs and manifests may have it."""

_NAMES = f"['{KUBERNETES}', '{AKS}']"

Name = Annotated[str, Field(min_length=1, max_length=253)]
Image = Annotated[str, Field(min_length=1, max_length=512)]
NumNodes = Annotated[int, Field(ge=1, le=4096)]
AzureMLCompute = Annotated[str, Field(pattern="^[A-Za-z][A-Za-z0-9-]*$", max_length=32)]
_ASSET = "[A-Za-z0-9_][A-Za-z0-9._-]*"
AzureMLEnvironment = Annotated[
    str,
    Field(max_length=512),
    Rule(
        # Without a version, a restart could run another trainer than the first attempt.
        f"self.matches('^azureml:(//registries/{_ASSET}/environments/{_ASSET}/versions/{_ASSET}|"
        f"{_ASSET}:{_ASSET})$')",
        "must name an environment and its version; write azureml:NAME:VERSION, or "
        "azureml://registries/REGISTRY/environments/NAME/versions/VERSION",
    ),
]


class Rdma(StrEnum):
    """Use of InfiniBand between nodes."""

    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"


class Placement(StrEnum):
    """Placement of the nodes."""

    PACK = "pack"
    SPREAD = "spread"


class Capacity(StrEnum):
    """Kind of compute capacity."""

    ON_DEMAND = "onDemand"
    SPOT = "spot"
    SPOT_PREFERRED = "spotPreferred"


class TopologySpec(ApiModel):
    """Nodes, GPUs and processes; world size = nodes x processesPerNode."""

    nodes: NumNodes = 1
    """Number of nodes."""
    min_nodes: NumNodes | None = None
    """Minimum number of nodes of an elastic job."""
    max_nodes: NumNodes | None = None
    """Maximum number of nodes of an elastic job."""
    gpus_per_node: Annotated[int, Field(ge=0, le=64)] = 1
    """GPUs per node; 0 trains on the CPU."""
    processes_per_node: Annotated[int, Field(ge=1, le=256)] | None = None
    """Ranks per node; absent means gpusPerNode, or 1 on the CPU. May differ from gpusPerNode only
    on the CPU."""
    instance_type: Name | None = None
    """Azure VM size, such as Standard_ND96isr_H100_v5."""
    rdma: Rdma = Rdma.AUTO
    """InfiniBand between nodes: none, auto or required."""
    placement: Placement = Placement.PACK
    """pack places nodes close to each other, spread places them apart."""

    cel_rules = (
        Rule(
            "self.gpusPerNode == 0 || !has(self.processesPerNode) || "
            "self.processesPerNode == self.gpusPerNode",
            "may differ from gpusPerNode only on the CPU (gpusPerNode: 0); remove it",
            field="processesPerNode",
        ),
        Rule(
            "!has(self.minNodes) || self.minNodes <= self.nodes",
            "must be at most nodes; reduce it",
            field="minNodes",
        ),
        Rule(
            "!has(self.maxNodes) || self.maxNodes >= self.nodes",
            "must be at least nodes; raise it",
            field="maxNodes",
        ),
    )


class KubernetesSpec(ApiModel):
    """Settings of the kubernetes backend."""

    profile: Annotated[Name, OmitDefault()] = "default"
    """FineTuneProfile with the image, volumes and node pools; absent means default."""
    service_account_name: Name | None = None
    """Service account of the pods, which the profile must allow; absent means the profile's."""
    image: Image | None = None
    """Trainer image, which the profile must allow; absent means the profile's."""


class JobPriority(StrEnum):
    """Priority of a job in its workspace."""

    LOW = "low"
    MEDIUM = "medium"
    HIGH = "high"


class AzureMLSpec(ApiModel):
    """Settings of the azureml backend."""

    profile: Name = "default"
    """FineTuneProfile with the workspace, identity and datastore."""
    compute: AzureMLCompute | None = None
    """Compute that runs the job, which the profile must allow; absent means the profile's."""
    serverless: bool = False
    """Run on serverless compute of the VM size topology.instanceType; the profile must allow it."""
    environment: AzureMLEnvironment | None = None
    """Environment of the trainer, which the profile must allow; absent means the profile's."""
    experiment: (
        Annotated[str, Field(pattern="^[A-Za-z0-9][A-Za-z0-9_-]*$", max_length=255)] | None
    ) = None
    """Experiment of the job in Azure ML; absent means the namespace of the job."""
    priority: JobPriority | None = None
    """Priority of the job in its workspace: low, medium or high; absent leaves it to Azure ML."""

    cel_rules = (
        Rule(
            "!self.serverless || !has(self.compute)",
            "has no effect with serverless compute; remove compute, or serverless",
            field="compute",
        ),
    )


class LocalSpec(ApiModel):
    """Settings of the local backend: this machine."""

    run_directory: (
        Annotated[
            str,
            Field(min_length=1, max_length=2048),
            Rule("!self.startsWith('file:')", "must be a path, not a URI; leave out file://"),
            ONLY_KNOWN,
        ]
        | None
    ) = None
    """Folder of all files of the run, relative to the manifest. Absent means runs/NAMESPACE/NAME
    next to the manifest. {namespace} and {name} stand for the namespace and name of the job."""
    threads_per_process: Annotated[int, Field(ge=1, le=1024)] | None = None
    """CPU threads per rank; absent divides the cores of the machine evenly."""


class BackendSpec(ApiModel):
    """Backend that runs the job."""

    type: Annotated[
        str, Field(pattern="^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=63), OmitDefault()
    ] = KUBERNETES
    """kubernetes, azureml, local, or the name of an installed plugin; absent means kubernetes.
    aks is the name of kubernetes in release 0.1.0."""
    kubernetes: KubernetesSpec | None = None
    """Settings of the kubernetes backend."""
    aks: KubernetesSpec | None = None
    """The name of kubernetes in release 0.1.0."""
    azureml: AzureMLSpec | None = None
    """Settings of the azureml backend."""
    local: LocalSpec | None = None
    """Settings of the local backend."""

    cel_rules = (
        *(
            Rule(condition, "has no effect with another backend type; remove it", field=block)
            for block, condition in (
                *(
                    (block, f"!has(self.{block}) || !has(self.type) || self.type in {_NAMES}")
                    for block in (KUBERNETES, AKS)
                ),
                *(
                    (block, f"!has(self.{block}) || (has(self.type) && self.type == '{block}')")
                    for block in ("azureml", "local")
                ),
            )
        ),
        Rule(
            "!has(self.aks) || !has(self.kubernetes)",
            "is another name of kubernetes, which is set, too; remove aks",
            field="aks",
        ),
    )

    @model_validator(mode="before")
    @classmethod
    def _read_earlier_name(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        block = {KUBERNETES if key == AKS else key: part for key, part in value.items()}
        return {**block, "type": backend_name(block)}


def backend_name(block: Any) -> str:
    """Return the name of the backend that `spec.backend` of a raw object chooses."""
    name = (block.get("type") if isinstance(block, dict) else None) or KUBERNETES
    return KUBERNETES if name == AKS else str(name)
