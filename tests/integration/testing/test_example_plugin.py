"""examples/plugin can be installed, and the operator's commands find its backend."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PLUGIN = ROOT / "examples" / "plugin"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the package into an empty folder, without network."""
    folder = tmp_path_factory.mktemp("plugin")
    ignored = shutil.ignore_patterns("build", "*.egg-info", "__pycache__")
    source = shutil.copytree(PLUGIN, folder / "source", ignore=ignored)
    options = ["--no-index", "--no-deps", "--no-build-isolation", "--quiet"]
    pip = [sys.executable, "-m", "pip", "install", *options, "--target", str(folder / "site")]
    done = subprocess.run([*pip, str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / "site"


def ftctl(*arguments: str, site: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "finetune_operator", *arguments],
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        cwd=site,
    )


def test_the_package_contains_its_module_and_nothing_of_its_tests(site: Path) -> None:
    files = {path.relative_to(site).as_posix() for path in site.rglob("*") if path.is_file()}
    modules = {name for name in files if not name.endswith(".pyc") and ".dist-info/" not in name}
    names = ("__init__.py", "backend.py", "http_backend.py", "py.typed", "service.py")
    assert modules == {f"remote_backend/{name}" for name in names}


def test_doctor_lists_the_backend_once_the_package_is_installed(site: Path, tmp_path: Path) -> None:
    def remote(folder: Path) -> list[str]:
        found = json.loads(ftctl("doctor", "-o", "json", site=folder).stdout)
        backends = [one for one in found if one["topic"] == "backends"]
        assert {"kubernetes", "azureml", "local"} <= {one["name"] for one in backends}
        return [one["state"] for one in backends if one["name"] == "remote"]

    assert remote(site) == ["ok"]
    assert remote(tmp_path) == []


def test_validate_accepts_the_job_of_the_readme_once_the_package_is_installed(
    site: Path, tmp_path: Path
) -> None:
    _, _, shown = (PLUGIN / "README.md").read_text(encoding="utf-8").partition("```yaml\n")
    file = tmp_path / "job.yaml"
    file.write_text(shown.partition("```")[0])
    job = str(file)
    with_plugin, without = ftctl("validate", job, site=site), ftctl("validate", job, site=tmp_path)
    assert with_plugin.returncode == 0, with_plugin.stdout + with_plugin.stderr
    assert without.returncode != 0
    assert "spec.backend.type remote is not installed" in without.stdout + without.stderr
