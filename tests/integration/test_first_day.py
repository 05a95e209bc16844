"""The first day of a user: from rows to an answer in four commands, from the wheel alone."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support.data.text_fixtures import tiny_model

ROOT = Path(__file__).parents[2]
ROWS = 50
WORDS = ("red", "green", "blue", "white", "black")
FOREIGN = re.compile(
    r"Warning|warn\(|Traceback|site-packages|it/s\]|%\||Loading weights|Writing model shards"
)


def question(number: int) -> str:
    return f"Which colour has the number {number}?"


def answer(number: int) -> str:
    return f"The number {number} has the colour {WORDS[number % len(WORDS)]}."


def turns(number: int, role: str, text: str, user: str, assistant: str) -> list[dict[str, str]]:
    return [
        {role: user, text: question(number)},
        {role: assistant, text: answer(number)},
    ]


SHAPES: dict[str, Callable[[int], dict[str, Any]]] = {
    "messages": lambda n: {"messages": turns(n, "role", "content", "user", "assistant")},
    "sharegpt": lambda n: {"conversations": turns(n, "from", "value", "human", "gpt"), "id": n},
    "alpaca": lambda n: {"instruction": question(n), "input": "", "output": answer(n)},
    "completion": lambda n: {"prompt": question(n), "completion": answer(n)},
    "text": lambda n: {"text": f"{question(n)} {answer(n)}"},
}


@dataclass
class Installed:
    """The wheel in an environment of its own; what it depends on comes from this one."""

    programs: Path
    folder: Path

    def ftctl(self, *arguments: str) -> str:
        """Call `ftctl` in the folder; return what it printed, which names no other library."""
        kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
        done = subprocess.run(
            [str(self.programs / "ftctl"), *arguments],
            cwd=self.folder,
            env={**kept, "XDG_CACHE_HOME": str(self.folder / "cache"), "HF_HUB_OFFLINE": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        printed = f"$ ftctl {' '.join(arguments)}\n{done.stdout}{done.stderr}"
        print(printed)
        assert done.returncode == 0, printed
        foreign = [line for line in printed.splitlines() if FOREIGN.search(line)]
        assert not foreign, foreign
        return done.stdout


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel and install it; return the folder of its programs."""
    folder = tmp_path_factory.mktemp("installed")
    source = folder / "source"
    for name in ("operator/finetune_operator", "trainer/finetune_trainer"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=source, check=True, capture_output=True)
    environment = folder / "environment"
    venv.create(environment, symlinks=True)
    [packages] = environment.glob("lib/python*/site-packages")
    [wheel] = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(packages)
    # A path file adds no path file of the folder that it names, so no editable installation.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    python = environment / "bin" / "python"
    program = environment / "bin" / "ftctl"
    program.write_text(
        f"#!{python}\nimport sys\nfrom finetune_operator.cli.app import main\nsys.exit(main())\n"
    )
    program.chmod(0o755)
    return program.parent


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("base") / "model")


@pytest.fixture
def here(programs: Path, model: Path, tmp_path: Path) -> Installed:
    """The wheel in a folder with the model."""
    (tmp_path / "model").symlink_to(model)
    return Installed(programs, tmp_path)


def init(here: Installed, shape: str) -> None:
    """Write rows of a shape, and their manifest by `ftctl init`."""
    lines = (json.dumps(SHAPES[shape](number)) + "\n" for number in range(ROWS))
    (here.folder / "rows.jsonl").write_text("".join(lines))
    here.ftctl("init", "--model", "./model", "--data", "rows.jsonl", "-o", "job.yaml")


def run(here: Installed) -> None:
    """Run the job; the loss on held-out rows falls."""
    done = here.ftctl("run", "job.yaml", "--plain")
    [(before, after)] = re.findall(r"held-out loss +([\d.]+) → ([\d.]+)", done)
    assert float(after) < float(before)
    assert "ftctl chat job.yaml" in done


@pytest.mark.full
def test_rows_become_an_answer_in_four_commands(here: Installed) -> None:
    init(here, "messages")
    assert "finetune_operator" not in os.listdir(here.folder)
    here.ftctl("preview", "job.yaml")
    run(here)
    chat = here.ftctl("chat", "job.yaml", "--prompt", question(1), "--max-new-tokens", "8")
    assert [line.partition(":")[0] for line in chat.splitlines()[:3]] == [
        "question",
        "base",
        "trained",
    ]


@pytest.mark.full
@pytest.mark.parametrize("shape", [one for one in SHAPES if one != "messages"])
def test_rows_of_another_shape_train(here: Installed, shape: str) -> None:
    init(here, shape)
    run(here)
