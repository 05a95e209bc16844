"""Count the cores that this process may use: its affinity, limited by the container's quota.

Called by `sequences`.
"""

import os
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


def usable_cores(root: Path = _ROOT) -> int:
    """Return the number of whole cores, at least 1.

    A launcher may bind a process to a few cores (`mpirun --bind-to core`). A Kubernetes limit is a
    quota of the control group, which does not appear in the affinity.
    """
    bound = len(os.sched_getaffinity(0))
    quota = _quota(root)
    return bound if quota is None else max(1, min(bound, int(quota)))


def _quota(root: Path) -> float | None:
    """Return the cores that cgroup v2 or v1 grants; None if unlimited."""
    try:
        granted, period = (root / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            granted = (root / "cpu/cpu.cfs_quota_us").read_text().strip()
            period = (root / "cpu/cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    is_limited = granted != "max" and int(granted) > 0
    return int(granted) / int(period) if is_limited else None
