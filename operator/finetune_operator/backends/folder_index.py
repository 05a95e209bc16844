"""Find folders of several jobs that are equal or contain each other.

Called by the operator's kernel for the jobs of a cluster, and by `ftctl validate` for the manifests
of one call. Pure.
"""

from collections.abc import Hashable, Iterator, Sequence
from typing import Generic, TypeVar

from finetune_operator.backends.base import Written

Who = TypeVar("Who", bound=Hashable)

_Place = tuple[str, ...]


class FolderIndex(Generic[Who]):
    """Writers by folder; a lookup takes time for the folder's depth and for each result."""

    def __init__(self) -> None:
        self._of: dict[Who, tuple[Written, ...]] = {}
        self._at: dict[_Place, dict[Who, Written]] = {}
        self._below: dict[_Place, dict[Who, Written]] = {}

    @property
    def is_empty(self) -> bool:
        """Whether the index is empty."""
        return not (self._of or self._at or self._below)

    def put(self, who: Who, folders: Sequence[Written]) -> None:
        """Store the folders of an owner, replacing its previous ones."""
        noted = tuple(folders)
        if self._of.get(who, ()) == noted:
            return
        self.remove(who)
        if noted:
            self._of[who] = noted
        for one in noted:
            self._at.setdefault(one.place, {})[who] = one
            for end in range(1, len(one.place)):
                self._below.setdefault(one.place[:end], {})[who] = one

    def remove(self, who: Who) -> None:
        """Remove an owner."""
        for one in self._of.pop(who, ()):
            for end in range(1, len(one.place)):
                _take_out(self._below, one.place[:end], who)
            _take_out(self._at, one.place, who)

    def touching(self, folder: Written, *, besides: Who) -> Iterator[tuple[Who, Written]]:
        """Yield the other writers of the folder, of its parents and of its children."""
        places = [self._at.get(folder.place[:end]) for end in range(1, len(folder.place) + 1)]
        for found in (*places, self._below.get(folder.place)):
            for who, one in (found or {}).items():
                if who != besides:
                    yield who, one


def sentence(mine: Written, theirs: Written, whose: str) -> str:
    """Return a sentence about an overlap; the caller puts the field in front of it.

    Args:
        mine: The folder that the sentence is about.
        theirs: The overlapping folder.
        whose: Owner of that folder.
    """
    what = f"{theirs.field} of {whose}"
    if mine.place == theirs.place:
        same = "also" if mine.uri == theirs.uri else f"the same folder as {theirs.uri},"
        return f"{mine.uri} is {same} {what}"
    relation = "holds" if len(mine.place) < len(theirs.place) else "is inside"
    return f"{mine.uri} {relation} {theirs.uri}, {what}"


def _take_out(table: dict[_Place, dict[Who, Written]], place: _Place, who: Who) -> None:
    if place in table:
        table[place].pop(who, None)
        if not table[place]:
            del table[place]
