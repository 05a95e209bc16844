"""Call `ftctl init`, `preview` and `run` like a user."""

import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from support.data.text_fixtures import tiny_model
from support.local.fake_nvidia_smi import T4, fake_nvidia_smi

HEAVY = {"torch", "transformers", "numpy", "datasets", "pyarrow"}


def ftctl(
    *arguments: object, folder: Path, python: tuple[str, ...] = (), **variables: str | None
) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}
    for name, value in variables.items():
        environ.pop(name, None)
        if value is not None:
            environ[name] = value
    return subprocess.run(
        [sys.executable, *python, "-m", "finetune_operator", *map(str, arguments)],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    tiny_model(folder / "model")
    rows = [{"question": f"What is {n} plus {n}?", "reply": f"{2 * n}."} for n in range(50)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def cached(folder: Path) -> set[str]:
    return {one.name for one in (folder / "cache").rglob("manifest.json")} | {
        str(one) for one in (folder / "cache").rglob("tokens.bin")
    }


@pytest.mark.full
def test_a_manifest_is_written_previewed_and_run(project: Path) -> None:
    options = ("--model", "./model", "--data", "rows.jsonl", "--columns", "")
    wrote = ftctl("init", *options, "-o", "job.yaml", folder=project, python=("-X", "importtime"))
    assert wrote.returncode == 0, wrote.stderr
    assert wrote.stdout.startswith("wrote job.yaml\n")
    imported = {line.rpartition("|")[2].strip() for line in wrote.stderr.splitlines()}
    assert "finetune_operator.cli.init_draft" in imported
    assert not imported & HEAVY
    text = (project / "job.yaml").read_text()
    assert "source: file://./rows.jsonl" in text
    assert "columns: {prompt: question, completion: reply}" in text

    tokens = cached(project)
    assert len(tokens) == 3  # both sides of evalShare
    shown = ftctl("preview", "job.yaml", folder=project)
    assert shown.returncode == 0, shown.stderr
    assert "warning" not in shown.stdout
    done = ftctl("run", "job.yaml", folder=project)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Complete after" in done.stdout
    assert cached(project) == tokens

    again = ftctl("init", *options, "-o", "job.yaml", folder=project)
    assert (again.returncode, again.stdout) == (1, "")
    assert again.stderr == "job.yaml exists, and init overwrites no file; choose another name\n"
    assert (project / "job.yaml").read_text() == text


def test_the_memory_of_a_step_is_beside_the_number_of_gpus(project: Path, tmp_path: Path) -> None:
    options = ("--model", "./model", "--data", "rows.jsonl", "--gpus", "1")
    path = fake_nvidia_smi(tmp_path, [T4])
    wrote = ftctl("init", *options, folder=project, python=("-X", "importtime"), PATH=path)
    assert wrote.returncode == 0, wrote.stderr
    comment = r"gpusPerNode: 1 +# --gpus 1; a step takes \d\.\d of 14\.6 GiB per GPU\n"
    assert re.search(comment, wrote.stdout)
    imported = {line.rpartition("|")[2].strip() for line in wrote.stderr.splitlines()}
    assert not imported & HEAVY


def test_a_question_writes_no_file(project: Path) -> None:
    row = {"prompt": "Why?", "chosen": "Because.", "rejected": "No."}
    (project / "pairs.jsonl").write_text(json.dumps(row) + "\n")
    options = ("--model", "./model", "--data", "pairs.jsonl", "-o", "pairs.yaml")
    asked = ftctl("init", *options, folder=project)
    assert (asked.returncode, asked.stdout) == (1, "")
    assert asked.stderr == (
        "pairs.jsonl: preference data (chosen, rejected). Preference learning is not supported yet."
        '\n  prompt    "Why?"\n  chosen    "Because."\n  rejected  "No."\n'
        "To train on the chosen responses alone: --columns prompt=prompt,completion=chosen\n"
    )
    assert not (project / "pairs.yaml").exists()


@contextmanager
def hub(code: int, **headers: str) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(code)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def do_GET(self) -> None:
            self.do_HEAD()

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_gated_model_is_one_sentence(project: Path) -> None:
    with hub(401, X_Error_Code="GatedRepo", X_Error_Message="Access is restricted.") as endpoint:
        options = ("--model", "org/gated", "--data", "rows.jsonl")
        asked = ftctl("init", *options, folder=project, HF_HUB_OFFLINE=None, HF_ENDPOINT=endpoint)
    assert (asked.returncode, asked.stdout) == (1, "")
    [line] = asked.stderr.splitlines()
    assert line.startswith("--model: the model of org/gated cannot be loaded (")
    assert line.endswith("for a gated model, the token")


@pytest.mark.parametrize("command", ["run", "preview"])
def test_without_the_hub_a_command_prints_one_sentence(project: Path, command: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"http://127.0.0.1:{server.getsockname()[1]}"
    text = (
        "apiVersion: finetune.dev/v1alpha1\nkind: FineTuneJob\nmetadata: {name: absent}\nspec:\n"
        "  model: {source: hf://org/absent}\n  dataset: {source: file://./rows.jsonl}\n"
        "  training: {globalBatchSize: 1, epochs: 1, learningRate: 1e-4}\n"
    )
    (project / "absent.yaml").write_text(text)
    done = ftctl(command, "absent.yaml", folder=project, HF_HUB_OFFLINE=None, HF_ENDPOINT=endpoint)
    assert (done.returncode, done.stdout) == (1, "")
    [line] = done.stderr.splitlines()
    assert line.startswith(f"absent.yaml:5: spec.model.source hf://org/absent: the hub {endpoint} ")
    assert not (project / "runs" / "default" / "absent").exists()
