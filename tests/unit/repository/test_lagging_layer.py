"""The file layer that other tests stand upon does what it says."""

import fcntl
import math
import mmap
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from support.checkpoint.lagging_layer import LaggingLayer, lagging_layer
from support.checkpoint.late_listings import Entry, Listings
from support.local.local_runs import wait_until

NAMES = [f"file-{number:02}" for number in range(20)]
FILE = 8  # the type of a regular file in a listing


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LaggingLayer]:
    """Two nodes' view of one folder; each test has a folder of its own in it."""
    folder = tmp_path_factory.mktemp("layer")
    with lagging_layer(folder, lag_seconds=0.05, num_nodes=2, lookup_lag=True) as layer:
        yield layer


@pytest.fixture
def folder(shared: LaggingLayer, request: pytest.FixtureRequest) -> Path:
    """An empty folder, as the first node sees it."""
    path = shared.root / str(request.node.name)
    path.mkdir()
    return path


@pytest.fixture(scope="module")
def for_ever(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LaggingLayer]:
    """The same where no listing shows a change while the tests run."""
    folder = tmp_path_factory.mktemp("for-ever")
    with lagging_layer(folder, lag_seconds=1e9, num_nodes=2, lookup_lag=True) as layer:
        yield layer


def test_each_change_is_shown_after_a_time_of_its_own() -> None:
    now = 0.0
    listings = Listings(100.0, 0, lambda: now)
    entries = {name.encode(): Entry(1, FILE) for name in NAMES}

    def show_until(wanted: set[bytes], there: dict[bytes, Entry]) -> list[int]:
        """Return how many are shown from moment to moment."""
        nonlocal now
        counts = []
        while (shown := listings.show(b"/x", there)).keys() != wanted:
            counts.append(len(shown))
            now += 1.0
        return counts

    came = {name: listings.change(b"/x", name, None, one) for name, one in entries.items()}
    assert list(came.values()) != sorted(came.values())
    counts = show_until(set(entries), entries)
    assert (counts[0], counts) == (0, sorted(counts))
    assert now == math.ceil(max(came.values())) <= 100

    for name, one in entries.items():
        listings.change(b"/x", name, one, None)
    counts = show_until(set(), {})
    assert (counts[0], counts) == (len(NAMES), sorted(counts, reverse=True))


def test_the_delays_follow_from_the_seed_and_the_names_alone() -> None:
    def delays(seed: int, names: list[str]) -> dict[str, float]:
        listings = Listings(100.0, seed, lambda: 0.0)
        return {name: listings.change(b"/x", name.encode(), None, None) for name in names}

    assert delays(1, NAMES) == delays(1, NAMES[::-1])
    assert delays(1, NAMES) != delays(2, NAMES)


def test_changes_of_one_name_keep_their_order() -> None:
    now = 0.0
    listings = Listings(100.0, 0, lambda: now)
    states = [Entry(number, FILE) if number % 2 else None for number in range(9)]
    times = [listings.change(b"/x", b"name", *change) for change in pairwise(states)]
    assert times == sorted(times)
    for now in times:  # the clock stands there
        num_shown = sum(time <= now for time in times)
        assert listings.show(b"/x", {}).get(b"name") == states[num_shown]


def test_a_listing_shows_late_what_came_and_went(for_ever: LaggingLayer, folder: Path) -> None:
    (for_ever.backing / "old").write_text("there before")
    (for_ever.root / "new").write_text("new")
    (for_ever.root / "sub").mkdir()
    assert os.listdir(for_ever.root) == ["old"]
    assert (for_ever.root / "new").read_text() == "new"  # by its name, at once
    assert (for_ever.root / "sub").is_dir()
    (for_ever.root / "old").unlink()
    (for_ever.root / "new").unlink()
    assert os.listdir(for_ever.root) == ["old"]
    assert not (for_ever.root / "old").exists()
    assert os.listdir(for_ever.backing) == ["sub"]

    for name in NAMES:
        (folder / name).write_text(name)
    wait_until(lambda: sorted(os.listdir(folder)) == NAMES)
    for name in NAMES:
        (folder / name).unlink()
    wait_until(lambda: not os.listdir(folder))


def test_another_node_learns_late_of_a_new_name(
    for_ever: LaggingLayer, shared: LaggingLayer, folder: Path
) -> None:
    ours, theirs = (node / "found" for node in for_ever.nodes)
    ours.mkdir()
    assert not theirs.exists()
    theirs.mkdir()  # no error: it does not hear that it is there
    (ours / "file").write_text("ours")
    (theirs / "file").write_text("theirs")
    assert (ours / "file").read_text() == "theirs"

    known = shared.nodes[1] / folder.name / "file"
    (folder / "file").write_text("ours")
    wait_until(known.exists)
    assert known.read_text() == "ours"


def lock(path: Path, how: Callable[[int, int], None]) -> None:
    with path.open("r+") as file:
        how(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize(
    ("operation", "ask"),
    [
        pytest.param("rename", lambda at: (at / "file").rename(at / "new"), id="rename a file"),
        pytest.param("rename", lambda at: (at / "file").replace(at / "other"), id="replace a file"),
        pytest.param("rename", lambda at: (at / "sub").rename(at / "new"), id="rename a folder"),
        pytest.param("link", lambda at: os.link(at / "file", at / "new"), id="link"),
        pytest.param("symlink", lambda at: os.symlink("file", at / "new"), id="symlink"),
        pytest.param("mknod", lambda at: os.mkfifo(at / "new"), id="fifo"),
        pytest.param("lock", lambda at: lock(at / "file", fcntl.flock), id="flock"),
        pytest.param("lock", lambda at: lock(at / "file", fcntl.lockf), id="lockf"),
        pytest.param("exclusive create", lambda at: (at / "new").open("x"), id="open x"),
        pytest.param("exclusive create", lambda at: tempfile.mkstemp(dir=at), id="mkstemp"),
    ],
)
def test_what_the_layer_lacks_fails_and_is_noted(
    shared: LaggingLayer, folder: Path, operation: str, ask: Callable[[Path], object]
) -> None:
    (folder / "file").write_text("kept")
    (folder / "other").write_text("other")
    (folder / "sub").mkdir()
    before = len(shared.refusals())
    with pytest.raises(OSError, match=r"not supported|No locks"):
        ask(folder)
    (refusal,) = shared.refusals()[before:]
    assert (refusal.operation, refusal.pid) == (operation, os.getpid())
    assert refusal.path.startswith(f"{folder.name}/")
    own = Path("/proc/self/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    assert refusal.command == own
    behind = shared.backing / folder.name
    assert sorted(os.listdir(behind)) == ["file", "other", "sub"]
    assert (folder / "file").read_text() == "kept"


def test_files_are_written_read_and_changed_as_on_a_disk(
    shared: LaggingLayer, folder: Path
) -> None:
    deep = folder.joinpath(*"abcdefghij")
    deep.mkdir(parents=True)
    path = deep / "file"
    data = os.urandom(3 << 20)
    path.write_bytes(data)
    assert path.read_bytes() == data
    behind = shared.backing / path.relative_to(shared.root)
    with path.open("r+b") as file:
        file.truncate(4096)
        file.seek(0, os.SEEK_END)
        file.write(b"more")
        file.flush()
        os.fsync(file.fileno())
        assert behind.read_bytes() == data[:4096] + b"more"
        with mmap.mmap(file.fileno(), 0) as mapped:
            mapped[:4] = b"even"
            mapped.flush()
    with path.open("ab") as file:
        file.write(b"!")
    whole = b"even" + data[4:4096] + b"more!"
    assert path.read_bytes() == behind.read_bytes() == whole
    assert abs(path.stat().st_mtime - time.time()) < 60
    os.utime(path, (1, 2))
    path.chmod(0o600)
    status = path.stat()
    assert (status.st_atime, status.st_mtime, status.st_mode & 0o777) == (1, 2, 0o600)
    with path.open("rb") as file:
        path.unlink()
        assert os.fstat(file.fileno()).st_size == len(whole)
        assert file.read() == whole
    opened = os.open(deep, os.O_RDONLY)
    deep.rmdir()
    assert os.fstat(opened).st_mode == folder.stat().st_mode
    os.close(opened)
    with pytest.raises(OSError, match="not empty"):
        folder.rmdir()


WRITER = r"""
import os, sys, threading
folder, name = sys.argv[1:]
def write(own):
    for count in range(10**6):
        path = os.path.join(folder, f"{own}-{count}")
        with open(path, "w") as file:
            file.write(path)
            file.flush()
            os.fsync(file.fileno())
        os.listdir(folder)
        os.write(1, f"{path}\n".encode())  # whole, whichever thread
for thread in range(2):
    threading.Thread(target=write, args=(f"{name}-{thread}",)).start()
"""


def test_writers_that_are_killed_leave_the_layer_to_the_others(folder: Path) -> None:
    command = [sys.executable, "-c", WRITER, str(folder)]
    pipe = subprocess.PIPE
    writers = [subprocess.Popen([*command, str(one)], stdout=pipe, text=True) for one in range(8)]
    written: list[str] = []
    for count, writer in enumerate(writers):
        with writer:
            assert writer.stdout is not None
            written += [writer.stdout.readline().rstrip() for _ in range(5 * count)]
            writer.kill()
            written += writer.stdout.read().splitlines()
    assert len(written) > 100
    assert [Path(path).read_text() for path in written] == written


def test_a_layer_is_gone_after_its_test_even_with_a_file_open(tmp_path: Path) -> None:
    with lagging_layer(tmp_path) as layer:
        root = layer.root
        file = (root / "file").open("wb", buffering=0)
        assert os.path.ismount(root)
    assert not os.path.ismount(root)
    with pytest.raises(OSError, match=r"connect|aborted"):
        file.write(b"late")
    with pytest.raises(OSError, match=r"connect|aborted"):
        file.close()


def test_a_layer_like_blobfuse_copies_a_file_over_another_and_renames_no_folder(
    tmp_path: Path,
) -> None:
    with lagging_layer(tmp_path, lag_seconds=0.0, blobfuse=True) as layer:
        at = layer.root
        (at / "sub").mkdir()
        with (at / "file").open("x") as file:
            file.write("new")
        (at / "file").rename(at / "sub" / "moved")
        (at / "other").write_text("old and longer")
        (at / "sub" / "moved").replace(at / "other")
        assert (at / "other").read_text() == "new"
        assert sorted(os.listdir(layer.backing)) == ["other", "sub"]
        assert os.listdir(at / "sub") == []
        with pytest.raises(OSError, match="not supported"):
            (at / "sub").rename(at / "new")
        assert [(one.operation, one.path) for one in layer.refusals()] == [("rename", "sub")]
