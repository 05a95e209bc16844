"""Count the kills of the kernel's out-of-memory killer in this process's control group.

The supervisor compares the counts before and after a rank died of SIGKILL, because no other
information distinguishes an out-of-memory kill from another kill.
"""

from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_OWN_GROUP = Path("/proc/self/cgroup")


def count_oom_kills(root: Path = _ROOT, own_group: Path = _OWN_GROUP) -> int:
    """Return the `oom_kill` counter of cgroup v2 or v1, or 0 without one."""
    return max((_counter(path) for path in _files(root, own_group)), default=0)


def _files(root: Path, own_group: Path) -> list[Path]:
    """Return the files that may hold the counter.

    Inside a container the group's path may be relative to the host; the container's group is then
    the root.
    """
    files = [root / "memory.events", root / "memory" / "memory.oom_control"]
    if not own_group.exists():
        return files
    for line in own_group.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        relative = path.lstrip("/")
        if not controllers:
            files.append(root / relative / "memory.events")
        elif "memory" in controllers.split(","):
            files.append(root / "memory" / relative / "memory.oom_control")
    return files


def _counter(path: Path) -> int:
    if not path.is_file():
        return 0
    fields = dict(line.split(maxsplit=1) for line in path.read_text().splitlines() if " " in line)
    return int(fields.get("oom_kill", 0))
