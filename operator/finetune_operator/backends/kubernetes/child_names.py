"""Names, labels and annotations of a job's children, which `render` writes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ConfigDict, ValidationError

from finetune_operator.api.schema import ApiModel
from finetune_operator.errors import BackendError
from finetune_operator.kube.cache import Key
from finetune_operator.kube.resources import Object

BACKEND = "kubernetes"
CONTAINER = "trainer"
CONFIG_ANNOTATION = "finetune.dev/config"
"""The trainer's configuration as JSON, on each pod; a downward API volume exposes it as a file."""

PROFILE_ANNOTATION = "finetune.dev/profile"
"""The profile at the time of rendering, on each batch Job; later attempts use it."""

CHILDREN_ANNOTATION = "finetune.dev/children"
"""The attempt's other children as created, on each batch Job; changed children are restored to it.
"""

FACTS_ANNOTATION = "finetune.dev/attempt-facts"
"""The facts needed to observe an attempt, on each batch Job."""

CANCELLED_ANNOTATION = "finetune.dev/cancelled"
"""On a batch Job that the operator stopped."""

COMPLETED_ANNOTATION = "finetune.dev/completed"
"""Rank 0's termination message as JSON, on a batch Job that the operator ended after a success."""

LOG_TAIL_ANNOTATION = "finetune.dev/last-lines"
"""On a batch Job: the end of the log of the pod that failed first, or of a success's rank 0."""

OWNED_PREFIXES = (
    "finetune.dev/", "app.kubernetes.io/", "azure.workload.identity/", "batch.kubernetes.io/",
    "cluster-autoscaler.kubernetes.io/safe-to-evict", "karpenter.sh/do-not-disrupt",
    "kueue.x-k8s.io/",
)  # fmt: skip
"""Labels and annotations that no podTemplate may set."""

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
INDEX_LABEL = "batch.kubernetes.io/job-completion-index"
CONTROLLER_LABEL = "batch.kubernetes.io/controller-uid"
RENDEZVOUS_PORT = 29500
METRICS_PORT_NAME = "metrics"


class AttemptFacts(ApiModel):
    """The facts needed to observe an attempt without its job.

    Another version of the operator may have written them, so new fields need a default.

    Attributes:
        nodes: Number of pods in the gang.
        processes_per_node: Ranks per pod.
        metrics_port: Port of the nodes' pages; the page of rank 0's node has /progress.
        status_interval_seconds: Shortest time between two reads of the progress of a steady run.
        output: URI of the folder of the trained model.
        output_folder: Path of that folder in a pod; empty if unknown.
        service: Service that gives rank 0 its name if the operator writes the endpoints; else
            empty.
        unreachable_seconds: Time after which a node that does not respond may count as lost; 0 if
            the folders of the job may be on that node alone.
    """

    model_config = ConfigDict(extra="ignore")
    nodes: int
    processes_per_node: int
    metrics_port: int
    status_interval_seconds: int
    output: str
    output_folder: str = ""
    service: str = ""
    unreachable_seconds: int = 0


def facts_of(batch_job: Object) -> AttemptFacts:
    """Return the facts of a batch Job's attempt.

    Raises:
        BackendError: Another client has removed or changed them.
    """
    metadata = batch_job["metadata"]
    text = (metadata.get("annotations") or {}).get(FACTS_ANNOTATION, "")
    try:
        return AttemptFacts.model_validate_json(text)
    except ValidationError as error:
        what = f"cannot be read ({text:.100})" if text else "is missing"
        raise BackendError(
            f"the annotation {FACTS_ANNOTATION} of Job {metadata['namespace']}/{metadata['name']} "
            f"{what}; restore it, or delete that Job: the next attempt resumes from the last "
            "checkpoint"
        ) from error


def facts_if_readable(batch_job: Object) -> AttemptFacts | None:
    """Return the facts of the attempt, or None if another client has removed or changed them."""
    try:
        return facts_of(batch_job)
    except BackendError:
        return None


@dataclass(frozen=True)
class AttemptName:
    """Name of an attempt: `NAMESPACE/JOB-NUMBER`, which is also the name of its batch Job."""

    namespace: str
    job: str
    number: int

    @property
    def batch_job(self) -> str:
        """Name of the batch Job."""
        return f"{self.job}-{self.number}"

    @property
    def host(self) -> str:
        """Host name of rank 0's pod, which the batch Job's controller gives it."""
        return f"{self.batch_job}-0"

    @property
    def key(self) -> Key:
        """Key of the FineTuneJob."""
        return Key(self.namespace, self.job)

    def __str__(self) -> str:
        """Return the name of the handle."""
        return f"{self.namespace}/{self.batch_job}"

    @classmethod
    def parse(cls, text: str) -> "AttemptName":
        """Parse the result of `str`.

        Raises:
            ValueError: The text is not a valid name.
        """
        namespace, _, name = text.partition("/")
        job, _, number = name.rpartition("-")
        return cls(namespace, job, int(number))


def child_name(job: str) -> str:
    """Return the name of the job's Service, EndpointSlice and NetworkPolicy.

    It has a suffix, because a user may own a Service with the job's name.
    """
    return f"{job}-finetune"


def owner_of(obj: Mapping[str, Any]) -> dict[str, str]:
    """Return the reference to the object's controller, or an empty mapping without one."""
    references = obj["metadata"].get("ownerReferences") or ()
    return next((dict(one) for one in references if one.get("controller")), {})


def is_owned(obj: Mapping[str, Any] | None, job_uid: str) -> bool:
    """Return whether the object exists and the job of that uid is its controller."""
    return obj is not None and owner_of(obj).get("uid") == job_uid
