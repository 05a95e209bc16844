"""Installs packages into the environment of an image; the Dockerfiles run it, once a layer.

pip and the build backend lie in an environment of their own, which is mounted while a layer is made
and is in no layer.

    python install.py environment    make it, and take pip out of the base
    python install.py packages PIP_OPTIONS … [-- PACKAGE/FOLDER …]    install into it, compile what
        is new, and leave out the modules of these folders
    python install.py torch cuda|cpu LOCK [REQUIREMENT]    install torch as locked, or this build
    python install.py code SOURCE LAYER    install the source tree below LAYER, and compile it
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
# PEP 552: the second word of bytecode is 1 for a hash of the source, and 2 more if that is checked.
UNCHECKED = b"\x01\0\0\0"
# For pip and what it runs: some packages write a set into their metadata, and what is imported
# leaves bytecode behind.
REPEATABLE = {"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"}
SECRETS = Path("/run/secrets")
WHEELS = Path("/wheels")
BUILDS_OF_TORCH = "https://download.pytorch.org/whl"
# In a lock, what only the CUDA build of torch wants, and torch itself.
CUDA_BUILD = re.compile(r"(torch|triton|nvidia-|cuda-)")
# Of the standard library, what no program of ours imports.
NOT_COMPILED = frozenset({"ensurepip", "idlelib", "lib2to3", "pydoc_data", "test", "turtledemo"})


def main(arguments: Sequence[str]) -> None:
    """Do what the arguments say."""
    what, *rest = arguments
    if what == "environment":
        make_environment()
    elif what == "packages":
        options, dropped = split(rest)
        install(options)
        drop(dropped)
        compile_new(sources(PACKAGES))
    elif what == "torch":
        install_torch(*rest)
        compile_new(sources(PACKAGES))
    elif what == "code":
        install_code(*map(Path, rest))
    else:
        raise SystemExit(f"{what!r} is none of environment, packages, torch and code")


def split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return what stands before `--`, and what stands after it."""
    before = list(arguments)
    after = before.index("--") if "--" in before else len(before)
    return before[:after], before[after + 1 :]


def make_environment() -> None:
    """Make an environment without pip, and take pip and its parts from the base."""
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
    # Official images ship the standard library without bytecode; a read-only root never gets any.
    compile_new(
        path for path in sources(library) if not NOT_COMPILED & set(path.relative_to(library).parts)
    )


def install(options: Sequence[str]) -> None:
    """Install with pip.

    Raises:
        SystemExit: pip failed.
    """
    pip(
        *("--python", str(PYTHON), "install", "--no-compile", "--no-warn-script-location"),
        *(("--find-links", str(WHEELS)) if any(WHEELS.glob("*.whl")) else ()),
        *options,
    )


def pip(*arguments: str) -> None:
    """Run the pip of the tools.

    Raises:
        SystemExit: it failed.
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
    """Install the CUDA build of torch that the lock names, or another build of it.

    A build has hashes of its own, so the lock can have those of one only; what every build needs is
    taken from the lock in any case.

    Raises:
        SystemExit: the build is for something else than the accelerator.
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
        build = "the CUDA build" if has_cuda else "a build without CUDA"
        raise SystemExit(
            f"ACCELERATOR={accelerator}, but {other or 'the locked torch'} is {build}; "
            "TORCH names another, such as torch==2.13.0+cpu, which the package index must have"
        )


def drop(folders: Sequence[str]) -> None:
    """Leave out the modules of these folders; their packages stay, and import them only on use.

    Raises:
        SystemExit: there are none.
    """
    for folder in folders:
        modules = [one for one in (PACKAGES / folder).glob("*.py") if one.name != "__init__.py"]
        if not modules:
            raise SystemExit(f"{PACKAGES / folder} has no modules, so none can be left out")
        for one in modules:
            one.unlink()


def install_code(source: Path, layer: Path) -> None:
    """Build the source tree with the tools' build backend, and install what it gives below `layer`.

    Raises:
        SystemExit: pip failed.
    """
    offline = ("--no-deps", "--no-index")
    pip("wheel", *offline, "--no-build-isolation", "--wheel-dir", "/built", str(source))
    (wheel,) = map(str, Path("/built").glob("*.whl"))
    install([*offline, "--root", str(layer), wheel])
    compile_new(sources(layer / PACKAGES.relative_to("/")), below=layer)


def sources(folder: Path) -> Iterator[Path]:
    """Yield the modules of a folder, in one order."""
    for parent, folders, files in os.walk(folder):
        folders[:] = sorted(set(folders) - {"__pycache__", "site-packages", "dist-packages"})
        yield from (Path(parent, name) for name in sorted(files) if name.endswith(".py"))


def compile_new(modules: Iterable[Path], below: Path | None = None) -> None:
    """Write the bytecode of modules that have none, or such as is compared with its source.

    Args:
        modules: The files, in an order that is always the same.
        below: What to leave out at the beginning of the paths that tracebacks show.

    Raises:
        SystemExit: it failed; a file that is no Python does not count.
    """
    new = b"".join(os.fsencode(one) + b"\0" for one in modules if not is_compiled(one))
    alone = ("-S", "-s", "-W", "ignore")  # neither packages nor warnings teach it names
    command = [sys.executable, *alone, str(BYTECODE), *([str(below)] if below else [])]
    done = subprocess.run(command, input=new, env={**os.environ, **REPEATABLE})
    if done.returncode:
        raise SystemExit(done.returncode)


def is_compiled(module: Path) -> bool:
    """Say whether a module has bytecode that is never compared with its source.

    What imported it while a layer was made may have left such as is compared, and has the time of
    the build in it.
    """
    try:
        with open(cache_from_source(module), "rb") as bytecode:
            return bytecode.read(8)[4:] == UNCHECKED
    except FileNotFoundError:
        return False


if __name__ == "__main__":
    main(sys.argv[1:])
