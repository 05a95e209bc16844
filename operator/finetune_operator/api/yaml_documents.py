"""Read YAML like kubectl, and record the line of every field.

`manifest.py` calls it. PyYAML parses, but this file resolves scalars, because PyYAML follows YAML
1.1 and the Go library of kubectl differs: there `2e-4` is a number and `12:30` is text. Like
kubectl, it splits a file at its `---` lines first, so a broken document does not hide the others.
"""

import math
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from finetune_operator.api.paths import FieldPath, show_path, show_value
from finetune_operator.api.problems import Problem

_PLAIN = "plain"  # tag of a scalar without quotes and without a tag
_STRING = "tag:yaml.org,2002:str"
_SEPARATOR = re.compile(r"---\s*(#.*)?$")
_MOST_VALUES = 200_000  # anchors can expand a small file without bounds

_TRUE = frozenset(["y", "Y", "yes", "Yes", "YES", "true", "True", "TRUE", "on", "On", "ON"])
_FALSE = frozenset(["n", "N", "no", "No", "NO", "false", "False", "FALSE", "off", "Off", "OFF"])
_NULL = frozenset(["", "~", "null", "Null", "NULL"])
_NOT_JSON = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_LONGEST_NUMBER = 1000  # characters; Python refuses to parse, and to print, a few thousand digits
_INTEGER = re.compile(r"[-+]?(0[xX][0-9a-fA-F]+|0[bB][01]+|0[oO]?[0-7]+|0|[1-9][0-9]*)")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_INT64 = 2**63
_LARGEST_FLOAT = int(sys.float_info.max)


@dataclass
class YamlDocument:
    """A document of a file.

    Attributes:
        value: Content of the document, as JSON values.
        line: First line of the document, from 1.
        lines: Line of every field and list item.
        problems: Duplicate keys, and scalars that JSON does not support.
    """

    value: Any
    line: int
    lines: dict[FieldPath, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def read_yaml(text: str, file: str) -> Iterator[YamlDocument | Problem]:
    """Yield the documents of `text` in order, and a problem for each invalid document."""
    for first_line, chunk in _split(text):
        try:
            for node in yaml.compose_all(chunk, Loader=_Loader):
                document = _Builder(file, first_line).document(node)
                if document.value is not None or document.problems:
                    yield document
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            line = first_line + (mark.line if mark else 0)
            message = f"is not YAML: {_explain(error, first_line)}"
            yield Problem("", message, file=file, line=line)
        except yaml.YAMLError as error:
            reason = " ".join(str(error).split())
            yield Problem("", f"is not YAML: {reason}", file=file, line=first_line)
        except RecursionError:
            yield Problem("", "is nested too deeply to be read", file=file, line=first_line)


def _split(text: str) -> Iterator[tuple[int, str]]:
    """Split at separator lines; yield each part with its first line, from 1."""
    start, part = 1, list[str]()
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        if _SEPARATOR.match(line):
            yield start, "".join(part)
            start, part = number + 1, []
        else:
            part.append(line)
    yield start, "".join(part)


def _explain(error: yaml.MarkedYAMLError, first_line: int) -> str:
    if "\\t" in (error.problem or ""):
        return "a tab indents this line; use spaces"
    where = f" {error.context}" if error.context else ""
    if error.context_mark:
        where += f" that starts on line {first_line + error.context_mark.line}"
    return f"{error.problem or 'it cannot be parsed'}{where}"


class _Loader(yaml.SafeLoader):
    """Loader that leaves plain scalars unresolved."""

    yaml_implicit_resolvers = {}  # noqa: RUF012 - the name and kind that PyYAML reads

    def resolve(self, kind: type[Node], value: Any, implicit: Any) -> Any:
        if kind is ScalarNode and implicit[0]:
            return _PLAIN
        return super().resolve(kind, value, implicit)  # type: ignore[no-untyped-call]


class _Builder:
    """Converts the nodes of a document into values."""

    def __init__(self, file: str, first_line: int) -> None:
        self._file = file
        self._first_line = first_line
        self._lines: dict[FieldPath, int] = {}
        self._problems: list[Problem] = []
        self._values = 0
        self._open: set[int] = set()

    def document(self, node: Node) -> YamlDocument:
        value = self._value(node, ())
        return YamlDocument(value, self._line(node), self._lines, self._problems)

    def _line(self, node: Node) -> int:
        return self._first_line + int(node.start_mark.line)

    def _problem(self, path: FieldPath, message: str, node: Node) -> None:
        self._problems.append(
            Problem(show_path(path), message, file=self._file, line=self._line(node))
        )

    def _value(self, node: Node, path: FieldPath) -> Any:
        self._values += 1
        self._lines.setdefault(path, self._line(node))
        if self._values > _MOST_VALUES or id(node) in self._open:
            raise yaml.MarkedYAMLError(
                problem="its anchors expand without limit", problem_mark=node.start_mark
            )
        self._open.add(id(node))
        try:
            if isinstance(node, MappingNode):
                return self._mapping(node, path)
            if isinstance(node, SequenceNode):
                return [self._value(item, (*path, i)) for i, item in enumerate(node.value)]
            return self._scalar(node, path)
        finally:
            self._open.remove(id(node))

    def _mapping(self, node: MappingNode, path: FieldPath) -> dict[str, Any]:
        result: dict[str, Any] = {}
        given: dict[str, int] = {}
        merged: list[Node] = []
        for key_node, value_node in node.value:
            if key_node.tag == _PLAIN and key_node.value == "<<":
                merged += value_node.value if isinstance(value_node, SequenceNode) else [value_node]
                continue
            key = self._key(key_node, path)
            if key in given:
                first = f"(first on line {given[key]})"
                self._problem((*path, key), f"is given twice {first}; remove one", key_node)
                continue
            given[key] = self._lines[(*path, key)] = self._line(key_node)
            result[key] = self._value(value_node, (*path, key))
        for other in merged:
            if not isinstance(other, MappingNode):
                self._problem(path, "merges (<<) a value that is not a mapping", other)
                continue
            result = self._mapping(other, path) | result
        return result

    def _key(self, node: Node, path: FieldPath) -> str:
        """Return a key as text for JSON, like kubectl: `y:` is "true" and `1:` is "1"."""
        if not isinstance(node, ScalarNode):
            self._problem(path, "has a key that is a list or a mapping; use text as the key", node)
            return ""
        key = self._scalar(node, path)
        if isinstance(key, bool):
            return "true" if key else "false"
        return str(key) if key is not None else "null"

    def _scalar(self, node: Node, path: FieldPath) -> Any:
        text = str(node.value)
        if node.tag == _STRING:
            return _join_surrogates(text)
        if node.tag != _PLAIN:
            self._problem(path, f"has the tag {node.tag}, which is not supported; remove it", node)
            return text
        if _NOT_JSON.fullmatch(text):
            self._problem(path, f"{text} is not a number in JSON; write a number", node)
            return text
        value = plain_scalar(text)
        if isinstance(value, float) and math.isinf(value):
            shown = show_value(text).strip('"')
            self._problem(path, f"{shown} is too large a number; write a smaller one", node)
            return text
        return value


def plain_scalar(text: str) -> Any:
    """Return the value of a scalar without quotes, like kubectl: None, bool, int, float or text.

    A number that is too large for a float becomes infinite; kubectl would send it as text.
    """
    if text in _NULL:
        return None
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    digits = text.replace("_", "") if text[0] in "+-0123456789" else text
    if _INTEGER.fullmatch(digits):
        return _integer(digits)
    if _FLOAT.fullmatch(digits):
        number = float(digits)
        # JSON has one kind of number: 8.0 is sent as 8
        return int(number) if number.is_integer() and abs(number) < _INT64 else number
    return text


def _integer(digits: str) -> int | float:
    sign = -1 if digits[0] == "-" else 1
    plain = digits.lstrip("+-").lower()
    if len(plain) > _LONGEST_NUMBER:
        return sign * math.inf
    if len(plain) > 1 and plain[0] == "0" and plain[1] in "01234567":
        plain = "0o" + plain  # Go reads a leading zero as octal
    number = sign * int(plain, 0)
    return number if abs(number) <= _LARGEST_FLOAT else sign * math.inf


def _join_surrogates(text: str) -> str:
    r"""Join the halves of `\ud83d\ude00`, the JSON form of a character beyond U+FFFF."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
