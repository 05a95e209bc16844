"""Label and field selectors in the parameters of a URL."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from finetune_operator.embedded.kinds import Kind
from finetune_operator.embedded.status_errors import bad_request
from finetune_operator.embedded.tables import find
from finetune_operator.kube.resources import Object

_SPLIT = re.compile(r",(?![^(]*\))")
_TERM = re.compile(
    r"(?P<absent>!\s*)?(?P<key>[\w./-]+)(?:\s*(?P<unequal>!)?={1,2}\s*(?P<value>\S*)"
    r"|\s+(?P<outside>not)?in\s+\((?P<values>[^)]*)\))?"
)


@dataclass(frozen=True)
class _Term:
    """A requirement of a selector; without values it requires that the key exists."""

    key: str
    values: frozenset[str] | None
    is_negated: bool

    def holds(self, value: str | None) -> bool:
        is_found = value is not None if self.values is None else value in self.values
        return is_found is not self.is_negated


def selects(kind: Kind, namespace: str, query: Mapping[str, str]) -> Callable[[Object], bool]:
    """Return a predicate: whether an object is in the namespace and matches the selectors.

    Raises:
        StatusError: a selector cannot be parsed, or a custom resource lacks such a field selector.
    """
    labels = list(_terms(query.get("labelSelector", "")))
    fields = list(_terms(query.get("fieldSelector", "")))
    for term in fields:
        if term.values is None:
            raise bad_request(f"invalid selector: '{term.key}'; can't understand '{term.key}'")
        if kind.is_custom and term.key not in ("metadata.name", "metadata.namespace"):
            raise bad_request(f"field label not supported: {term.key}")

    def matches(obj: Object) -> bool:
        present = obj["metadata"].get("labels") or {}
        return (
            namespace in ("", obj["metadata"].get("namespace"))
            and all(term.holds(present.get(term.key)) for term in labels)
            and all(term.holds(str(find(obj, f".{term.key}") or "")) for term in fields)
        )

    return matches


def _terms(text: str) -> Iterator[_Term]:
    for part in filter(None, (piece.strip() for piece in _SPLIT.split(text))):
        found = _TERM.fullmatch(part)
        if found is None:
            raise bad_request(f"unable to parse requirement: {part}")
        listed = found["value"] if found["values"] is None else found["values"]
        values = None if listed is None else frozenset(map(str.strip, listed.split(",")))
        yield _Term(
            found["key"], values, bool(found["absent"] or found["unequal"] or found["outside"])
        )
