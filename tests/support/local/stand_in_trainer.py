"""A main process that keeps the trainer's contract and learns nothing: for tests of backends.

Called as `python stand_in_trainer.py CONFIG`. What it does in which attempt is said by the variable
FINETUNE_STAND_IN, a JSON object {"ATTEMPT": {option: value}, "*": {...}}; see `Play`.
"""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path


@dataclasses.dataclass
class Play:
    """What an attempt does.

    Attributes:
        steps: Steps of the whole training.
        step_seconds: Length of each.
        kill_at: SIGKILL itself before this step.
        exit_code: Exit code at the end, or at `fail_at`.
        fail_at: End before this step.
        node: The node that the faults are about; None for every node.
        is_deaf: SIGTERM has no effect.
        is_silent: No termination message.
        has_stray: Start a child in a session of its own that would live for an hour.
        save_every: Commit a checkpoint after every so many steps.
        gang: Nodes that must have begun before any of them makes a step, as where ranks meet.
    """

    steps: int = 6
    step_seconds: float = 0.05
    kill_at: int | None = None
    exit_code: int = 0
    fail_at: int | None = None
    node: int | None = None
    is_deaf: bool = False
    is_silent: bool = False
    has_stray: bool = False
    save_every: int | None = None
    gang: int = 1


_CLASSES = {0: "Completed", 65: "DataError", 75: "Preempted", 78: "ConfigError"}


class StandIn:
    """One node's main process."""

    def __init__(self, config: dict[str, dict[str, str]]) -> None:
        self.attempt = int(config["job"]["attempt"])
        self.run_dir = Path(str(config["runDir"]))
        self.output = Path(config["output"]["dir"])
        self.checkpoints = Path(config["checkpoint"]["dir"])
        self.node = int(os.environ["FINETUNE_NODE_RANK"])
        plays = json.loads(os.environ.get("FINETUNE_STAND_IN", "{}"))
        self.play = Play(**plays.get(str(self.attempt), plays.get("*", {})))
        self.is_faulty = self.play.node in (None, self.node)
        self.is_told = False

    def run(self) -> int:
        """Play the attempt and return the exit code."""
        is_deaf = self.is_faulty and self.play.is_deaf
        signal.signal(signal.SIGTERM, signal.SIG_IGN if is_deaf else self._hear)
        with (self.run_dir / "starts.txt").open("a") as file:
            file.write(f"{self.attempt} {self.node} {os.getpid()}\n")
        if self.is_faulty and self.play.has_stray:
            nap = [sys.executable, "-c", "import time; time.sleep(3600)"]
            stray = subprocess.Popen(nap, start_new_session=True)
            (self.run_dir / "stray.txt").write_text(str(stray.pid))
        saved = sorted(int(path.name[5:]) for path in self.checkpoints.glob("step-*"))
        first = saved[-1] if saved else 0
        print(f"node {self.node} of attempt {self.attempt} starts at step {first}", flush=True)
        while self._num_begun() < self.play.gang and not self.is_told:
            time.sleep(0.01)
        for step in range(first, self.play.steps):
            if self.is_told:
                return self._stop(step, first)
            if self.is_faulty and step == self.play.kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            if self.is_faulty and step == self.play.fail_at:
                return self._say(self.play.exit_code, step, "failed as it was told to")
            time.sleep(self.play.step_seconds)
            if self.play.save_every and (step + 1) % self.play.save_every == 0:
                self._save(step + 1)
            self._tell(step + 1, first)
        if self.node == 0 and not self.play.exit_code:
            self.output.mkdir(parents=True, exist_ok=True)
        return self._say(self.play.exit_code, self.play.steps, "trained to the end")

    def _num_begun(self) -> int:
        lines = (self.run_dir / "starts.txt").read_text().splitlines()
        return sum(line.split()[0] == str(self.attempt) for line in lines)

    def _hear(self, number: int, frame: object) -> None:
        self.is_told = True

    def _stop(self, step: int, first: int) -> int:
        self._save(step)
        self._tell(step, first)
        return self._say(75, step, f"stopped at step {step}")

    def _save(self, step: int) -> None:
        if self.node == 0:
            (self.checkpoints / f"step-{step}").mkdir(parents=True, exist_ok=True)

    def _tell(self, step: int, first: int) -> None:
        if self.node:
            return
        said = {
            "attempt": self.attempt,
            "phase": "Training",
            "step": step,
            "totalSteps": self.play.steps,
            "resumedStep": first or None,
        }
        saved = sorted(int(path.name[5:]) for path in self.checkpoints.glob("step-*"))
        if saved:
            path = str(self.checkpoints / f"step-{saved[-1]}")
            said["checkpoint"] = {"step": saved[-1], "path": path, "time": 1.0, "worldSize": 1}
        self._write(self.run_dir / "progress.json", said)

    def _say(self, code: int, step: int, message: str) -> int:
        if not self.play.is_silent:
            words = {
                "failureClass": _CLASSES.get(code, "Error"),
                "exitCode": code,
                "message": f"node {self.node}: {message}",
                "step": step,
            }
            self._write(Path(os.environ["FINETUNE_TERMINATION_PATH"]), words)
        return code

    def _write(self, path: Path, value: object) -> None:
        temporary = path.with_name(f"{path.name}.{self.node}.new")
        temporary.write_text(json.dumps(value))
        temporary.replace(path)


if __name__ == "__main__":
    sys.exit(StandIn(json.loads(Path(sys.argv[1]).read_text())).run())
