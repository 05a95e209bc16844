"""What `pip install finetune-operator` without extras gives, made of links in a moment.

The folder holds our packages, their metadata as pyproject.toml has it now, and of what is installed
here only what the plain package asks for, directly or through others.
"""

import os
import re
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[3]
_OURS = ("operator/finetune_operator", "trainer/finetune_trainer")


@dataclass(frozen=True)
class PlainInstall:
    """An import path without the extras' packages.

    Attributes:
        folder: What stands in for site-packages.
    """

    folder: Path

    def run(
        self, module: str, *arguments: str, cwd: Path = ROOT, **environ: str
    ) -> subprocess.CompletedProcess[str]:
        """Run `python -m module`, which finds nothing but the folder and Python's own library."""
        variables = {**os.environ, "PYTHONPATH": str(self.folder), "COLUMNS": "200", **environ}
        return subprocess.run(
            [sys.executable, "-S", "-W", "error", "-m", module, *arguments],
            capture_output=True,
            text=True,
            cwd=cwd,
            env=variables,
            timeout=120,
        )

    def ftctl(
        self, *arguments: str, cwd: Path = ROOT, **environ: str
    ) -> subprocess.CompletedProcess[str]:
        """Run `ftctl`."""
        return self.run("finetune_operator", *arguments, cwd=cwd, **environ)


def plain_install(folder: Path) -> PlainInstall:
    """Make it in an empty folder."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for ours in _OURS:
        (folder / Path(ours).name).symlink_to(ROOT / ours)
    _write_metadata(folder / f"finetune_operator-{project['version']}.dist-info", project)
    todo, done = [Requirement(one) for one in project["dependencies"]], set[str]()
    while todo:
        wanted = todo.pop()
        name = re.sub(r"[-_.]+", "-", wanted.name).lower()
        if name in done or (wanted.marker and not wanted.marker.evaluate({"extra": ""})):
            continue
        done.add(name)
        found = distribution(name)
        _link(found, folder)
        todo += [Requirement(one) for one in found.requires or ()]
    return PlainInstall(folder)


def _link(found: Distribution, folder: Path) -> None:
    """Link each file or folder that the distribution has at the top of site-packages."""
    tops = {file.parts[0] for file in found.files or () if file.parts[0] not in ("..", "bin")}
    for top in tops - {"__pycache__"}:
        there = folder / top
        if not there.exists():
            there.symlink_to(Path(str(found.locate_file(top))).resolve())


def _write_metadata(folder: Path, project: dict[str, object]) -> None:
    folder.mkdir()
    lines = ["Metadata-Version: 2.1", f"Name: {project['name']}", f"Version: {project['version']}"]
    plain, extras = project["dependencies"], project["optional-dependencies"]
    assert isinstance(plain, list)
    assert isinstance(extras, dict)
    lines += [f"Requires-Dist: {one}" for one in plain]
    for extra, wanted in extras.items():
        lines += [f"Requires-Dist: {one}; extra == '{extra}'" for one in wanted]
    (folder / "METADATA").write_text("\n".join([*lines, ""]))
    points = project["entry-points"]
    assert isinstance(points, dict)
    text = [
        f"[{group}]\n" + "".join(f"{a} = {b}\n" for a, b in of.items())
        for group, of in points.items()
    ]
    (folder / "entry_points.txt").write_text("\n".join(text))
