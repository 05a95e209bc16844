"""End a process together with its parent."""

import ctypes
import os
import signal

from finetune_trainer.errors import TrainerError

_PR_SET_PDEATHSIG = 1  # from linux/prctl.h


def end_with_parent(parent_pid: int, number: signal.Signals) -> None:
    """Make the kernel send signal `number` to this process when its parent ends for any reason."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, number) != 0:
        raise TrainerError(f"prctl(PR_SET_PDEATHSIG) failed: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent_pid:  # the parent died before the call, so no signal will come
        os.kill(os.getpid(), number)
