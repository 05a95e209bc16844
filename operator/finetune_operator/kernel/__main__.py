"""`finetune-operator`, or `python -m finetune_operator.kernel`, which a signal ends from the start.

As PID 1 of a container a process without handlers ignores signals: Linux drops them, and the pod is
killed only at the end of its grace period. So the handlers are set before the imports, which take a
second.
"""

import os
import signal
import sys
from types import FrameType


def main() -> None:
    """Run the operator until SIGTERM or SIGINT; exit code 1 if it cannot start."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)
    try:
        from finetune_operator.kernel.run import main as run
    except ModuleNotFoundError as error:
        from finetune_operator.extras import sentence

        if (message := sentence("finetune-operator", error)) is None:
            raise
        sys.exit(message)
    run()


def _leave(number: int, frame: FrameType | None) -> None:
    """Exit at once: the process holds no Lease and has started no work yet."""
    os._exit(0)


if __name__ == "__main__":
    main()
