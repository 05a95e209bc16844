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
from finetune_operator.api.validation import load_job
from finetune_trainer.config import Termination, TrainConfig
from support.cluster.clusters import embedded_cluster
from support.launch.launches import clean_environment
from support.launch.tiny_run import write_inputs

ROOT = Path(__file__).parents[3]
SHOWING = ("README.md", "CONTRIBUTING.md")
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
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
    assert {shown.command for shown in COMMANDS} == run | installing  # `make wheel-check`
    assert "make run" in {shown.command for shown in MAKE}
    assert FTCTL
    assert KUBECTL


@pytest.mark.model
@pytest.mark.parametrize("shown", FTCTL, ids=str)
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


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not in PATH")
@pytest.mark.parametrize("shown", KUBECTL, ids=str)
def test_shown_job_is_taken_by_an_api_server(shown: Shown, tmp_path: Path) -> None:
    with embedded_cluster(tmp_path, [custom_resource_definition()]) as cluster:
        done = subprocess.run(
            shown.command.split(),
            cwd=ROOT,
            env={**os.environ, "KUBECONFIG": str(cluster.kubeconfig)},
            capture_output=True,
            text=True,
        )

    assert done.returncode == 0, done.stderr
    assert " created" in done.stdout


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


def test_readme_manifest_is_the_quickstart(tmp_path: Path) -> None:
    blocks = BLOCK.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    [manifest] = [text for language, text in blocks if language == "yaml"]
    (tmp_path / "job.yaml").write_text(manifest)

    shown, _ = load_job(tmp_path / "job.yaml")
    shipped, _ = load_job(ROOT / "examples" / "00-quickstart.yaml")

    assert shown.spec == shipped.spec
    assert len(manifest.splitlines()) <= 14


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


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub derives them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    plain = [re.sub(r"\[(.*?)\]\(.*?\)", r"\1", title).lower() for title in titles]
    return {re.sub(r"[^\w\- ]", "", title).strip().replace(" ", "-") for title in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_a_page_lead_to_a_file_and_to_one_of_its_headings(page: Path) -> None:
    targets = re.findall(r"\]\(([^):]+)\)", page.read_text(encoding="utf-8"))
    broken = []
    for target in targets:
        path, _, anchor = target.partition("#")
        found = page.parent / path if path else page
        if not found.exists() or (anchor and anchor not in anchors(found)):
            broken.append(target)

    assert broken == []


def test_each_cell_of_the_comparison_has_a_source() -> None:
    _, part = (ROOT / "README.md").read_text(encoding="utf-8").split("\n## Beside others\n")
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
