"""Write the lock files of the images: every package by version and hash, for each platform.

    python operator/images/lock_images.py            resolve again, with uv (make locks)
    python operator/images/lock_images.py --check    list outdated locks; needs no network

The head of each lock stores two digests: of the requirements that were resolved, and of the lock's
own lines. The check therefore needs neither an index nor a resolver.
"""

import hashlib
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
OLDEST_PYTHON = "3.11"
Packages = dict[str, str]  # lines of a lock by `name==version` and marker


def requirements(project: Mapping[str, object]) -> dict[str, list[str]]:
    """Return the requirements of each lock from a parsed pyproject.toml."""
    about, system = project["project"], project["build-system"]
    assert isinstance(about, dict)
    assert isinstance(system, dict)
    extras = about["optional-dependencies"]

    def of(*names: str) -> list[str]:
        wanted = {*about["dependencies"], *(one for name in names for one in extras[name])}
        return sorted(one for one in wanted if not one.startswith(f"{about['name']}["))

    trainer = of("trainer", "deepspeed", "qlora", "mlflow")
    torch = [one for one in trainer if re.match(r"torch\b", one)]
    return {
        "operator/images/tools.lock": sorted({"pip", *system["requires"]}),
        "operator/requirements.lock": of("operator", "azureml"),
        # setuptools builds deepspeed, which has no wheel.
        "trainer/torch.lock": [*torch, "setuptools"],
        "trainer/requirements.lock": trainer,
        "trainer/gpu.lock": of("trainer", "deepspeed", "qlora", "mlflow", "gpu"),
    }


def head(wanted: Iterable[str], body: str) -> str:
    """Return the head of a lock, three comment lines with the two digests."""
    return (
        "# From `make locks`; `make check` compares the digests with pyproject.toml and the file.\n"
        f"# requirements: {_digest(chr(10).join(wanted))}\n"
        f"# packages: {_digest(body)}\n"
    )


def faults(root: Path) -> list[str]:
    """Return a message for each lock that does not match pyproject.toml or was edited."""
    found = []
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    for name, wanted in requirements(project).items():
        file = root / name
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True) if file.exists() else []
        about, body = "".join(lines[:3]), "".join(lines[3:])
        if not lines:
            found.append(f"{name} is missing; run: make locks")
        elif about == head(wanted, body):
            continue
        elif _digest("\n".join(wanted)) not in about:
            found.append(f"{name} is out of date with pyproject.toml; run: make locks")
        else:
            found.append(f"{name} was edited by hand; run: make locks")
    return found


def resolve(wanted: Sequence[str], given: Packages | None = None) -> Packages:
    """Resolve requirements with uv; packages in `given` keep their versions.

    Raises:
        SystemExit: uv is not installed or finds no solution.
    """
    command = [sys.executable, "-m", "uv", "pip", "compile", "-", "--universal", "--quiet"]
    command += ["--python-version", OLDEST_PYTHON, "--generate-hashes", "--no-annotate"]
    command += ["--no-header"]
    with tempfile.TemporaryDirectory() as folder:
        pins = Path(folder, "pins.txt")
        pins.write_text("\n".join(given or ()), encoding="utf-8")
        command += ["--constraints", str(pins)]
        asked = "\n".join(wanted)
        done = subprocess.run(command, input=asked, text=True, stdout=subprocess.PIPE)
    if done.returncode:
        raise SystemExit(f"uv cannot resolve {', '.join(wanted)}; see above")
    parts = re.split(r"^(?=[a-z0-9])", done.stdout, flags=re.MULTILINE)
    return {one.partition(" \\")[0]: one for one in parts if one.strip()}


def write(root: Path) -> None:
    """Resolve and write all locks."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    wanted = requirements(project)
    alone = ("operator/images/tools.lock", "operator/requirements.lock")
    locks = {name: resolve(wanted[name]) for name in alone}
    # One resolution for the trainer, split into the layers of its image.
    whole = resolve(wanted["trainer/gpu.lock"])
    torch = resolve(wanted["trainer/torch.lock"], whole)
    basic = resolve(wanted["trainer/requirements.lock"], whole)
    locks["trainer/torch.lock"] = torch
    locks["trainer/requirements.lock"] = _without(basic, torch)
    locks["trainer/gpu.lock"] = _without(_without(whole, basic), torch)
    for name, packages in locks.items():
        body = "".join(packages.values())
        (root / name).write_text(head(wanted[name], body) + body, encoding="utf-8")
        print(f"{name}: {len(packages)} packages")


def _without(packages: Packages, others: Packages) -> Packages:
    names = {_name(one) for one in others}
    return {key: lines for key, lines in packages.items() if _name(key) not in names}


def _name(key: str) -> str:
    return key.partition("==")[0]


def _digest(text: str) -> str:
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def main() -> int:
    """Write the locks, or list outdated locks with `--check`; return the exit code."""
    if "--check" not in sys.argv[1:]:
        write(ROOT)
        return 0
    found = faults(ROOT)
    for one in found:
        print(one)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
