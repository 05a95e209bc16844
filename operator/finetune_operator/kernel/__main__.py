"""Entry point of `finetune-operator` and of `python -m finetune_operator.kernel`.

Signal handlers are set before the imports, which take a second. Without them Linux would drop
signals to this process, because it is PID 1 of its container, and the pod would be killed only at
the end of its grace period.
"""

import os
import signal
import sys
from types import FrameType


def main() -> None:
    """Run the operator until SIGTERM or SIGINT; exit code 1 if it cannot start."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)
    if sys.argv[1:]:
        _read_arguments(sys.argv[1:])
    try:
        from finetune_operator.kernel.run import main as run
    except ModuleNotFoundError as error:
        from finetune_operator.extras import sentence

        if (message := sentence("finetune-operator", error)) is None:
            raise
        sys.exit(message)
    run()


def _read_arguments(arguments: list[str]) -> None:
    """Print the usage or the version; there are no other arguments."""
    import argparse

    from finetune_operator import __version__

    parser = argparse.ArgumentParser(
        prog="finetune-operator",
        description="Run the operator in this process until SIGTERM or SIGINT.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    if {"-h", "--help"} & {*arguments}:
        from finetune_operator.kernel.settings import usage

        parser.epilog = usage()
    parser.parse_args(arguments)


def _leave(number: int, frame: FrameType | None) -> None:
    """Exit at once. The process does not hold the Lease and has not started any work yet."""
    os._exit(0)


if __name__ == "__main__":
    main()
