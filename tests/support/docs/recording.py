"""Record `docs/ftctl-run.svg`, the picture of README.md: `make recording`.

Runs the quickstart in a terminal of its own, notes when which characters come, and plays them in a
fraction of the time. Nothing of the picture is written by hand.
"""

import fcntl
import os
import pty
import struct
import sys
import tempfile
import termios
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from support.docs.screen_drawing import Moment, draw
from support.docs.terminal_screen import Screen

ROOT = Path(__file__).parents[3]
PICTURE = ROOT / "docs" / "ftctl-run.svg"
COMMAND = ("ftctl", "run", "examples/00-quickstart.yaml")
COLUMNS, LINES = 92, 26
PLAYED_SECONDS, HELD_SECONDS = 20.0, 6.0
"""How long the picture takes for the whole run, and how long it then shows the end."""
PICTURES_PER_SECOND = 3.0
BURST_SECONDS = 0.05
"""Output that follows sooner belongs to the same redraw, of which no half is shown."""


@dataclass(frozen=True)
class Output:
    """What a program wrote at once.

    Attributes:
        seconds: Since it started.
    """

    seconds: float
    text: str


def main() -> int:
    """Run, record and draw; return the exit code of the run."""
    command = [sys.executable, "-m", "finetune_operator", *COMMAND[1:]]
    with tempfile.TemporaryDirectory() as folder:
        examples = Path(folder) / "examples"
        examples.mkdir()
        for name in (".quickstart", "00-quickstart.yaml"):
            (examples / name).symlink_to(ROOT / "examples" / name)
        written, code = record(command, folder)
    if code == 0:
        PICTURE.write_text(picture(written), encoding="utf-8")
        print(f"wrote {PICTURE.relative_to(ROOT)}")
    else:
        print("".join(one.text for one in written))
    return code


def record(command: list[str], folder: str) -> tuple[list[Output], int]:
    """Run a program in a terminal; return what it wrote, and its exit code."""
    start = time.monotonic()
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(folder)
        os.execvpe(command[0], command, {**os.environ, "TERM": "xterm-256color"})
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    written, rest = [], b""
    while piece := _read(terminal):
        rest += piece
        whole = rest.decode(errors="ignore")  # half a character stays in `rest`
        rest = rest[len(whole.encode()) :]
        written.append(Output(time.monotonic() - start, whole))
    os.close(terminal)
    _, status = os.waitpid(process, 0)
    return written, os.waitstatus_to_exitcode(status)


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # so Linux says that the other side was closed
        return b""


def picture(written: Sequence[Output]) -> str:
    """Return the SVG of a run, played in `PLAYED_SECONDS`."""
    screen = Screen(COLUMNS, LINES)
    faster = written[-1].seconds / PLAYED_SECONDS
    moments = [Moment(0.0, screen.rows())]
    for number, one in enumerate(written):
        screen.feed(one.text)
        due = written[number + 1].seconds if number + 1 < len(written) else float("inf")
        is_whole = due - one.seconds > BURST_SECONDS
        if is_whole and due / faster >= moments[-1].start + 1 / PICTURES_PER_SECOND:
            moments.append(Moment(one.seconds / faster, screen.rows()))
    title = f"$ {' '.join(COMMAND)}        (a real run, {faster:.0f} times as fast)"
    return draw(moments, PLAYED_SECONDS + HELD_SECONDS, title, COLUMNS)


if __name__ == "__main__":
    sys.exit(main())
