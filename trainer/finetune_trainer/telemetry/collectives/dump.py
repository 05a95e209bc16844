"""Parse the dump of torch's flight recorder for NCCL, version 2.x of its format.

FlightRecorder.hpp and FlightRecorderDetail.hpp of torch 2.13 define the format: a pickle of plain
values. A minor version adds fields, a major version changes existing ones.
"""

import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod
from typing import Any

_MAJOR = "2"
_WIDTHS = {  # bytes per element, by c10::ScalarType name
    "Bool": 1, "Byte": 1, "Char": 1, "Float8_e4m3fn": 1, "Float8_e4m3fnuz": 1, "Float8_e5m2": 1,
    "Float8_e5m2fnuz": 1, "Float8_e8m0fnu": 1,
    "BFloat16": 2, "Half": 2, "Short": 2, "UInt16": 2,
    "Float": 4, "Int": 4, "UInt32": 4,
    "Double": 8, "Long": 8, "UInt64": 8, "ComplexFloat": 8, "ComplexDouble": 16,
}  # fmt: skip
_BARRIER = "barrier"
_OPS = (  # our name and a pattern in the recorder's name, in this order
    (_BARRIER, "barrier"),
    ("reduce_scatter", "reduce_scatter"),
    ("all_gather", "all_?gather"),
    ("all_reduce", "all_?reduce"),
    ("all_to_all", "all_?to_?all"),
    ("broadcast", "broadcast"),
    ("reduce", "reduce"),
    ("gather", "gather"),
    ("scatter", "scatter"),
)


class UnknownDumpError(Exception):
    """Raised for a dump that this module cannot parse."""


@dataclass(frozen=True)
class Recorded:
    """A collective, possibly of several tensors.

    Attributes:
        last_id: Highest id of its entries; the recorder counts from 0.
        group_id: As in `Dump.progress`.
        group: Description of its group.
        num_ranks: Size of the group; 0 if the recorder did not record it.
        op: A value of `metrics.COLLECTIVE_OPS`; None for a barrier or an unknown operation.
        num_bytes: Size as `sample` counts it; None if types or ranks are not known.
        seconds: From start to end; None without torch's timing.
        is_over: Whether the recorder has its final state.
    """

    last_id: int
    group_id: str
    group: str
    num_ranks: int
    op: str | None
    num_bytes: int | None
    seconds: float | None
    is_over: bool


@dataclass(frozen=True)
class Dump:
    """Contents of one dump.

    Attributes:
        ids: Ids of the oldest and the newest entry of the ring; None if it is empty or was not
            requested.
        collectives: Collectives in the ring, oldest first.
        progress: Newest enqueued and completed sequence number of each group, by its id.
    """

    ids: tuple[int, int] | None
    collectives: Sequence[Recorded]
    progress: Mapping[str, tuple[int, int]]


def read_dump(pickled: bytes) -> Dump:
    """Parse one dump of the recorder.

    Raises:
        UnknownDumpError: The dump has another version, or does not match its version.
    """
    try:
        found = pickle.loads(pickled)
        version = str(found["version"])
        if version.partition(".")[0] != _MAJOR:
            raise UnknownDumpError(f"version {version} is not supported; {_MAJOR}.x is")
        groups = found["pg_config"].items()
        sizes = {str(name): len(re.findall(r"\d+", group["ranks"])) for name, group in groups}
        progress = {
            str(group): (
                int(one["last_enqueued_collective"]),
                int(one["last_completed_collective"]),
            )
            for group, one in found["pg_status"].items()
        }
        entries = found.get("entries", ())
        ids = [int(entry["record_id"]) for entry in entries]
        return Dump(
            (min(ids), max(ids)) if ids else None, tuple(_collectives(entries, sizes)), progress
        )
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, EOFError) as error:
        raise UnknownDumpError(f"{type(error).__name__}: {error}") from error
    except (pickle.UnpicklingError, ImportError) as error:
        raise UnknownDumpError(str(error)) from error


def _collectives(
    entries: Sequence[Mapping[str, Any]], num_ranks: Mapping[str, int]
) -> Iterator[Recorded]:
    """Merge the entries of one launch, which are coalesced operations, into one collective."""
    launches = groupby(
        (entry for entry in entries if not entry["is_p2p"]),
        key=lambda entry: (entry["pg_id"], entry["process_group"][0], entry["collective_seq_id"]),
    )
    for (group_id, name, _), launch in launches:
        ranks = num_ranks.get(name, 0)
        parts = list(launch)
        sized = [part for part in parts if part["input_sizes"] or part["output_sizes"]] or parts
        op = _op(sized[0]["profiling_name"])
        sizes = [_num_bytes(part, op, ranks) for part in sized]
        times = [part["duration_ms"] for part in parts if part.get("duration_ms") is not None]
        yield Recorded(
            last_id=max(part["record_id"] for part in parts),
            group_id=str(group_id),
            group=parts[0]["process_group"][1],
            num_ranks=ranks,
            op=op,
            num_bytes=sum(size for size in sizes if size) if ranks and None not in sizes else None,
            seconds=max(times) / 1000 if times else None,
            is_over=any(part["retired"] for part in parts),  # if coalesced, only the last is
        )


def _op(recorded: str) -> str | None:
    name = recorded.partition(":")[2].lower()
    for op, pattern in _OPS:
        if re.search(pattern, name):
            return None if op == _BARRIER else op
    return None


def _num_bytes(entry: Mapping[str, Any], op: str | None, num_ranks: int) -> int | None:
    """Return the size of an entry; the recorder swaps inputs and outputs of a scatter."""
    if op == "reduce_scatter":
        shard = _sum(entry["output_sizes"], entry["output_dtypes"])
        return None if shard is None else shard * num_ranks
    given = _sum(entry["input_sizes"], entry["input_dtypes"])
    if op in ("all_gather", "gather", "scatter"):
        return None if given is None else given * num_ranks
    return given


def _sum(sizes: Sequence[Sequence[int]], types: Sequence[str]) -> int | None:
    if any(one not in _WIDTHS for one in types):
        return None
    return sum(prod(size) * _WIDTHS[one] for size, one in zip(sizes, types, strict=True))
