"""A file layer as object stores and network shares have it: late listings, no rename, no locks.

Real to every process: a FUSE file system, served by `lagging_server` in a process of its own.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.checkpoint import lagging_server


@dataclass(frozen=True)
class Refusal:
    """What a process asked for and this layer cannot do.

    Attributes:
        operation: "rename", "exclusive create", "lock", "link", "symlink" or "mknod".
        path: The file or folder, from the layer's root.
        pid: The process.
        command: Its command line; empty where it was killed meanwhile.
    """

    operation: str
    path: str
    pid: int
    command: str


@dataclass(frozen=True)
class LaggingLayer:
    """A layer that is mounted.

    Attributes:
        nodes: Its root as each node (a mount with caches of its own) sees it.
        backing: The plain folder behind: what is really there, at once.
    """

    nodes: tuple[Path, ...]
    backing: Path
    log: Path

    @property
    def root(self) -> Path:
        """The root as the first node sees it."""
        return self.nodes[0]

    def refusals(self) -> list[Refusal]:
        """Return what was asked for in vain so far, in order."""
        return [Refusal(**json.loads(line)) for line in self.log.read_text().splitlines()]


@contextmanager
def lagging_layer(
    folder: Path,
    *,
    lag_seconds: float = 0.05,
    seed: int = 0,
    num_nodes: int = 1,
    lookup_lag: bool = False,
    blobfuse: bool = False,
) -> Iterator[LaggingLayer]:
    """Mount a layer below a folder; skip the test, with the reason, where none can be mounted.

    Whatever is asked of one name is seen at once by all. A listing shows that a name came or went
    only after a time of its own, of at most the lag, whoever lists. Folders cannot be renamed, nor
    files, linked or locked; an exclusive create fails also where nobody else made the file (where
    it is there the kernel says so itself, and nothing is noted).

    Args:
        folder: Where the mounts, the folder behind and the log of refusals are made.
        lag_seconds: The most that a listing is late.
        seed: For how late each entry is.
        num_nodes: How many mounts there are of the one folder.
        lookup_lag: Also by its name, a new file is unknown to other nodes than its own until
            listings show it.
        blobfuse: Files are renamed, by copying them, and exclusive creates do not fail.
    """
    if lookup_lag and num_nodes < 2:
        raise ValueError("lookup_lag has no effect with one node")
    backing, log, errors = folder / "backing", folder / "refused.jsonl", folder / "errors"
    nodes = tuple(folder / f"node-{number}" for number in range(num_nodes))
    for path in (backing, *nodes):
        path.mkdir(parents=True)
    command = [sys.executable, lagging_server.__file__, str(backing), str(log)]
    command += [*map(str, nodes), f"--lag-seconds={lag_seconds}", f"--seed={seed}"]
    command += ["--lookup-lag"] if lookup_lag else []
    command += ["--blobfuse"] if blobfuse else []
    pipe = subprocess.PIPE
    with (
        errors.open("wb") as stderr,
        subprocess.Popen(
            command,
            stdin=pipe,
            stdout=pipe,
            stderr=stderr,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        ) as server,
    ):
        assert server.stdout is not None
        try:
            if not server.stdout.readline():
                server.wait()
                pytest.skip(
                    f"no FUSE file system can be mounted here: {errors.read_text().strip()}"
                )
            yield LaggingLayer(nodes, backing, log)
        finally:
            for node in nodes:  # whoever still has a file open gets errors from now on
                lagging_server.unmount(node)
            server.kill()
    if said := errors.read_text():
        pytest.fail(f"the layer failed:\n{said}")
