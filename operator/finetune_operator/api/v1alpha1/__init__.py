"""`finetune.dev/v1alpha1`: the files in `crds/` are generated from these models."""

from finetune_operator.api.v1alpha1.job import FineTuneJob, FineTuneJobSpec, ObjectMeta
from finetune_operator.api.v1alpha1.profile import FineTuneProfile, FineTuneProfileSpec
from finetune_operator.api.v1alpha1.status import FineTuneJobStatus

GROUP = "finetune.dev"
VERSION = "v1alpha1"
KIND = "FineTuneJob"
PLURAL = "finetunejobs"
PROFILE_KIND = "FineTuneProfile"
PROFILE_PLURAL = "finetuneprofiles"
API_VERSION = f"{GROUP}/{VERSION}"

__all__ = [
    "API_VERSION",
    "GROUP",
    "KIND",
    "PLURAL",
    "PROFILE_KIND",
    "PROFILE_PLURAL",
    "VERSION",
    "FineTuneJob",
    "FineTuneJobSpec",
    "FineTuneJobStatus",
    "FineTuneProfile",
    "FineTuneProfileSpec",
    "ObjectMeta",
]
