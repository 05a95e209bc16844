"""`ftctl chat` with tiny models: in pipes, on a terminal, and with arguments that it refuses."""

import fcntl
import json
import os
import pty
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from typer.testing import CliRunner

from finetune_operator.cli.app import app
from finetune_operator.errors import FineTuneError
from finetune_operator.kube.resources import FINE_TUNE_JOBS
from support.api.builders import manifest
from support.charts.kubernetes_schemas import faults, minors
from support.cluster.operators import Api
from support.data.text_fixtures import CHATML_TEMPLATE, tiny_model
from support.local.local_runs import wait_until
from support.model.scripted import scripted_model

FTCTL = [sys.executable, "-m", "finetune_operator"]
QUESTION = "What is <|sum|> 3 plus 3?"
TEMPLATE = "{% if tone %}{{ '<|im_start|>system\\nBe ' + tone }}{% endif %}" + CHATML_TEMPLATE
SAMPLE_TOKENS = 48  # of a sample response


def environment() -> dict[str, str]:
    return {**os.environ, "HF_HUB_OFFLINE": "1", "TERM": "xterm"}


def chat(
    folder: Path, *words: str, stdin: str = "", **variables: str
) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*FTCTL, "chat", *words],
        cwd=folder,
        env=environment() | variables,
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


@pytest.mark.full
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


@pytest.mark.full
def test_a_copied_folder_takes_its_base_from_the_hubs_cache_and_questions_from_a_pipe(
    finished: tuple[Path, str], tmp_path: Path
) -> None:
    folder, _ = finished
    copy = shutil.copytree(folder / "runs/default/tiny/output/adapter", tmp_path / "copy")
    settings = json.loads((copy / "adapter_config.json").read_text())
    settings["base_model_name_or_path"] = "org/tiny"
    (copy / "adapter_config.json").write_text(json.dumps(settings))
    home = tmp_path / "hub home"

    def ask(stdin: str) -> "subprocess.CompletedProcess[str]":
        words = ("--only", "trained", "--temperature", "0.7", "--max-new-tokens", "8")
        return chat(tmp_path, str(copy), *words, stdin=stdin, HF_HOME=str(home))

    done = ask("")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[1] == (
        "the base model org/tiny is neither a folder nor complete in the hub's cache, and "
        "HF_HUB_OFFLINE is set; unset it"
    )

    cached, commit = home / "hub" / "models--org--tiny", "0" * 40
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text(commit)
    (cached / "snapshots").mkdir()
    (cached / "snapshots" / commit).symlink_to(folder / "model")
    done = ask("Who?\n\n  Where?  \n")

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
        message = refusal(folder, *words)
    finally:
        if missing:
            (folder / "elsewhere").rename(folder / missing)

    assert all(sentence in message for sentence in sentences), message
    assert len(message.splitlines()) == 1


def refusal(folder: Path, *words: str) -> str:
    """Return the message with which `ftctl chat` refuses its arguments in a folder."""
    with chdir(folder):
        result = CliRunner().invoke(app, ["chat", *words])
    assert isinstance(result.exception, FineTuneError), result.output
    assert result.output == "", "it begins with the word loading"
    return str(result.exception)


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
    assert refusal(folder, "job.yaml") == (
        "job.yaml has no run in runs/default/tiny yet; start one: ftctl run job.yaml"
    )

    run = folder / "runs/default/tiny"
    run.mkdir(parents=True)
    job = yaml.safe_load((folder / "job.yaml").read_text())
    job["metadata"] |= {"uid": "1", "namespace": "default"}
    (run / "job.json").write_text(json.dumps({**job, "status": {"attempt": 2}}))
    edit_job(folder, progress={"step": 3, "totalSteps": 6})
    unfinished = "the job tiny is not finished (attempt 2, step 3 of 6)"
    assert refusal(folder, "tiny").startswith(unfinished)

    edit_job(folder, conditions=[condition("Failed", "row 3 is empty")])
    done = chat(folder, "job.yaml")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("the job tiny has failed: row 3 is empty\n")
    assert "run it again: ftctl run job.yaml\n" in done.stderr


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

    def wait_for_reader(self) -> None:
        """Wait until the program waits for input: `input` misses a signal shortly before that."""
        (trainer,) = psutil.Process(self.process.pid).children()
        wait_until(lambda: trainer.status() == psutil.STATUS_SLEEPING)

    def wait(self) -> int:
        """Read the rest, and return the exit code."""
        while piece := self._read():
            self.output += piece.decode(errors="replace")
        return self.process.wait(60)

    def _read(self) -> bytes:
        try:
            return os.read(self._control, 65_536)
        except OSError:  # no process has the terminal open any longer
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


@pytest.mark.full
def test_ctrl_c_ends_a_response_and_ctrl_d_the_program(tmp_path: Path) -> None:
    scripted_model(tmp_path / "endless", "\x1b[2Jabc de fg\x9bh", is_endless=True)

    with on_terminal(tmp_path, "endless", "--max-new-tokens", "90000") as terminal:
        first = terminal.read_until("> ")
        terminal.type("Who?\n")
        terminal.read_until("\ufffd\\[2Jabc de fg\ufffdh", since=first)
        terminal.type("\x03")
        stopped = terminal.read_until(r"\(stopped\)", since=first)
        prompt = terminal.read_until("> ", since=stopped)
        terminal.wait_for_reader()
        terminal.type("\x03")  # at the prompt it only starts a new line
        prompt = terminal.read_until("> ", since=prompt)
        terminal.type("Where?\n")
        prompt = terminal.read_until("abc", since=prompt)
        terminal.type("\x03")
        prompt = terminal.read_until("> ", since=prompt)
        terminal.type("\x04")
        assert terminal.wait() == 0

    assert terminal.output.startswith("loading endless\r\n")
    assert "Traceback" not in terminal.output
    assert "\x1b[2J" not in terminal.output, "the model's escape sequence"


@pytest.mark.parametrize(
    ("is_killed", "code", "message"),
    [
        pytest.param(True, 1, "was killed, most likely because memory is full", id="killed"),
        pytest.param(False, 130, "", id="Ctrl-C"),
    ],
)
def test_an_end_while_the_models_are_loaded(
    tmp_path: Path, is_killed: bool, code: int, message: str
) -> None:
    scripted_model(tmp_path / "model", "abc")

    with on_terminal(tmp_path, "model") as terminal:
        terminal.read_until("only the trained model responds")
        wait_until(lambda: bool(psutil.Process(terminal.process.pid).children()))
        if is_killed:  # as the kernel does when memory is full
            psutil.Process(terminal.process.pid).children()[0].kill()
        else:
            terminal.type("\x03")
        assert terminal.wait() == code
    assert message in terminal.output
    assert "Traceback" not in terminal.output


@pytest.mark.full
def test_a_reader_that_leaves_ends_the_program_quietly(tmp_path: Path) -> None:
    scripted_model(tmp_path / "endless", "abc de", is_endless=True)
    with subprocess.Popen(
        [*FTCTL, "chat", "endless", "--prompt", "Who?", "--max-new-tokens", "90000"],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "question: Who?\n"
        process.stdout.close()
        lines = process.stderr.read().splitlines()
    assert process.returncode == 141
    assert lines == [
        "loading endless",
        "the folder does not record its base model, so only the trained model responds",
    ]


def test_the_model_of_a_cluster_is_refused_with_the_commands_that_copy_it(
    api: Api, tmp_path: Path
) -> None:
    with api.namespace("chat") as namespace:
        backend = {"type": "kubernetes", "kubernetes": {"profile": "none"}}
        checkpoint, output = "pvc://c/x", "pvc://models/a b"
        api.apply(namespace, backend=backend, checkpoint__uri=checkpoint, output__uri=output)
        words = (*FTCTL, "chat", "tiny", "-n", namespace)
        variables = {**environment(), "KUBECONFIG": str(api.kubeconfig)}

        def refused() -> str:
            done = subprocess.run(
                words, cwd=tmp_path, env=variables, capture_output=True, text=True
            )
            assert (done.returncode, done.stdout) == (1, "")
            return done.stderr

        assert refused().startswith(f"the job {namespace}/tiny is not finished (Pending); only")
        complete = {**condition("Complete", ""), "lastTransitionTime": "2026-01-01T00:00:00Z"}
        status = {"conditions": [complete], "artifacts": ["pvc://models/a b/adapter"]}
        patch = {"status": status}
        client = api.client
        api.run(client.patch(FINE_TUNE_JOBS, "tiny", namespace, patch, subresource="status"))
        where, _, create, wait, copy, delete, again = refused().splitlines()

    assert "pvc://models/a b/adapter, on the claim models" in where
    kubectl = ["kubectl", "-n", namespace]
    assert shlex.split(copy) == [*kubectl, "cp", "ftctl-chat:/claim/a b/adapter", "tiny"]
    assert shlex.split(again) == ["ftctl", "chat", "tiny"]
    echo, pod, *rest = shlex.split(create)
    assert (echo, rest) == ("echo", ["|", *kubectl, "create", "-f", "-"])
    assert shlex.split(wait)[:4] == [*kubectl, "wait"]
    assert shlex.split(delete)[:4] == [*kubectl, "delete"]
    assert [faults(json.loads(pod), minor) for minor in minors("1.30")[-1:]] == [[]]
