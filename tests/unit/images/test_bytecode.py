"""Bytecode and package metadata in the images depend on the sources only."""

import os
import py_compile
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pydantic
import pytest

IN_IMAGE = Path(__file__).parents[3] / "operator" / "images" / "in_image"
COMPILE = (
    "import sys, pathlib, install\n"
    "folder = pathlib.Path(sys.argv[1])\n"
    "install.compile_new(install.sources(folder), below=folder)\n"
)
PLAIN = "def greet(name):\n    return f'hello {name}'\n"
SETUP = """\
import setuptools

wanted = {one: [f"{one}-package"] for one in ("amber", "blue", "crimson", "denim", "ecru", "fawn")}
every = list({package for packages in wanted.values() for package in packages})
setuptools.setup(name="coloured", version="1.0", extras_require={**wanted, "all": every})
"""


def python(program: str, *arguments: str | Path, seed: str, cpus: int | None = None) -> None:
    """Run a program that can import install.py in a new process.

    Args:
        program: Source of the program.
        arguments: Arguments of the program.
        seed: Hash seed of the process.
        cpus: Number of processors that the process may use; None for all.
    """
    done = attempt(program, *arguments, seed=seed, cpus=cpus)
    assert done.returncode == 0, done.stderr


def attempt(
    program: str, *arguments: str | Path, seed: str, cpus: int | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run such a program and return its result, failed or not."""
    chosen = f"import os; os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[:cpus]})\n"
    env = {**os.environ, "PYTHONPATH": str(IN_IMAGE), "PYTHONHASHSEED": seed}
    command = [sys.executable, "-c", chosen + program, *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True)


def bytecode(folder: Path) -> dict[str, bytes]:
    """Return the bytecode below a folder by relative path."""
    found = folder.rglob("*.pyc")
    return {str(one.relative_to(folder)): one.read_bytes() for one in found}


def modules_in(folder: Path) -> Path:
    """Copy packages into a folder and add a module whose bytecode depends on interned names."""
    folder.mkdir(parents=True)
    names = "{'CONTENT_TYPE', 'CONTENT_LENGTH'}"
    one, other = (f"    def m{n}(self, key):\n        return key in {names}, {n}\n" for n in (1, 2))
    (folder / "twice.py").write_text(f"class Headers:\n{one}{other}")
    for source in (Path(pydantic.__file__).parent, IN_IMAGE.parents[1] / "finetune_operator"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(source, folder / source.name, ignore=ignored)
    return folder


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param({"cpus": 1}, {"cpus": 2}, id="processors"),
        pytest.param({"seed": "1"}, {"seed": "2"}, id="hashes"),
        pytest.param({}, {"before": "import http.server"}, id="names"),
    ],
)
def test_bytecode_depends_on_the_modules_only(
    tmp_path: Path, one: dict[str, Any], other: dict[str, Any]
) -> None:
    results = []
    for folder, given in (("one", one), ("a/longer/path", other)):
        place = modules_in(tmp_path / folder)
        before = given.get("before", "")
        python(f"{before}\n{COMPILE}", place, seed=given.get("seed", "0"), cpus=given.get("cpus"))
        results.append(bytecode(place))
    assert len(results[0]) == len(list((tmp_path / "one").rglob("*.py"))) > 300
    assert not {path for path, content in results[0].items() if results[1][path] != content}


def test_bytecode_with_a_time_that_an_import_wrote_is_recompiled(tmp_path: Path) -> None:
    (tmp_path / "left.py").write_text(PLAIN)
    py_compile.compile(
        str(tmp_path / "left.py"), invalidation_mode=py_compile.PycInvalidationMode.TIMESTAMP
    )
    assert [content[4:8] for content in bytecode(tmp_path).values()] == [b"\0\0\0\0"]
    python(COMPILE, tmp_path, seed="0")
    assert [content[4:8] for content in bytecode(tmp_path).values()] == [b"\1\0\0\0"]


def test_bytecode_of_a_lower_layer_is_not_rewritten(tmp_path: Path) -> None:
    (tmp_path / "below.py").write_text(PLAIN)
    python(COMPILE, tmp_path, seed="0")
    (compiled,) = tmp_path.rglob("*.pyc")
    before = compiled.stat().st_ino
    python(COMPILE, tmp_path, seed="0")
    assert compiled.stat().st_ino == before


def test_tracebacks_show_the_path_in_the_image(tmp_path: Path) -> None:
    module = tmp_path / "opt" / "greeting.py"
    module.parent.mkdir()
    module.write_text(PLAIN)
    python(COMPILE, tmp_path, seed="0")
    (content,) = bytecode(tmp_path).values()
    assert b"/opt/greeting.py" in content
    assert str(tmp_path).encode() not in content


def test_invalid_python_in_a_template_does_not_stop_other_modules_from_being_compiled(
    tmp_path: Path,
) -> None:
    (tmp_path / "a_template.py").write_text("def {{ name }}(): pass\n")
    (tmp_path / "b_latin.py").write_bytes(b"name = '\xe9'\n")
    (tmp_path / "module.py").write_text(PLAIN)
    python(COMPILE, tmp_path, seed="0")
    assert [Path(one).name.partition(".")[0] for one in bytecode(tmp_path)] == ["module"]


def test_bytecode_that_cannot_be_written_fails_the_build(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(PLAIN)
    (tmp_path / "__pycache__").write_text("a file where the folder should be")
    done = attempt(COMPILE, tmp_path, seed="0")
    assert done.returncode != 0
    assert "__pycache__" in done.stderr


def test_a_package_that_writes_a_set_into_its_metadata_is_built_the_same(tmp_path: Path) -> None:
    build = (
        "import sys, install\n"
        "install.pip('wheel', '--no-deps', '--no-index', '--no-build-isolation',\n"
        "            '--wheel-dir', sys.argv[1], sys.argv[2])\n"
    )
    source = tmp_path / "coloured"
    source.mkdir()
    (source / "setup.py").write_text(SETUP)
    contents = []
    for number, seed in enumerate(("1", "2")):
        python(build, tmp_path / str(number), source, seed=seed)
        (wheel,) = (tmp_path / str(number)).glob("*.whl")
        with zipfile.ZipFile(wheel) as opened:
            parts = (opened.read(f"coloured-1.0.dist-info/{one}") for one in ("METADATA", "RECORD"))
            contents.append(b"".join(parts))
    assert b'extra == "all"' in contents[0].replace(b"'", b'"')
    assert contents[0] == contents[1]
