"""Install packages into the environment of an image; the Dockerfiles run it once per layer.

pip and the build backend are in a separate environment, which is mounted during the build and is
part of no layer.

    python install.py environment    create the environment and remove pip from the base
    python install.py packages PIP_OPTIONS … [-- PACKAGE/FOLDER …]    install packages, delete the
        modules of these folders and compile new modules
    python install.py torch cuda|cpu LOCK [REQUIREMENT]    install the locked build of torch, or the
        build that REQUIREMENT names
    python install.py code SOURCE LAYER    install the source tree below LAYER and compile it
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import cache_from_source
from pathlib import Path

ENVIRONMENT = Path("/opt/finetune")
PYTHON = ENVIRONMENT / "bin" / "python"
PACKAGES = ENVIRONMENT / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
BYTECODE = Path(__file__).with_name("bytecode.py")
# PEP 552: bit 0 of the second word marks bytecode with a hash of its source, bit 1 that imports
# check the hash.
UNCHECKED = b"\x01\0\0\0"
# For pip and its child processes: some packages write a set into their metadata, and imports would
# write bytecode.
REPEATABLE = {"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"}
SECRETS = Path("/run/secrets")
WHEELS = Path("/wheels")
BUILDS_OF_TORCH = "https://download.pytorch.org/whl"
# Packages of a lock that are torch itself or dependencies of its CUDA build only.
CUDA_BUILD = re.compile(r"(torch|triton|nvidia-|cuda-)")
# Parts of the standard library that no program of the images imports.
NOT_COMPILED = frozenset({"ensurepip", "idlelib", "lib2to3", "pydoc_data", "test", "turtledemo"})


def main(arguments: Sequence[str]) -> None:
    """Run the command that the arguments name.

    Raises:
        SystemExit: The command is unknown or has failed.
    """
    command, *rest = arguments
    if command == "environment":
        create_environment()
    elif command == "packages":
        options, dropped = split(rest)
        install(options)
        drop(dropped)
        compile_new(sources(PACKAGES))
    elif command == "torch":
        install_torch(*rest)
        compile_new(sources(PACKAGES))
    elif command == "code":
        install_code(*map(Path, rest))
    else:
        raise SystemExit(f"unknown command {command!r}; use environment, packages, torch or code")


def split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the arguments before `--` and the arguments after it."""
    before = list(arguments)
    after = before.index("--") if "--" in before else len(before)
    return before[:after], before[after + 1 :]


def create_environment() -> None:
    """Create an environment without pip, and remove pip and its parts from the base."""
    command = [sys.executable, "-m", "venv", "--without-pip", str(ENVIRONMENT)]
    subprocess.run(command, check=True, env={**os.environ, **REPEATABLE})
    library = Path(sysconfig.get_path("stdlib"))
    own = [library / "ensurepip", Path("/usr/share/python-wheels")]
    for name in ("pip", "setuptools", "wheel", "pkg_resources", "_distutils_hack"):
        own += [library / "site-packages" / name]
        own += (library / "site-packages").glob(f"{name}-*.dist-info")
    own += [library / "site-packages" / "distutils-precedence.pth"]
    own += Path(sys.base_prefix, "bin").glob("pip*")
    for path in own:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    # Official images ship the standard library without bytecode, and a read-only root file system
    # would never cache any.
    compile_new(
        path for path in sources(library) if not NOT_COMPILED & set(path.relative_to(library).parts)
    )


def install(options: Sequence[str]) -> None:
    """Install with pip.

    Raises:
        SystemExit: pip has failed.
    """
    pip(
        *("--python", str(PYTHON), "install", "--no-compile", "--no-warn-script-location"),
        *(("--find-links", str(WHEELS)) if any(WHEELS.glob("*.whl")) else ()),
        *options,
    )


def pip(*arguments: str) -> None:
    """Run the pip of the mounted environment.

    Raises:
        SystemExit: pip has failed.
    """
    quiet = ("--quiet", "--no-cache-dir", "--disable-pip-version-check")
    given = {"PIP_CONFIG_FILE": SECRETS / "pip.conf", "PIP_CERT": SECRETS / "ca.pem"}
    secrets = {name: str(path) for name, path in given.items() if path.is_file()}
    command = (sys.executable, "-m", "pip", *quiet, *arguments)
    settings = {**REPEATABLE, **secrets, "PIP_ROOT_USER_ACTION": "ignore"}
    done = subprocess.run(command, env={**os.environ, **settings})
    if done.returncode:
        raise SystemExit(done.returncode)


def install_torch(accelerator: str, lock: str, other: str = "") -> None:
    """Install the CUDA build of torch that the lock names, or another build.

    Each build has its own hashes, and the lock contains the hashes of one build. Dependencies that
    all builds share always come from the lock.

    Raises:
        SystemExit: The build does not match the accelerator.
    """
    lines = Path(lock).read_text(encoding="utf-8")
    parts = re.split(r"^(?=[a-z0-9])", lines, flags=re.MULTILINE)
    if other:
        parts = [one for one in parts if not CUDA_BUILD.match(one)]
    chosen = Path("/tmp/torch.lock")
    chosen.write_text("".join(parts), encoding="utf-8")
    install(["--no-deps", "--require-hashes", "-r", str(chosen)])
    chosen.unlink()
    if other:
        _, plus, build = other.partition("+")
        is_here = any(WHEELS.glob(f"torch-*+{build}-*.whl")) if plus else True
        install([other] if is_here else [other, "--extra-index-url", f"{BUILDS_OF_TORCH}/{build}"])
    version = (PACKAGES / "torch" / "version.py").read_text(encoding="utf-8")
    has_cuda = re.search(r"^cuda\b.*= '", version, flags=re.MULTILINE) is not None
    if has_cuda != (accelerator == "cuda"):
        build = "a CUDA build" if has_cuda else "a build without CUDA"
        raise SystemExit(
            f"ACCELERATOR={accelerator}, but {other or 'the locked torch'} is {build}; "
            "set TORCH to a matching build on the package index, such as torch==2.13.0+cpu"
        )


def drop(folders: Sequence[str]) -> None:
    """Delete the modules of folders, except `__init__.py`, which imports them on first use.

    Raises:
        SystemExit: A folder has no modules.
    """
    for folder in folders:
        modules = [one for one in (PACKAGES / folder).glob("*.py") if one.name != "__init__.py"]
        if not modules:
            raise SystemExit(
                f"{PACKAGES / folder} has no modules to delete; correct the Dockerfile"
            )
        for one in modules:
            one.unlink()


def install_code(source: Path, layer: Path) -> None:
    """Build a wheel of the source tree with the mounted build backend and install it below `layer`.

    Raises:
        SystemExit: pip has failed.
    """
    offline = ("--no-deps", "--no-index")
    pip("wheel", *offline, "--no-build-isolation", "--wheel-dir", "/built", str(source))
    (wheel,) = map(str, Path("/built").glob("*.whl"))
    install([*offline, "--root", str(layer), wheel])
    compile_new(sources(layer / PACKAGES.relative_to("/")), below=layer)


def sources(folder: Path) -> Iterator[Path]:
    """Yield the modules below a folder, sorted, without nested site-packages."""
    for parent, folders, files in os.walk(folder):
        folders[:] = sorted(set(folders) - {"__pycache__", "site-packages", "dist-packages"})
        yield from (Path(parent, name) for name in sorted(files) if name.endswith(".py"))


def compile_new(modules: Iterable[Path], below: Path | None = None) -> None:
    """Write bytecode for modules without any, or whose bytecode imports compare with the source.

    Args:
        modules: Files in a reproducible order.
        below: Prefix to remove from the paths in tracebacks.

    Raises:
        SystemExit: Bytecode cannot be written. Files that are not valid Python are ignored.
    """
    new = b"".join(os.fsencode(one) + b"\0" for one in modules if not is_compiled(one))
    alone = ("-S", "-s", "-W", "ignore")  # packages and warnings would intern further names
    command = [sys.executable, *alone, str(BYTECODE), *([str(below)] if below else [])]
    done = subprocess.run(command, input=new, env={**os.environ, **REPEATABLE})
    if done.returncode:
        raise SystemExit(done.returncode)


def is_compiled(module: Path) -> bool:
    """Whether a module has bytecode that imports never compare with its source.

    Imports during the build may have written the compared kind, which contains the build's time.
    """
    try:
        with open(cache_from_source(module), "rb") as bytecode:
            return bytecode.read(8)[4:] == UNCHECKED
    except FileNotFoundError:
        return False


if __name__ == "__main__":
    main(sys.argv[1:])
