"""Compile modules to reproducible bytecode; install.py runs it.

    PYTHONHASHSEED=0 python -S -s -W ignore bytecode.py [BELOW] <MODULES

MODULES are paths, each followed by a zero byte; BELOW is a prefix to remove from the paths in
tracebacks.

The bytecode of a module can depend on the strings that the process has interned. A set of names
that occurs in two functions becomes one object in bytecode, or two if its names are already
interned (CPython 3.11, `intern_constants` in Objects/codeobject.c). Bytecode also marks objects
with further references (`w_ref` in Python/marshal.c). Of 19,792 modules of packages, 6 differ with
the modules that the process imported or compiled before. Each slice of the list is therefore
compiled in order by a process that is forked from the same state.
"""

import gc
import os
import py_compile
import sys
from collections.abc import Sequence
from contextlib import suppress
from py_compile import PycInvalidationMode, PyCompileError

# A fork costs 3 ms, more than compiling a module; for slices of this size it costs 2 %.
MODULES_PER_SLICE = 100


def main(modules: Sequence[str], below: str | None) -> int:
    """Compile modules, one slice per processor at a time; return the exit code."""
    # The time of a garbage collection depends on more than the modules and changes which objects
    # still have further references.
    gc.disable()
    running: set[int] = set()
    failed = False
    for start in range(0, len(modules), MODULES_PER_SLICE):
        if len(running) == len(os.sched_getaffinity(0)):
            failed |= wait_failed(running)
        child = os.fork()
        if child == 0:
            compile_slice(modules[start : start + MODULES_PER_SLICE], below)
        running.add(child)
    while running:
        failed |= wait_failed(running)
    return int(failed)


def wait_failed(running: set[int]) -> bool:
    """Wait for a process to exit; return whether it has failed."""
    child, status = os.wait()
    running.remove(child)
    return status != 0


def compile_slice(modules: Sequence[str], below: str | None) -> None:
    """Compile modules and exit the process, with 1 if a file cannot be written.

    Imports never compare this bytecode with its source. All files of an image get one fixed time,
    so bytecode that records the time of its source would be recompiled at every start.
    """
    status = 1
    try:
        for module in modules:
            # Some packages contain templates that are not valid Python.
            with suppress(PyCompileError):
                py_compile.compile(
                    module,
                    dfile=module if below is None else "/" + os.path.relpath(module, below),
                    doraise=True,
                    invalidation_mode=PycInvalidationMode.UNCHECKED_HASH,
                )
        status = 0
    except Exception:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    listed = os.fsdecode(sys.stdin.buffer.read()).split("\0")[:-1]
    sys.exit(main(listed, sys.argv[1] if len(sys.argv) > 1 else None))
