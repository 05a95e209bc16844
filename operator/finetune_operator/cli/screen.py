"""Which screen a followed job is shown on."""

import sys
import time

from rich.console import Console

from finetune_operator.cli.live import LiveScreen
from finetune_operator.cli.plain import PlainScreen
from finetune_operator.cli.view import View, duration


def make_screen(console: Console, first: View, *, plain: bool) -> LiveScreen | PlainScreen:
    """Return one that redraws itself on a terminal, and one that writes lines elsewhere.

    Args:
        console: Where it is shown.
        first: What was known before anything started; only what differs is told.
        plain: Write lines on a terminal, too.
    """
    if console.is_terminal and not plain:
        return LiveScreen(console, first, time.monotonic)
    return PlainScreen(sys.stdout, first, time.monotonic)


def stopping(grace_seconds: float) -> str:
    """Return what is said after the first Ctrl-C."""
    return (
        f"stopping after a checkpoint, within {duration(grace_seconds)}; "
        "Ctrl-C again kills it at once and loses the steps since the last checkpoint"
    )
