"""Start and end the process of the trackers, for the supervisor of node 0.

The user's variables `WANDB_*` and `MLFLOW_*` reach that process alone: the supervisor removes them
from its own environment before it starts any other process.
"""

import subprocess
import sys
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Self

from finetune_trainer.config import ExitCode, TrainConfig
from finetune_trainer.launch.journal_points import newest_generation
from finetune_trainer.launch.trackers.tracker import PREFIXES, End, seconds_for_the_end

_NOT_FOR_TRACKERS = "HF_TOKEN"


def take_variables(environ: MutableMapping[str, str]) -> dict[str, str]:
    """Remove the variables of trackers from the environment and return them."""
    prefixes = tuple(PREFIXES.values())
    return {name: environ.pop(name) for name in [*environ] if name.startswith(prefixes)}


class TrackerProcess:
    """The process of all trackers of a run."""

    def __init__(
        self, config: TrainConfig, path: Path, folder: str | None, environ: Mapping[str, str]
    ) -> None:
        """Start it.

        Args:
            config: The run.
            path: File with the configuration.
            folder: Folder of the page of this node, through which rank 0 gets URLs and warnings.
            environ: Environment of the process.

        Raises:
            OSError: The process cannot be started.
        """
        self._scratch = TemporaryDirectory(prefix="finetune-trackers-", ignore_cleanup_errors=True)
        arguments = (str(path.absolute()), str(newest_generation(config)), folder or "")
        own = {name: text for name, text in environ.items() if name != _NOT_FOR_TRACKERS}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "finetune_trainer.launch.trackers", *arguments],
            stdin=subprocess.PIPE,
            cwd=self._scratch.name,  # libraries look for settings in the current folder
            env={**own, "TMPDIR": self._scratch.name, "PYTHONSAFEPATH": "1"},
            start_new_session=True,  # only the supervisor gets Ctrl-C
        )

    @classmethod
    def start(
        cls, config: TrainConfig, path: Path, folder: str | None, environ: Mapping[str, str]
    ) -> Self | None:
        """Start it if the run has trackers; None without trackers, or with a warning."""
        if not config.telemetry.trackers:
            return None
        try:
            return cls(config, path, folder, environ)
        except OSError as error:
            print(
                f"warning: no tracker gets this run, because its process cannot be started "
                f"({error}); training continues",
                file=sys.stderr,
                flush=True,
            )
            return None

    def end(self, exit_code: int) -> None:
        """Pass on the end of the attempt and wait for the last points; then kill the process."""
        ends = {ExitCode.DONE: End.DONE, ExitCode.PREEMPTED: End.STOPPED}
        word = {int(code): end for code, end in ends.items()}.get(exit_code, End.FAILED)
        with suppress(subprocess.TimeoutExpired, OSError):  # OSError: it has ended already
            self._process.communicate(word.encode(), timeout=seconds_for_the_end(word))
        self._process.kill()
        self._process.wait()
        self._scratch.cleanup()
