"""The tutorial, command by command as the page shows it: first on a tiny model, then on its own."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.data.text_fixtures import tiny_model
from support.docs.shown_blocks import Shown, shown_in

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "tutorial.md"
ASSETS = ROOT / "examples" / ".quickstart"
MODEL = "examples/.quickstart/model"
SERVE = "ftctl dev examples"
ELSEWHERE = "make run"
"""Two minutes that `test_quickstart.py` spends already."""
STAMPS = (".venv/.pip", ".venv/.installed")
"""What tells make that everything is installed, in the order in which it makes them."""

pytestmark = [
    pytest.mark.model,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not (ASSETS / "model").is_dir(),
        reason="the quickstart's model is not there; run: make quickstart-assets",
    ),
]


COMMANDS = shown_in(PAGE)
SERVED = next(number for number, shown in enumerate(COMMANDS) if shown.command == SERVE)


class Terminal:
    """A shell whose variables outlive a command, in a folder like a fresh clone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._exports: list[str] = []
        self._environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "XDG_CACHE_HOME": str(folder / "cache"),
        }

    def start(self, command: str) -> subprocess.Popen[str]:
        script = "; ".join([*self._exports, f"exec {command}" if "|" not in command else command])
        return subprocess.Popen(
            ["bash", "-c", script],
            cwd=self.folder,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, shown: Shown) -> None:
        """Run a command, and compare what it prints with what is shown."""
        if shown.command.startswith("export "):
            self._exports.append(shown.command)
            return
        process = self.start(shown.command)
        if shown.command.endswith(" -w"):
            self._watch(process, shown)
            return
        output, _ = process.communicate()
        assert (process.returncode != 0) is shown.is_refused, f"{shown.command}\n{output}"
        assert not shown.output or shown.matches(output), f"{shown.command}\n{output}"

    def _watch(self, process: subprocess.Popen[str], shown: Shown) -> None:
        """Read until everything that is shown was seen, and leave as Ctrl-C would."""
        seen = ""
        with process:
            assert process.stdout is not None
            for line in process.stdout:
                seen += line
                if shown.matches(seen):
                    process.terminate()
                    return
        raise AssertionError(f"{shown.command}\n{seen}")


@pytest.fixture(scope="module")
def terminal(tmp_path_factory: pytest.TempPathFactory) -> Terminal:
    """A terminal in a copy of what a clone holds, whose environment is this one."""
    folder = tmp_path_factory.mktemp("clone")
    shutil.copytree(
        ROOT / "examples",
        folder / "examples",
        ignore=shutil.ignore_patterns("runs", ".quickstart", "__pycache__", "short.yaml"),
    )
    tiny_model(folder / MODEL)
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, folder / name)
    (folder / ".venv").mkdir()
    for entry in Path(sys.prefix).iterdir():
        if f".venv/{entry.name}" not in STAMPS:
            (folder / ".venv" / entry.name).symlink_to(entry)
    for name in STAMPS:
        (folder / name).touch()
    return Terminal(folder)


@contextmanager
def served(terminal: Terminal, shown: Shown) -> Iterator[None]:
    """Keep the command of the first terminal running inside the block, and end it by Ctrl-C."""
    process = terminal.start(shown.command)
    with process:
        assert process.stdout is not None
        try:
            said = []
            for line in process.stdout:  # the log is beside it
                said.append(line)
                if shown.matches(line):
                    break
            else:
                raise AssertionError("".join(said))
            yield
            process.send_signal(signal.SIGINT)
            output, _ = process.communicate(timeout=120)
            assert process.returncode == 0, output
        finally:
            process.kill()


@pytest.mark.full
def test_a_job_of_ones_own_runs_by_make(terminal: Terminal) -> None:
    for shown in COMMANDS[:SERVED]:
        if shown.command != ELSEWHERE:
            terminal.run(shown)


@pytest.mark.full
@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not in PATH")
def test_the_job_is_watched_suspended_and_mended_by_kubectl(terminal: Terminal) -> None:
    shutil.rmtree(terminal.folder / MODEL)
    (terminal.folder / MODEL).symlink_to(ASSETS / "model")  # long enough to be suspended
    with served(terminal, COMMANDS[SERVED]):
        for shown in COMMANDS[SERVED + 1 :]:
            terminal.run(shown)


def test_the_page_shows_both_ways() -> None:
    assert ELSEWHERE in [shown.command for shown in COMMANDS[:SERVED]]
    assert sum("kubectl" in shown.command for shown in COMMANDS[SERVED:]) > 10
