"""What the models of every API version are made of: the base model and the CEL rule.

A rule stands beside the field it guards and exists once: the CRD converter copies it into
`x-kubernetes-validations`, `ftctl validate` evaluates the same text.
"""

from dataclasses import dataclass
from typing import ClassVar

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel


@dataclass(frozen=True)
class Rule:
    """One CEL rule on a field (in `Annotated`) or on a model (in `cel_rules`).

    The sentence is printed after the path and the value it is about, so it starts with the verb:
    "must be at most nodes" becomes `spec.topology.minNodes 4 must be at most nodes`. A rule uses
    only functions that the API server and common-expression-language both know, and never `size()`
    of a string, which counts bytes in one and characters in the other.

    Attributes:
        expression: CEL that must hold; `self` is the value the rule stands on. One that names
            `oldSelf` compares an update with the object before it.
        message: The sentence a user reads when it does not: what is wrong, then what to do.
        field: JSON path below the model of the field the message is about (models only).
        detail: CEL for text with numbers that follows the message where `ftctl` prints it. The CRD
            goes without: the API server estimates any `string(int)` as too costly.
        message_expression: CEL for a sentence that takes the place of the message.
    """

    expression: str
    message: str
    field: str | None = None
    detail: str | None = None
    message_expression: str | None = None


ABOVE_ZERO = Rule("self > 0.0", "must be above 0")
"""For a fraction; as a minimum of 0.001 the API server compares a whole 0 with 0, and takes it."""


class ApiModel(BaseModel):
    """A frozen part of the resource: camelCase in JSON, unknown fields refused, rules beside it."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        protected_namespaces=(),
    )
    cel_rules: ClassVar[tuple[Rule, ...]] = ()
