"""The commands that README and docs show: each is run, and its printed output compared."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from finetune_operator.api.crd import custom_resource_definition
from finetune_trainer.config import Termination, TrainConfig
from support.cluster.clusters import embedded_cluster
from support.docs.wheel_check import GIT_REQUIREMENT
from support.launch.launches import clean_environment
from support.launch.tiny_run import write_inputs

ROOT = Path(__file__).parents[3]
SHOWING = ("README.md", "CONTRIBUTING.md")
README = (ROOT / "README.md").read_text(encoding="utf-8")
HUB_MODEL = "Qwen/Qwen3-0.6B"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SMALL_JOB = """
apiVersion: finetune.dev/v1alpha1
kind: FineTuneJob
metadata: {name: shown}
spec:
  model: {source: "file://./model", baseName: org/tiny}
  dataset: {source: "file://./train.jsonl"}
  method: {type: lora, lora: {r: 4}}
  training: {globalBatchSize: 2, maxSeqLength: 64, maxSteps: 2, learningRate: 1e-3}
  topology: {gpusPerNode: 0, processesPerNode: 2}
  backend: {type: local, local: {threadsPerProcess: 1}}
"""


@dataclass(frozen=True)
class Shown:
    """One command of a page with the output the page shows; empty for any output."""

    page: str
    command: str
    output: str

    def __str__(self) -> str:
        return f"{self.page}: {self.command}"


def shown_commands() -> list[Shown]:
    found = []
    for page in SHOWING:
        for language, text in BLOCK.findall((ROOT / page).read_text(encoding="utf-8")):
            if language == "console":
                for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
                    command, _, output = part.partition("\n")
                    found.append(Shown(page, command.partition("  #")[0].strip(), output.strip()))
    return found


COMMANDS = shown_commands()
FTCTL = [shown for shown in COMMANDS if shown.command.startswith("ftctl ")]
OWN = [shown for shown in FTCTL if "job.yaml" in shown.command]
"""The commands of the quick start, which run in this order in one folder."""
MAKE = [shown for shown in COMMANDS if shown.command.startswith("make ")]
KUBECTL = [shown for shown in COMMANDS if shown.command.startswith("kubectl ")]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the examples as they are in a fresh clone, and the quickstart's assets."""
    folder = tmp_path_factory.mktemp("checkout")
    shutil.copytree(
        ROOT / "examples",
        folder / "examples",
        ignore=shutil.ignore_patterns("runs", ".quickstart", "__pycache__"),
    )
    assets = ROOT / "examples" / ".quickstart"
    if not (assets / "model").is_dir():
        pytest.skip("the quickstart's model is not there; run: make quickstart-assets")
    (folder / "examples" / ".quickstart").symlink_to(assets)
    return folder


def test_every_shown_command_is_run_by_a_test_here() -> None:
    run = {shown.command for shown in [*FTCTL, *MAKE, *KUBECTL]}
    installing = {one.command for one in COMMANDS if one.command.startswith("uv tool install ")}
    assert {shown.command for shown in COMMANDS} == run | installing
    assert installing == {f'uv tool install "{GIT_REQUIREMENT}"'}  # `make wheel-check` runs it
    assert [shown.command.split()[1] for shown in OWN] == ["init", "run", "chat"]
    assert [shown.command.split()[1] for shown in KUBECTL] == ["apply", "get"]
    assert set(FTCTL) > set(OWN)


def test_the_make_target_that_the_readme_names_exists() -> None:
    assert "`make run`" in README


@pytest.mark.model
@pytest.mark.parametrize("shown", [one for one in FTCTL if one not in OWN], ids=str)
def test_shown_command_works_and_prints_what_is_shown(shown: Shown, checkout: Path) -> None:
    arguments = shown.command.split()[1:]

    done = subprocess.run(
        [sys.executable, "-m", "finetune_operator", *arguments],
        cwd=checkout,
        env={**os.environ, "XDG_CACHE_HOME": str(checkout / "cache")},
        capture_output=True,
        text=True,
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    if shown.output:
        assert done.stdout.strip() == shown.output


@pytest.fixture(scope="module")
def own_data(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with 200 rows as my.jsonl, and the quickstart's model in place of the hub's."""
    folder = tmp_path_factory.mktemp("own")
    assets = checkout / "examples" / ".quickstart"
    (folder / "model").symlink_to((assets / "model").resolve())
    rows = (assets / "train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (folder / "my.jsonl").write_text("".join(rows[:200]), encoding="utf-8")
    return folder


def run_in(folder: Path, command: str, given: str = "") -> str:
    """Run a command of `ftctl` with the local model; return its output."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "finetune_operator",
            *command.replace(HUB_MODEL, "./model").split()[1:],
        ],
        cwd=folder,
        env={**os.environ, "XDG_CACHE_HOME": str(folder / "cache")},
        input=given,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


@pytest.mark.full
@pytest.mark.model
def test_the_quick_start_writes_the_shown_manifest_trains_and_chats(own_data: Path) -> None:
    init, run, chat = (shown.command for shown in OWN)
    [shown] = [text for language, text in BLOCK.findall(README) if language == "yaml"]
    job = own_data / "job.yaml"

    run_in(own_data, init)
    written = job.read_text(encoding="utf-8")
    expected = yaml.safe_load(shown.replace(f"hf://{HUB_MODEL}", "file://./model"))
    del (found := yaml.safe_load(written))["spec"]["observability"]
    assert found == expected
    for line in shown.splitlines():
        _, has_comment, comment = line.partition(" # ")
        assert not has_comment or f"# {comment}" in written

    found["spec"]["training"] = {**found["spec"]["training"], "maxSteps": 2}
    del found["spec"]["training"]["epochs"], found["spec"]["dataset"]["evalShare"]
    job.write_text(yaml.safe_dump(found), encoding="utf-8")  # shorter, for the time of this test
    assert "Chat with it" in run_in(own_data, run)
    assert run_in(own_data, chat, "What is RAM?\n").count("trained") == 1


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not in PATH")
def test_shown_job_is_accepted_and_listed_by_an_api_server(tmp_path: Path) -> None:
    with embedded_cluster(tmp_path, [custom_resource_definition()]) as cluster:
        environ = {**os.environ, "KUBECONFIG": str(cluster.kubeconfig)}
        applied, listed = (
            subprocess.run(
                shown.command.split(), cwd=ROOT, env=environ, capture_output=True, text=True
            )
            for shown in KUBECTL
        )

    assert " created" in applied.stdout, applied.stderr
    assert "llama-chat" in listed.stdout, listed.stderr


@pytest.mark.parametrize("shown", MAKE, ids=str)
def test_shown_make_target_exists(shown: Shown) -> None:
    done = subprocess.run(
        ["make", "--dry-run", *shown.command.split()[1:]], cwd=ROOT, capture_output=True, text=True
    )

    assert done.returncode == 0, done.stderr


def test_make_run_runs_the_quickstart_that_the_other_tests_check() -> None:
    done = subprocess.run(["make", "--dry-run", "run"], cwd=ROOT, capture_output=True, text=True)

    assert ".venv/bin/python examples/quickstart/prepare.py" in done.stdout
    assert ".venv/bin/ftctl run examples/00-quickstart.yaml" in done.stdout


def test_make_run_of_an_own_manifest_may_use_the_hub() -> None:
    words = ["make", "--dry-run", "run", "EXAMPLE=own.yaml"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)

    [command] = [line for line in done.stdout.splitlines() if "ftctl run own.yaml" in line]
    assert "OFFLINE" not in command


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 120


@pytest.mark.full
def test_the_trainer_runs_under_every_launcher_as_its_page_shows(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    (tmp_path / "job.yaml").write_text(SMALL_JOB)
    page = (ROOT / "docs" / "how-to" / "launchers.md").read_text(encoding="utf-8")
    first, *launches = [text for language, text in BLOCK.findall(page) if language == "sh"]
    place = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}

    def run(commands: str) -> None:
        done = subprocess.run(
            ["bash", "-ec", commands],
            cwd=tmp_path,
            env={**clean_environment(PYTHONWARNINGS="default"), **place, **root},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr

    run(first)
    config = TrainConfig.read(tmp_path / "config.json")
    assert [commands.split()[0] for commands in launches] == [
        "python",
        "torchrun",
        "accelerate",
        "mpirun",
    ]
    for commands in launches:
        if shutil.which(commands.split()[0]) or commands.startswith(("torchrun", "accelerate")):
            Path(config.termination_path).unlink(missing_ok=True)
            run(commands)
            assert Termination.read(Path(config.termination_path)).exit_code == 0, commands


def test_each_cell_of_the_comparison_has_a_source() -> None:
    page = (ROOT / "docs" / "compare.md").read_text(encoding="utf-8")
    _, part = page.split("\n## On Kubernetes and Azure\n")
    rows = re.findall(r"^\| (.+) \|$", part.split("\n## ")[0], re.MULTILINE)
    cells = [row.split(" | ") for row in rows]

    assert {len(row) for row in cells[1:]} == {5}
    assert [cell for _, *row in cells[1:] for cell in row if "](" not in cell] == []


def test_quickstart_opens_with_how_to_use_it() -> None:
    text = (ROOT / "examples" / "00-quickstart.yaml").read_text(encoding="utf-8")
    comments = [line for line in text.splitlines() if line.startswith("#")]

    for word in ("Run:", "Check:", "Logs:", "Clean:"):
        assert any(word in line for line in comments)
    assert yaml.safe_load(text)["kind"] == "FineTuneJob"
