"""What of a spec may change after creation; the rules compare it with `oldSelf`.

Free at any time: suspend, deadlines, observability, ttlSecondsAfterFinished, topology.nodes,
restartPolicy.maxRestarts and .maxDisruptions. Never: managedBy and backend.type. Everything else
changes only while the job is suspended, so that no attempt runs another spec than the one shown.
"""

from finetune_operator.api.schema import Rule

_ALWAYS_PRESENT = (
    "model",
    "dataset",
    "method",
    "strategy",
    "training",
    "topology.gpusPerNode",
    "topology.rdma",
    "topology.placement",
    "capacity",
    "checkpoint",
    "output",
    "restartPolicy.restartsInPlace",
    "restartPolicy.rules",
    "restartPolicy.backoff",
    "backend",
)
_OPTIONAL = (
    "topology.minNodes",
    "topology.maxNodes",
    "topology.processesPerNode",
    "topology.instanceType",
    "queue",
    "podTemplate",
)
_MESSAGE = "cannot change while the job is not suspended; set spec.suspend: true first"


def never_changes(field: str) -> Rule:
    """Return the rule that `field` keeps its first value for the life of the job."""
    return Rule(
        f"self.{field} == oldSelf.{field}",
        "cannot change after creation; create another job",
        field=field,
    )


def changes_only_while_suspended() -> tuple[Rule, ...]:
    """Return one rule on the spec for each field that an attempt is bound to."""
    present = (
        Rule(f"oldSelf.suspend || self.{field} == oldSelf.{field}", _MESSAGE, field=field)
        for field in _ALWAYS_PRESENT
    )
    optional = (
        Rule(
            f"oldSelf.suspend || (has(self.{field}) ? has(oldSelf.{field}) && "
            f"self.{field} == oldSelf.{field} : !has(oldSelf.{field}))",
            _MESSAGE,
            field=field,
        )
        for field in _OPTIONAL
    )
    return (*present, *optional)
