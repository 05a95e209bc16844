"""How many cores this process may use: those it is bound to, and no more than its container has.

Called by `sequences`.
"""

import os
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


def usable_cores(root: Path = _ROOT) -> int:
    """Return the number of whole cores, at least 1.

    A launcher may bind a process to some (`mpirun --bind-to core`), and a limit of Kubernetes is a
    quota of the control group, which binds to none.
    """
    bound = len(os.sched_getaffinity(0))
    quota = _quota(root)
    return bound if quota is None else max(1, min(bound, int(quota)))


def _quota(root: Path) -> float | None:
    """Return the cores that cgroup v2 or v1 grants, None for as many as there are."""
    try:
        granted, period = (root / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            granted = (root / "cpu/cpu.cfs_quota_us").read_text().strip()
            period = (root / "cpu/cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    if granted == "max" or int(granted) <= 0:
        return None
    return int(granted) / int(period)
