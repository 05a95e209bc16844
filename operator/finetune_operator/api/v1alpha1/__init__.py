"""`finetune.dev/v1alpha1`: the models are the source, `crds/finetunejobs.yaml` is generated."""

from finetune_operator.api.v1alpha1.job import FineTuneJob, FineTuneJobSpec, ObjectMeta
from finetune_operator.api.v1alpha1.status import FineTuneJobStatus

GROUP = "finetune.dev"
VERSION = "v1alpha1"
KIND = "FineTuneJob"
PLURAL = "finetunejobs"
API_VERSION = f"{GROUP}/{VERSION}"

__all__ = [
    "API_VERSION",
    "GROUP",
    "KIND",
    "PLURAL",
    "VERSION",
    "FineTuneJob",
    "FineTuneJobSpec",
    "FineTuneJobStatus",
    "ObjectMeta",
]
