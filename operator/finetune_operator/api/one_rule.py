"""Merge the CEL rules of the spec into one rule for the CRD.

`crd.py` calls it. The API server evaluates every rule on every write, also of the status, and each
read of a field copies the schemas of all its sibling fields (docs/decisions/0010). Separate rules
that read the same fields repeat this cost. `ftctl validate` evaluates the same rules one by one, so
that each has its own path and line.

CPU time of the API server for `examples/07-kubernetes.yaml`, relative to a CRD without rules
(Kubernetes 1.34, medians of interleaved rounds): creation 1.6 (1.9 with separate rules), status
patch to Starting 1.2 (1.4), next status patch 1.3 (1.8).
"""

import json
import re

from finetune_operator.api.openapi import READS, Schema

RULES = "x-kubernetes-validations"


def with_one_rule(schema: Schema) -> Schema:
    """Return the schema of an object with its rules merged into one, and without the list of reads.

    The rule has no `fieldPath`; its message names the field of each broken condition.
    """
    rule = {
        "rule": _all_conditions(schema),
        "message": "is invalid",
        "messageExpression": " + ".join(_sentence(rule) for rule in schema[RULES]),
    }
    return {key: part for key, part in schema.items() if key != READS} | {RULES: [rule]}


def _all_conditions(schema: Schema) -> str:
    """Return CEL that holds if all rules hold, and that reads each field of the list once."""
    lists = "|".join(
        re.escape(f"{block}.{field}")
        for block, part in schema["properties"].items()
        for field, inner in part.get("properties", {}).items()
        if inner.get("type") == "array"
    )
    condition = " && ".join(f"({rule['rule']})" for rule in schema[RULES])
    for field in schema[READS]:
        name = field.replace(".", "_")
        read = rf"\bself\.(?!(?:{lists})\b){re.escape(field)}\b"
        condition = f"[self.{field}].all({name}, {re.sub(read, name, condition)})"
    return condition


def _sentence(rule: dict[str, str]) -> str:
    """Return CEL for the message of a rule that does not hold; the result is empty if it holds."""
    sentence = json.dumps(f"{rule['fieldPath'][1:]} {rule['message']}. ", ensure_ascii=False)
    return f"({rule['rule']} ? '' : {sentence})"
