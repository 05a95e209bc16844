"""Explain keys of other training tools in a manifest, from the table in `other_tools_table.py`.

`structural.py` prints the explanation instead of a guess. Case, underscores and hyphens of a key
are ignored, so `reportTo` is `report_to`.
"""

from collections.abc import Mapping
from functools import cache

from finetune_operator.api.other_tools_table import TABLE, Entry
from finetune_operator.api.paths import FieldPath

_DATASETS = ("dataset", "also", "testdatasets")  # blocks with the keys of an entry of `datasets`


def entry_of(path: FieldPath) -> Entry | None:
    """Return the entry of the key at the end of a path; None if the key is not in the table."""
    names = [_plain(part) for part in path if isinstance(part, str)]
    *_, parent, key = "", "", *names
    if parent in _DATASETS:
        parent = "datasets"
    return _index().get(f"{parent}.{key}") or _index().get(key)


def explanation(entry: Entry) -> str:
    """Return the entry as the end of a sentence that begins with the path of the key."""
    if not entry.fields:
        return f"has no counterpart{' yet' if entry.is_planned else ''}: {entry.note}"
    return f"is not a known field; {replacement(entry)}"


def replacement(entry: Entry) -> str:
    """Return the fields of an entry as an instruction; empty if the entry has none."""
    if not entry.fields:
        return ""
    return f"write {' and '.join(entry.fields)}" + (f" ({entry.note})" if entry.note else "")


@cache
def _index() -> Mapping[str, Entry]:
    return {_plain(key): entry for entry in TABLE for key in entry.keys}


def _plain(key: str) -> str:
    return key.lower().replace("_", "").replace("-", "")
