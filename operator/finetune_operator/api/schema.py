"""Base classes of the models of every API version: the base model and the CEL rule.

A rule is written once, next to the field that it guards: the CRD has it in
`x-kubernetes-validations`, and `ftctl validate` evaluates the same text.
"""

from dataclasses import dataclass
from typing import ClassVar

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel


@dataclass(frozen=True)
class Rule:
    """A CEL rule on a field (in `Annotated`) or on a model (in `cel_rules`).

    The message is printed after path and value, so it starts with the verb: "must be at most nodes"
    becomes `spec.topology.minNodes 4 must be at most nodes`. A rule uses only functions that both
    the API server and common-expression-language support, or that `cel.py` adds, and never `size()`
    of a string, which counts bytes in the API server and characters in the library.

    Attributes:
        expression: CEL that must hold; `self` is the value with the rule. A rule that names
            `oldSelf` compares an update with the previous object.
        message: Message if the rule does not hold: what is wrong, then what to do.
        field: JSON path, below the model, of the field in the message (models only).
        detail: CEL for text with numbers that `ftctl` prints after the message. The CRD does not
            have it, because the API server estimates any `string(int)` as too costly.
        message_expression: CEL for a message that replaces `message`.
    """

    expression: str
    message: str
    field: str | None = None
    detail: str | None = None
    message_expression: str | None = None


@dataclass(frozen=True)
class OmitDefault:
    """Mark a field (in `Annotated`) whose default is not written into the CRD (decision 0068)."""


ABOVE_ZERO = Rule("self > 0.0", "must be greater than 0")
"""Rule of fractions. With a minimum of 0.001 the API server would accept a whole 0."""


class ApiModel(BaseModel):
    """Immutable base model of the resource: camelCase in JSON, unknown fields refused, with rules.

    The docstring below a field is its description in the CRD.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        protected_namespaces=(),
    )
    cel_rules: ClassVar[tuple[Rule, ...]] = ()
    cel_reads: ClassVar[tuple[str, ...]] = ()
    """Fields that several rules of a spec read; the CRD's merged rule reads each of them once
    (`one_rule.py`).
    """
