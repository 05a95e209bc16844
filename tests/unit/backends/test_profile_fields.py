"""Each field of a profile is used by both backends, or refused by the other one."""

from finetune_operator.api.v1alpha1.allowances import Allowances
from finetune_operator.api.v1alpha1.profile import FineTuneProfileSpec
from finetune_operator.backends.profiles import USED_BY_AZUREML, USED_BY_KUBERNETES

USED_BY_BOTH = {
    "allow",
    "allow.namespaces",
    "allow.max_nodes",
    "allow.max_gpus_per_node",
    "allow.foreign_checkpoints",
    "listing_lag_seconds",
}


def test_no_field_is_without_effect_in_silence() -> None:
    fields = {
        *FineTuneProfileSpec.model_fields,
        *(f"allow.{one}" for one in Allowances.model_fields),
    }
    assert fields == USED_BY_BOTH | USED_BY_KUBERNETES | USED_BY_AZUREML
    assert not USED_BY_KUBERNETES & USED_BY_AZUREML
