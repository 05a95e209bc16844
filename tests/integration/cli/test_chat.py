"""`ftctl chat` with tiny models, as a user calls it: in pipes and on a terminal."""

import fcntl
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from support.api.builders import manifest
from support.data.text_fixtures import CHATML_TEMPLATE, tiny_model
from support.model.scripted import scripted_model

FTCTL = [sys.executable, "-m", "finetune_operator"]
QUESTION = "What is <|sum|> 3 plus 3?"
TEMPLATE = "{% if tone %}{{ '<|im_start|>system\\nBe ' + tone }}{% endif %}" + CHATML_TEMPLATE
SAMPLE_TOKENS = 48  # of a sample response


def environment() -> dict[str, str]:
    return {**os.environ, "HF_HUB_OFFLINE": "1", "TERM": "xterm"}


def chat(folder: Path, *words: str, stdin: str = "") -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*FTCTL, "chat", *words],
        cwd=folder,
        env=environment(),
        input=stdin,
        capture_output=True,
        text=True,
    )


def responses(output: str) -> list[tuple[str, str]]:
    """Return each label and its text, in order."""
    parts = re.split(r"^(question|base|trained): ", output, flags=re.M)
    return [(label, text.strip("\n")) for label, text in zip(parts[1::2], parts[2::2], strict=True)]


def write_project(folder: Path) -> Path:
    """Write a model, rows and the manifest of a job with added tokens and template arguments."""
    folder.mkdir()
    tiny_model(folder / "model")
    rows = [{"prompt": f"What is {i} plus {i}?", "completion": f"{2 * i}."} for i in range(24)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings: dict[str, Any] = {
        "model.addTokens": ["<|sum|>"],
        "model.chatTemplate": TEMPLATE,
        "model.chatTemplateArguments": {"tone": "short"},
        "training": {"maxSeqLength": 64, "maxSteps": 6, "learningRate": 1e-2},
        "output.format": "both",
        "observability.samplePrompts": [QUESTION],
        "backend": {"type": "local", "local": {"threadsPerProcess": 1}},
    }
    file = folder / "job.yaml"
    file.write_text(yaml.safe_dump(manifest(name="tiny", **settings)))
    return file


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder in which a job has finished, and the output of `ftctl run`."""
    folder = tmp_path_factory.mktemp("chat") / "a project"
    file = write_project(folder)
    done = subprocess.run(
        [*FTCTL, "run", file.name], cwd=folder, env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, done.stdout


def shown(text: str) -> str:
    """Return a text as a terminal may get it."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "\ufffd", text)


def test_greedy_responses_equal_the_samples_of_the_run(finished: tuple[Path, str]) -> None:
    folder, output = finished
    assert "Chat with it: ftctl chat job.yaml" in output.splitlines()
    [sample] = json.loads((folder / "runs/default/tiny/progress.json").read_text())["samples"]
    assert sample["before"] != sample["after"]

    done = chat(folder, "job.yaml", "--prompt", QUESTION, "--max-new-tokens", str(SAMPLE_TOKENS))

    assert done.returncode == 0, done.stderr
    assert responses(done.stdout) == [
        ("question", QUESTION),
        ("base", shown(sample["before"])),
        ("trained", shown(sample["after"])),
    ]
    loading, *remarks = done.stderr.splitlines()
    assert loading == "loading runs/default/tiny/output/adapter"
    assert {*remarks} <= {f"cut after {SAMPLE_TOKENS} tokens; --max-new-tokens sets the limit"}


def test_a_copied_folder_reads_questions_from_a_pipe(
    finished: tuple[Path, str], tmp_path: Path
) -> None:
    folder, _ = finished
    copy = shutil.copytree(folder / "runs/default/tiny/output/adapter", tmp_path / "copy")
    words = ("--only", "trained", "--temperature", "0.7", "--max-new-tokens", "8")

    done = chat(tmp_path, str(copy), *words, stdin="Who?\n\n  Where?  \n")

    assert done.returncode == 0, done.stderr
    labels = [
        (label, text if label == "question" else "") for label, text in responses(done.stdout)
    ]
    assert labels == [
        ("question", "Who?"),
        ("trained", ""),
        ("question", "Where?"),
        ("trained", ""),
    ]
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize(
    ("words", "missing", "sentences"),
    [
        pytest.param(
            ["job.yaml"],
            "model",
            ["the base model ", "a project/model is missing", "set spec.model.source in job.yaml"],
            id="the base of a manifest was moved",
        ),
        pytest.param(
            ["tiny"],
            "model",
            ["a project/model is missing; move it back, or name the job's manifest"],
            id="the base of a job was moved",
        ),
        pytest.param(
            ["runs/default/tiny/output/merged"],
            "model",
            ["is missing", "--only trained needs no base"],
            id="the base of a merged model was moved",
        ),
        pytest.param(
            ["runs/default/tiny"],
            "runs/default/tiny/output",
            ["runs/default/tiny/output has no exported model", "ftctl chat FOLDER"],
            id="the output was moved",
        ),
        pytest.param(
            ["model", "--only", "base"], None, ["model does not record its base"], id="no base"
        ),
        pytest.param(
            ["runs"], None, ["runs is neither a run directory nor an exported model"], id="folder"
        ),
        pytest.param(["huge"], None, ["no run of a job called huge"], id="name"),
        pytest.param(["a/b.yaml"], None, ["a/b.yaml does not exist"], id="file"),
    ],
)
def test_what_cannot_be_loaded_is_refused_before_anything_is_loaded(
    finished: tuple[Path, str], words: list[str], missing: str | None, sentences: list[str]
) -> None:
    folder, _ = finished
    if missing:
        (folder / missing).rename(folder / "elsewhere")
    try:
        done = chat(folder, *words)
    finally:
        if missing:
            (folder / "elsewhere").rename(folder / missing)

    assert (done.returncode, done.stdout) == (1, "")
    assert all(sentence in done.stderr for sentence in sentences), done.stderr
    assert "loading" not in done.stderr
    assert len(done.stderr.splitlines()) == 1


def edit_job(folder: Path, **status: Any) -> None:
    """Change the stored status of the job."""
    path = folder / "runs/default/tiny/job.json"
    job = json.loads(path.read_text())
    job["status"] |= status
    path.write_text(json.dumps(job))


def condition(kind: str, message: str) -> dict[str, str]:
    return {"type": kind, "status": "True", "reason": "Any", "message": message}


def test_only_a_finished_job_has_a_model(tmp_path: Path) -> None:
    folder = tmp_path / "a project"
    write_project(folder)
    done = chat(folder, "job.yaml")
    assert done.returncode == 1
    assert done.stderr.strip() == (
        "job.yaml has no run in runs/default/tiny yet; start one: ftctl run job.yaml"
    )

    run = folder / "runs/default/tiny"
    run.mkdir(parents=True)
    job = yaml.safe_load((folder / "job.yaml").read_text())
    job["metadata"] |= {"uid": "1", "namespace": "default"}
    (run / "job.json").write_text(json.dumps({**job, "status": {"attempt": 2}}))
    edit_job(folder, progress={"step": 3, "totalSteps": 6})
    done = chat(folder, "tiny")
    assert done.returncode == 1
    assert done.stderr.startswith("the job tiny is not finished (attempt 2, step 3 of 6)")

    edit_job(folder, conditions=[condition("Failed", "row 3 is empty")])
    done = chat(folder, "job.yaml")
    assert done.returncode == 1
    assert "the job tiny has failed: row 3 is empty" in done.stderr
    assert "run it again: ftctl run job.yaml" in done.stderr


class Terminal:
    """A terminal with `ftctl chat` in its foreground."""

    def __init__(self, process: "subprocess.Popen[bytes]", control: int) -> None:
        self.process = process
        self._control = control
        self.output = ""

    def type(self, text: str) -> None:
        os.write(self._control, text.encode())

    def read_until(self, pattern: str, *, since: int = 0) -> int:
        """Return the place behind the first match after `since`."""
        while not (found := re.compile(pattern).search(self.output, since)):
            ready, _, _ = select.select([self._control], [], [], 60)
            piece = self._read() if ready else b""
            assert piece, f"{pattern!r} is not in {self.output[since:]!r}"
            self.output += piece.decode(errors="replace")
        return found.end()

    def wait(self) -> int:
        """Read the rest, and return the exit code."""
        while piece := self._read():
            self.output += piece.decode(errors="replace")
        return self.process.wait(60)

    def _read(self) -> bytes:
        try:
            return os.read(self._control, 65_536)
        except OSError:  # no process has the terminal open any more
            return b""


@contextmanager
def on_terminal(folder: Path, *words: str) -> Iterator[Terminal]:
    control, side = pty.openpty()
    process = subprocess.Popen(
        [*FTCTL, "chat", *words],
        cwd=folder,
        env=environment(),
        stdin=side,
        stdout=side,
        stderr=side,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(side)
    try:
        yield Terminal(process, control)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        os.close(control)


def test_ctrl_c_ends_a_response_and_ctrl_d_the_program(tmp_path: Path) -> None:
    scripted_model(tmp_path / "endless", "\x1b[2Jabc de fg\x9bh", is_endless=True)

    with on_terminal(tmp_path, "endless", "--max-new-tokens", "90000") as terminal:
        first = terminal.read_until("> ")
        terminal.type("Who?\n")
        terminal.read_until("abc", since=first)
        terminal.type("\x03")
        stopped = terminal.read_until(r"\(stopped\)", since=first)
        prompt = terminal.read_until("> ", since=stopped)
        terminal.type("\x03")  # at the prompt it only starts a new line
        prompt = terminal.read_until("> ", since=prompt)
        terminal.type("Where?\n")
        prompt = terminal.read_until("abc", since=prompt)
        terminal.type("\x03")
        prompt = terminal.read_until("> ", since=prompt)
        terminal.type("\x04")
        assert terminal.wait() == 0

    opening, response = terminal.output[:first], terminal.output[first:stopped]
    assert opening.startswith("loading endless\r\n")
    assert "Traceback" not in terminal.output
    assert "\x1b[2J" not in terminal.output, "the model's escape sequence"
    assert "\ufffd[2Jabc de fg\ufffdh" in response


def test_the_end_of_the_models_process_is_explained(tmp_path: Path) -> None:
    scripted_model(tmp_path / "endless", "abc de", is_endless=True)

    with on_terminal(tmp_path, "endless") as terminal:
        terminal.read_until("> ")
        [models] = psutil.Process(terminal.process.pid).children()
        models.kill()  # as the kernel does when memory is full
        assert terminal.wait() == 1
    assert "was killed, most likely because memory is full" in terminal.output


def test_a_reader_that_leaves_ends_the_program_quietly(tmp_path: Path) -> None:
    scripted_model(tmp_path / "endless", "abc de", is_endless=True)
    process = subprocess.Popen(
        [*FTCTL, "chat", "endless", "--prompt", "Who?", "--max-new-tokens", "90000"],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline() == "question: Who?\n"
    process.stdout.close()
    lines = process.stderr.read().splitlines()
    assert process.wait(60) == 141
    assert lines[1:] == ["loading endless"], "after the note that the base is not recorded"
