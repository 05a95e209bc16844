"""Serves one folder as file systems whose listings lag: the FUSE protocol, spoken to /dev/fuse.

A process of its own, which `lagging_layer` starts: a test that waits for a page of a mapped file
holds the interpreter, and could not serve itself. It needs Linux and root, and no library. The
structures are those of `linux/fuse.h`; whatever is not named here is answered by ENOSYS, for which
the kernel does without (fsync, flush, access) or says so to the caller.
"""

import argparse
import ctypes
import errno
import json
import os
import resource
import shutil
import stat
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from support.checkpoint.late_listings import Entry, Listings

LOOKUP, FORGET, GETATTR, SETATTR, SYMLINK, MKNOD, MKDIR, UNLINK = 1, 2, 3, 4, 6, 8, 9, 10
RMDIR, RENAME, LINK, OPEN, READ, WRITE, STATFS, RELEASE = 11, 12, 13, 14, 15, 16, 17, 18
INIT, OPENDIR, READDIR, RELEASEDIR = 26, 27, 28, 29
GETLK, SETLK, SETLKW, CREATE, INTERRUPT, BATCH_FORGET, RENAME2 = 31, 32, 33, 35, 36, 42, 45
UNANSWERED = {FORGET, INTERRUPT, BATCH_FORGET}

# What cannot be done here: its name, the error, and where in the request the file's name begins.
REFUSED: dict[int, tuple[str, int, int | None]] = {
    RENAME: ("rename", errno.EOPNOTSUPP, 8),
    RENAME2: ("rename", errno.EOPNOTSUPP, 16),
    LINK: ("link", errno.EOPNOTSUPP, 8),
    SYMLINK: ("symlink", errno.EOPNOTSUPP, 0),
    MKNOD: ("mknod", errno.EOPNOTSUPP, 16),
    GETLK: ("lock", errno.ENOLCK, None),
    SETLK: ("lock", errno.ENOLCK, None),
    SETLKW: ("lock", errno.ENOLCK, None),
}

ASYNC_READ, POSIX_LOCKS, ATOMIC_O_TRUNC, BIG_WRITES = 1 << 0, 1 << 1, 1 << 3, 1 << 5
FLOCK_LOCKS, AUTO_INVAL_DATA, PARALLEL_DIROPS, MAX_PAGES = 1 << 10, 1 << 12, 1 << 18, 1 << 22
# Both kinds of locks are asked for, as the kernel keeps them itself for who does not.
WANTED = ASYNC_READ | POSIX_LOCKS | ATOMIC_O_TRUNC | BIG_WRITES
WANTED |= FLOCK_LOCKS | AUTO_INVAL_DATA | PARALLEL_DIROPS | MAX_PAGES
PAGES = 256
MAX_WRITE = PAGES * 4096
MAJOR, MINOR = 7, 36

SET_MODE, SET_UID, SET_GID, SET_SIZE, SET_ATIME, SET_MTIME = 1, 2, 4, 8, 16, 32
SET_ATIME_NOW, SET_MTIME_NOW = 128, 256

IN_HEADER = struct.Struct("=IIQQIIIHH")
OUT_HEADER = struct.Struct("=IiQ")
INIT_IN = struct.Struct("=IIII")
INIT_OUT = struct.Struct("=IIIIHHIIHHI7I")
ATTR = struct.Struct("=6Q10I")
ENTRY_OUT = struct.Struct("=QQQQII")  # ATTR follows
ATTR_OUT = struct.Struct("=QII")  # ATTR follows
SETATTR_IN = struct.Struct("=IIQQQQQQIIIIIIII")
MKDIR_IN = struct.Struct("=II")
OPEN_IN = struct.Struct("=II")
CREATE_IN = struct.Struct("=IIII")
OPEN_OUT = struct.Struct("=QII")
RENAME_IN = struct.Struct("=Q")  # the folder it goes to; both names follow
RELEASE_IN = struct.Struct("=QII")  # a lock's owner follows
IO_IN = struct.Struct("=QQIIQII")
WRITE_OUT = struct.Struct("=II")
DIRENT = struct.Struct("=QQII")
STATFS_OUT = struct.Struct("=5Q4I6I")

ROOT = 1
ALL_PERMISSIONS = 0o7777
MNT_DETACH = 2
MS_NOSUID_NODEV = 6


@dataclass(frozen=True)
class Request:
    """What a node's kernel asks; `node` is the mount that it came by."""

    node: int
    opcode: int
    inode: int
    uid: int
    gid: int
    pid: int
    body: memoryview

    def name(self, offset: int = 0) -> bytes:
        """Return the name that begins at an offset of the body."""
        return bytes(self.body[offset:]).split(b"\0", 1)[0]


class Layer:
    """A folder's files under inode numbers of our own, which are never used again.

    Args:
        backing: The folder.
        listings: What its listings show.
        lookup_lag: Whether a new name, too, is unknown to the other nodes until listings show it.
        blobfuse: Whether a file is renamed, by copying it, and exclusive creates do not fail.
        refused: Where a line of JSON is written for all that was asked for and cannot be done.
    """

    def __init__(
        self,
        backing: bytes,
        listings: Listings,
        *,
        lookup_lag: bool,
        blobfuse: bool,
        refused: int,
    ):
        self._backing = backing
        self._listings = listings
        self._lookup_lag = lookup_lag
        self._refused = refused
        self._paths = {ROOT: backing}
        self._inodes: dict[bytes, tuple[int, int]] = {backing: (ROOT, os.stat(backing).st_ino)}
        self._next_inode = ROOT + 1
        self._files: dict[int, list[int]] = {}  # what is open, by inode
        self._lists: dict[int, list[tuple[bytes, Entry]]] = {}  # by what is open, being read
        self._known: dict[bytes, tuple[set[int], float]] = {}  # to these nodes alone, until when
        self._answers: dict[int, Callable[[Request], bytes]] = {
            INIT: self._init,
            LOOKUP: self._lookup,
            GETATTR: self._getattr,
            SETATTR: self._setattr,
            MKDIR: self._mkdir,
            UNLINK: self._unlink,
            RMDIR: self._rmdir,
            CREATE: self._create,
            OPEN: self._open,
            READ: self._read,
            WRITE: self._write,
            RELEASE: self._release,
            OPENDIR: self._opendir,
            READDIR: self._readdir,
            RELEASEDIR: self._releasedir,
            STATFS: self._statfs,
        }
        self._blobfuse = blobfuse
        if blobfuse:
            self._answers[RENAME] = self._rename

    def answer(self, request: Request) -> bytes:
        """Do what is asked and return the answer's body; whatever fails is an OSError."""
        if request.opcode not in self._answers and request.opcode in REFUSED:
            operation, error, offset = REFUSED[request.opcode]
            name = None if offset is None else request.name(offset)
            raise self._refuse(request, operation, error, name)
        if request.opcode not in self._answers:
            raise OSError(errno.ENOSYS, "not served")
        return self._answers[request.opcode](request)

    def _refuse(self, request: Request, operation: str, error: int, name: bytes | None) -> OSError:
        """Note who asked for what cannot be done; return the error."""
        path = self._path(request.inode) if name is None else self._child(request, name)
        try:  # the kernel names the thread
            status = Path(f"/proc/{request.pid}/status").read_text()
            pid = int(status.split("\nTgid:")[1].split()[0])
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
        except OSError:  # killed meanwhile
            pid, command = request.pid, b""
        line = {
            "operation": operation,
            "path": os.fsdecode(os.path.relpath(path, self._backing)),
            "pid": pid,
            "command": os.fsdecode(command).strip(),
        }
        os.write(self._refused, json.dumps(line).encode() + b"\n")
        return OSError(error, "refused")

    # Names and inodes

    def _path(self, inode: int) -> bytes:
        if inode not in self._paths:  # the kernel looks its name up again
            raise OSError(errno.ESTALE, "gone")
        return self._paths[inode]

    def _child(self, request: Request, name: bytes) -> bytes:
        return self._path(request.inode) + b"/" + name

    def _attr(self, status: os.stat_result) -> bytes:
        times = (status.st_atime_ns, status.st_mtime_ns, status.st_ctime_ns)
        seconds, rests = zip(*(divmod(ns, 10**9) for ns in times), strict=True)
        counts = (status.st_mode, status.st_nlink, status.st_uid, status.st_gid)
        head = (status.st_ino, status.st_size, status.st_blocks)
        return ATTR.pack(*head, *seconds, *rests, *counts, 0, status.st_blksize, 0)

    def _entry(self, path: bytes) -> bytes:
        """Return the inode behind a name; nothing of it may be cached."""
        status = os.lstat(path)
        inode, ino = self._inodes.get(path, (0, 0))
        if ino != status.st_ino:  # new, or made anew behind our back
            inode = self._next_inode
            self._next_inode += 1
            self._inodes[path] = inode, status.st_ino
            self._paths[inode] = path
        return ENTRY_OUT.pack(inode, 0, 0, 0, 0, 0) + self._attr(status)

    def _lookup(self, request: Request) -> bytes:
        path = self._child(request, request.name())
        nodes, until = self._known.get(path, ({request.node}, 0.0))
        if request.node not in nodes and time.monotonic() < until:
            raise OSError(errno.ENOENT, "not known yet")
        return self._entry(path)

    def _came(self, request: Request, path: bytes) -> None:
        """A file or folder is new: give it to who made it, and show it late."""
        if (request.uid, request.gid) != (0, 0):
            os.chown(path, request.uid, request.gid)
        folder, name = path.rsplit(b"/", 1)
        status = os.lstat(path)
        entry = Entry(status.st_ino, status.st_mode >> 12)
        shown_at = self._listings.change(folder, name, None, entry)
        if self._lookup_lag:
            self._known[path] = set(), shown_at

    def _made(self, request: Request, path: bytes) -> bytes:
        """Return what a node made, or thinks so, and knows from now on."""
        if path in self._known:
            self._known[path][0].add(request.node)
        return self._entry(path)

    def _remove(self, path: bytes, remove: Callable[[bytes], None]) -> bytes:
        status = os.lstat(path)
        remove(path)
        inode, _ = self._inodes.pop(path, (0, 0))
        self._paths.pop(inode, None)
        self._known.pop(path, None)
        self._listings.forget(path)
        folder, name = path.rsplit(b"/", 1)
        self._listings.change(folder, name, Entry(status.st_ino, status.st_mode >> 12), None)
        return b""

    def _unlink(self, request: Request) -> bytes:
        return self._remove(self._child(request, request.name()), os.unlink)

    def _rmdir(self, request: Request) -> bytes:
        return self._remove(self._child(request, request.name()), os.rmdir)

    def _rename(self, request: Request) -> bytes:
        (folder,) = RENAME_IN.unpack_from(request.body)
        old = request.name(RENAME_IN.size)
        new = request.name(RENAME_IN.size + len(old) + 1)
        source, target = self._child(request, old), self._path(folder) + b"/" + new
        if os.path.isdir(source):
            raise self._refuse(request, "rename", errno.EOPNOTSUPP, old)
        is_new = not os.path.lexists(target)
        shutil.copy(os.fsdecode(source), os.fsdecode(target))
        if is_new:
            self._came(request, target)
        return self._remove(source, os.unlink)

    def _mkdir(self, request: Request) -> bytes:
        mode, _ = MKDIR_IN.unpack_from(request.body)
        path = self._child(request, request.name(MKDIR_IN.size))
        if not os.path.lexists(path):  # else a node makes it that does not know it yet
            os.mkdir(path, mode & ALL_PERMISSIONS)
            self._came(request, path)
        return self._made(request, path)

    # Attributes

    def _target(self, inode: int) -> bytes | int:
        """Return what is open, as its name may be gone, or else the path."""
        files = self._files.get(inode)
        return files[-1] if files else self._path(inode)

    def _getattr(self, request: Request) -> bytes:
        return ATTR_OUT.pack(0, 0, 0) + self._attr(os.stat(self._target(request.inode)))

    def _setattr(self, request: Request) -> bytes:
        valid, _, file, size, _, atime, mtime, _, *rest = SETATTR_IN.unpack_from(request.body)
        atime_ns, mtime_ns, _, mode, _, uid, gid, _ = rest
        target = self._target(request.inode)
        if valid & SET_MODE:
            os.chmod(target, mode & ALL_PERMISSIONS)
        if valid & (SET_UID | SET_GID):
            os.chown(target, uid if valid & SET_UID else -1, gid if valid & SET_GID else -1)
        if valid & SET_SIZE:  # what is open last may be open for reading only
            named = request.inode in self._paths
            os.truncate(self._paths[request.inode] if named else file, size)
        if valid & (SET_ATIME | SET_MTIME):
            now, status = time.time_ns(), os.stat(target)
            given = [
                (SET_ATIME, SET_ATIME_NOW, atime * 10**9 + atime_ns, status.st_atime_ns),
                (SET_MTIME, SET_MTIME_NOW, mtime * 10**9 + mtime_ns, status.st_mtime_ns),
            ]
            times = [
                now if valid & is_now else new if valid & is_set else old
                for is_set, is_now, new, old in given
            ]
            os.utime(target, ns=(times[0], times[1]))
        return self._getattr(request)

    # Files

    def _create(self, request: Request) -> bytes:
        flags, mode, _, _ = CREATE_IN.unpack_from(request.body)
        name = request.name(CREATE_IN.size)
        if flags & os.O_EXCL and not self._blobfuse:
            raise self._refuse(request, "exclusive create", errno.EOPNOTSUPP, name)
        path = self._child(request, name)
        is_new = not os.path.lexists(path)
        file = self._open_file(path, flags | os.O_CREAT, mode & ALL_PERMISSIONS)
        if is_new:
            self._came(request, path)
        entry = self._made(request, path)
        self._files.setdefault(self._inodes[path][0], []).append(file)
        return entry + OPEN_OUT.pack(file, 0, 0)

    def _open(self, request: Request) -> bytes:
        flags, _ = OPEN_IN.unpack_from(request.body)
        file = self._open_file(self._path(request.inode), flags)
        self._files.setdefault(request.inode, []).append(file)
        return OPEN_OUT.pack(file, 0, 0)

    def _open_file(self, path: bytes, flags: int, mode: int = 0) -> int:
        """Open the file behind; where its end is, the asking kernel knows."""
        kept = os.O_ACCMODE | os.O_CREAT | os.O_TRUNC
        return os.open(path, flags & kept | os.O_CLOEXEC, mode)

    def _read(self, request: Request) -> bytes:
        file, offset, size, *_ = IO_IN.unpack_from(request.body)
        return os.pread(file, size, offset)

    def _write(self, request: Request) -> bytes:
        file, offset, size, *_ = IO_IN.unpack_from(request.body)
        data = request.body[IO_IN.size : IO_IN.size + size]
        return WRITE_OUT.pack(os.pwrite(file, data, offset), 0)

    def _release(self, request: Request) -> bytes:
        file, *_ = RELEASE_IN.unpack_from(request.body)
        files = self._files[request.inode]
        files.remove(file)
        if not files:
            del self._files[request.inode]
        os.close(file)
        return b""

    # Folders

    def _opendir(self, request: Request) -> bytes:
        file = os.open(self._path(request.inode), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._files.setdefault(request.inode, []).append(file)
        return OPEN_OUT.pack(file, 0, 0)

    def _readdir(self, request: Request) -> bytes:
        file, offset, size, *_ = IO_IN.unpack_from(request.body)
        if offset == 0:
            if request.inode not in self._paths:
                raise OSError(errno.ENOENT, "removed while it was open")
            self._lists[file] = self._list(self._paths[request.inode])
        listed = self._lists[file]
        answer = bytearray()
        for position in range(offset, len(listed)):
            name, entry = listed[position]
            record = DIRENT.pack(entry.ino, position + 1, len(name), entry.type) + name
            record += bytes(-len(record) % 8)
            if len(answer) + len(record) > size:
                break
            answer += record
        return bytes(answer)

    def _list(self, path: bytes) -> list[tuple[bytes, Entry]]:
        with os.scandir(path) as found:
            entries = {
                one.name: Entry(
                    one.inode(), stat.S_IFDIR >> 12 if one.is_dir() else stat.S_IFREG >> 12
                )
                for one in found
            }
        this = Entry(os.stat(path).st_ino, stat.S_IFDIR >> 12)
        return [(b".", this), (b"..", this), *sorted(self._listings.show(path, entries).items())]

    def _releasedir(self, request: Request) -> bytes:
        file, *_ = RELEASE_IN.unpack_from(request.body)
        self._lists.pop(file, None)
        return self._release(request)

    # The whole

    def _statfs(self, request: Request) -> bytes:
        disk = os.statvfs(self._backing)
        blocks = (disk.f_blocks, disk.f_bfree, disk.f_bavail, disk.f_files, disk.f_ffree)
        sizes = (disk.f_bsize, disk.f_namemax, disk.f_frsize, 0)
        return STATFS_OUT.pack(*blocks, *sizes, *[0] * 6)

    def _init(self, request: Request) -> bytes:
        _, minor, readahead, offered = INIT_IN.unpack_from(request.body)
        head = (MAJOR, min(minor, MINOR), readahead, offered & WANTED)
        return INIT_OUT.pack(*head, 12, 9, MAX_WRITE, 1, PAGES, 0, *[0] * 8)


def mount(folder: Path) -> int:
    """Mount a file system that the returned descriptor serves; an OSError says why it cannot be."""
    device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other"
    where = os.fsencode(folder)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"lagging", where, b"fuse.lagging", MS_NOSUID_NODEV, options.encode()) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), f"mount of {folder}")
    return device


def unmount(folder: Path) -> None:
    """Take a mount away, whatever is still open below it; nothing where there is none."""
    ctypes.CDLL(None).umount2(os.fsencode(folder), MNT_DETACH)


def serve(device: int, node: int, layer: Layer, lock: threading.Lock) -> None:
    """Answer one node's kernel, one request at a time, until it is unmounted."""
    buffer = memoryview(bytearray(MAX_WRITE + 4096))
    while True:
        try:
            size = os.readv(device, [buffer])
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.EAGAIN):  # who asked was killed
                continue
            return
        _, opcode, unique, inode, uid, gid, pid, _, _ = IN_HEADER.unpack_from(buffer)
        if opcode in UNANSWERED:
            continue
        request = Request(node, opcode, inode, uid, gid, pid, buffer[IN_HEADER.size : size])
        body, failure = b"", 0
        try:
            with lock:
                body = layer.answer(request)
        except OSError as error:
            failure = error.errno or errno.EIO
        except Exception:
            traceback.print_exc()
            failure = errno.EIO
        head = OUT_HEADER.pack(OUT_HEADER.size + len(body), -failure, unique)
        try:
            os.writev(device, [head, body])
        except OSError as error:
            if error.errno != errno.ENOENT:  # who asked was killed
                return


def main(arguments: Sequence[str] | None = None) -> None:
    """Mount, say so in a line on stdout, and serve until stdin ends, by the test's death also."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("backing", type=Path)
    parser.add_argument("refused", type=Path)
    parser.add_argument("nodes", type=Path, nargs="+")
    parser.add_argument("--lag-seconds", type=float, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--lookup-lag", action="store_true")
    parser.add_argument("--blobfuse", action="store_true")
    given = parser.parse_args(arguments)
    os.umask(0)  # the kernel has taken the caller's into account
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    refused = os.open(given.refused, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    listings = Listings(given.lag_seconds, given.seed)
    backing = os.fsencode(given.backing.resolve())
    layer = Layer(
        backing,
        listings,
        lookup_lag=given.lookup_lag,
        blobfuse=given.blobfuse,
        refused=refused,
    )
    lock = threading.Lock()
    try:
        devices = [mount(folder) for folder in given.nodes]
    except OSError as error:
        for folder in given.nodes:
            unmount(folder)
        sys.exit(f"{error}")
    for node, device in enumerate(devices):
        threading.Thread(target=serve, args=(device, node, layer, lock), daemon=True).start()
    print("mounted", flush=True)
    sys.stdin.buffer.read()
    for folder in given.nodes:
        unmount(folder)
    os._exit(0)  # a thread may wait for requests of who still has a file open


if __name__ == "__main__":
    main()
