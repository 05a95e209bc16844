"""Fields of a spec that may change after creation; the rules compare them with `oldSelf`.

Always: suspend, deadlines, observability, ttlSecondsAfterFinished, topology.nodes,
restartPolicy.maxRestarts and .maxDisruptions. Never: managedBy and backend.type. Everything else
may change only while the job is suspended, so that a running attempt always has the spec that is
shown. `ftctl run` uses these rules to apply a changed manifest to an unfinished job.
"""

from collections.abc import Iterable
from functools import reduce
from typing import Any

from finetune_operator.api.schema import ApiModel, Rule

_ALWAYS_PRESENT = (
    "model", "dataset", "method", "strategy", "training", "topology.gpusPerNode", "topology.rdma",
    "topology.placement", "capacity", "checkpoint", "takeOver", "restartPolicy.restartsInPlace",
    "restartPolicy.backoff",
)  # fmt: skip
_OPTIONAL = (
    "topology.minNodes", "topology.maxNodes", "topology.processesPerNode", "topology.instanceType",
    "output", "restartPolicy.rules", "queue", "podTemplate",
)  # fmt: skip
_BACKEND = "backend"
ONLY_WHILE_SUSPENDED = (*_ALWAYS_PRESENT, *_OPTIONAL, _BACKEND)
"""Fields that may change only while the job is suspended, with all fields below them."""
_FROZEN = (
    "model", "dataset", "method", "training.globalBatchSize", "training.maxSeqLength",
    "training.epochs", "training.maxSteps", "training.packing", "training.seed", "checkpoint.uri",
    "checkpoint.resumeFrom",
)  # fmt: skip
"""Fields that determine the course of the training and the location of checkpoints. After a change
of such a field, existing checkpoints cannot be used.
"""
# A write of the status cannot change the spec. It is recognised by its ledger, which every status
# that the operator writes changes, and the specs are not compared, because that costs the API
# server more than the rest of the write.
_WRITES_STATUS = (
    "(has(self.status.ledger) && has(oldSelf.status.ledger) && "
    "self.status.ledger != oldSelf.status.ledger) || "
    "self.status.observedGeneration != oldSelf.status.observedGeneration || "
    "self.status.phase != oldSelf.status.phase"
)
_WRONG, _DO = "cannot change while the job is not suspended", "; set spec.suspend: true first"

NEVER_CHANGES = Rule("self == oldSelf", "cannot change after creation; create another job")
"""For a field that has a default and is therefore present before and after an update."""


def _backend_name(root: str) -> str:
    """Return CEL for the name of the backend: absent and aks mean kubernetes."""
    name = f"{root}.spec.backend.type"
    is_named = f"has({root}.spec.backend) && has({name}) && {name} != 'aks'"
    return f"({is_named} ? {name} : 'kubernetes')"


BACKEND_NEVER_CHANGES = Rule(
    f"{_WRITES_STATUS} || {_backend_name('self')} == {_backend_name('oldSelf')}",
    "cannot change after creation; create another job",
    field="spec.backend.type",
)


def _kubernetes_setting(root: str, setting: str, default: str) -> str:
    """Return CEL for a setting of the kubernetes backend, under either of its names."""
    backend = f"{root}.spec.backend"

    def of(block: str, otherwise: str) -> str:
        path = f"{backend}.{block}"
        value = f"(has({path}.{setting}) ? {path}.{setting} : '{default}')"
        return f"(has({path}) ? {value} : {otherwise})"

    return f"(has({backend}) ? {of('kubernetes', of('aks', repr(default)))} : '{default}')"


def _is_same_backend() -> str:
    """Return CEL that holds if the settings of the backend mean what they meant."""
    new, old = "self.spec.backend", "oldSelf.spec.backend"
    is_equal = f"has({new}) && has({old}) && {new} == {old}"
    settings = (("profile", "default"), ("serviceAccountName", ""), ("image", ""))
    alike = [
        " == ".join(_kubernetes_setting(root, *setting) for root in ("self", "oldSelf"))
        for setting in settings
    ]
    for block in ("azureml", "local"):
        has_new = f"has({new}) && has({new}.{block})"
        has_old = f"has({old}) && has({old}.{block})"
        alike.append(f"({has_new} ? {has_old} && {new}.{block} == {old}.{block} : !({has_old}))")
    return f"({is_equal} || ({' && '.join(alike)}))"


def _is_same(field: str) -> str:
    if field == _BACKEND:
        return _is_same_backend()
    new, old = f"self.spec.{field}", f"oldSelf.spec.{field}"
    if field in _OPTIONAL:
        return f"(has({new}) ? has({old}) && {new} == {old} : !has({old}))"
    return f"{new} == {old}"


def changes_only_while_suspended() -> Rule:
    """Return the rule on the whole object that guards every field which an attempt depends on."""
    same = " && ".join(_is_same(field) for field in ONLY_WHILE_SUSPENDED)
    changed = " + ".join(
        f"({_is_same(field)} ? '' : ' spec.{field}')" for field in ONLY_WHILE_SUSPENDED
    )
    return Rule(
        f"{_WRITES_STATUS} || oldSelf.spec.suspend || ({same})",
        _WRONG + _DO,
        field="spec",
        message_expression=f"'{_WRONG}:' + {changed} + '{_DO}'",
    )


def changes_of_training(old: ApiModel, new: ApiModel) -> list[str]:
    """Return the changed fields that make checkpoints of `old` unusable for `new`."""
    return _changed(old, new, _FROZEN)


def changes_that_suspend(old: ApiModel, new: ApiModel) -> list[str]:
    """Return the changed fields that the API accepts only while a job is suspended."""
    return _changed(old, new, ONLY_WHILE_SUSPENDED)


def _changed(old: ApiModel, new: ApiModel, paths: Iterable[str]) -> list[str]:
    before, after = (one.model_dump(by_alias=True, mode="json") for one in (old, new))
    return [path for path in paths if _at(before, path) != _at(after, path)]


def _at(value: Any, path: str) -> Any:
    return reduce(lambda part, key: part[key], path.split("."), value)
