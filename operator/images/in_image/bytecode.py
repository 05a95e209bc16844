"""Compiles modules to bytecode that depends on nothing but the modules; install.py runs it.

    PYTHONHASHSEED=0 python -S -s -W ignore bytecode.py [BELOW] <MODULES

MODULES are paths with a zero byte after each, BELOW what to leave out at the beginning of the paths
that tracebacks show.

The same module may give other bytes in a process that knows more names. A set of names that stands
in two functions is one object in bytecode, or two where the process knew its names already
(CPython 3.11, `intern_constants` in Objects/codeobject.c). Bytecode also says which of its objects
something else refers to (`w_ref` in Python/marshal.c). Of 19,792 modules of packages, 6 differ by
what the process imported and compiled before. So each slice of the list is compiled in its order,
by a process that was forked in one state and did nothing before.
"""

import gc
import os
import py_compile
import sys
from collections.abc import Sequence
from contextlib import suppress
from py_compile import PycInvalidationMode, PyCompileError

# A fork for each module costs 3 ms, more than to compile it; of this many it is 2 %.
MODULES_IN_A_SLICE = 100


def main(modules: Sequence[str], below: str | None) -> int:
    """Compile the modules, one slice on each processor at a time; return the exit code."""
    # When garbage is collected depends on more than what is compiled, and bytecode also says which
    # of its objects anything else still refers to.
    gc.disable()
    running: set[int] = set()
    failed = False
    for start in range(0, len(modules), MODULES_IN_A_SLICE):
        if len(running) == len(os.sched_getaffinity(0)):
            failed |= ended_badly(running)
        child = os.fork()
        if child == 0:
            compile_slice(modules[start : start + MODULES_IN_A_SLICE], below)
        running.add(child)
    while running:
        failed |= ended_badly(running)
    return int(failed)


def ended_badly(running: set[int]) -> bool:
    """Wait for one of the processes, and say whether it failed."""
    child, status = os.wait()
    running.remove(child)
    return status != 0


def compile_slice(modules: Sequence[str], below: str | None) -> None:
    """Compile some modules, and end this process: with 1 where a file could not be written.

    The bytecode is never compared with its source: an image's files get one fixed time, so bytecode
    that keeps the time of its source would be compiled anew at each start.
    """
    status = 1
    try:
        for module in modules:
            # Some packages have templates that are no Python.
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
