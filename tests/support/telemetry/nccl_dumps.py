"""Answers of torch's flight recorder of NCCL, written by hand after torch 2.13's sources.

No GPU has made them: FlightRecorderDetail.hpp says which fields there are, and of which types.
"""

import pickle
from collections.abc import Mapping, Sequence
from typing import Any

Entry = dict[str, Any]

DEFAULT = ("0", "default_pg")
RANKS = 4


def entry(
    record_id: int, op: str, given: Sequence[int], gotten: Sequence[int], **changes: Any
) -> Entry:
    """Return an entry of one tensor in fp32, which is over, in the default group."""
    return {
        "record_id": record_id,
        "pg_id": 0,
        "process_group": DEFAULT,
        "thread_name": "python",
        "thread_id": "140",
        "collective_seq_id": record_id + 1,
        "p2p_seq_id": 0,
        "op_id": record_id + 1,
        "profiling_name": f"nccl:{op}",
        "time_created_ns": 1_700_000_000_000_000_000 + record_id,
        "input_sizes": [list(given)],
        "input_dtypes": ["Float"],
        "output_sizes": [list(gotten)],
        "output_dtypes": ["Float"],
        "state": "completed",
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": 1_700_000_000_000_000_000,
        "retired": True,
        "timeout_ms": 1_800_000,
        "is_p2p": False,
        **changes,
    }


def dump(entries: Sequence[Entry], *, version: str = "2.10", **changes: Any) -> bytes:
    """Return the pickle of a ring with these entries."""
    newest = max((one.get("collective_seq_id", 0) for one in entries), default=0)
    return pickle.dumps(
        {
            "version": version,
            "pg_config": pg_config({DEFAULT: RANKS}),
            "comm_lib_version": "2.27.5",
            "pg_status": {
                "0": {
                    "last_enqueued_collective": newest,
                    "last_started_collective": newest,
                    "last_completed_collective": newest,
                }
            },
            "entries": list(entries),
            **changes,
        }
    )


def pg_config(groups: Mapping[tuple[str, str], int]) -> dict[str, dict[str, str]]:
    """Return what the recorder says of groups: names, descriptions, and so many ranks."""
    return {
        name: {"name": name, "desc": desc, "ranks": str(list(range(num_ranks)))}
        for (name, desc), num_ranks in groups.items()
    }
