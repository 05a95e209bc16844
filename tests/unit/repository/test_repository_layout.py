"""The shape of the repository: what would break imports, read badly or tell of one machine."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SOURCES = sorted(path for root in ("operator", "trainer") for path in (ROOT / root).rglob("*.py"))
LONGEST_FILE = 500
LONGEST_FUNCTION = 80
NO_MEANING = {"utils", "util", "helpers", "helper", "common", "misc"}

# Folders of a user's or root's home, and the usual places of temporary or build trees. Written in
# pieces, so that this file does not contain what it looks for.
MACHINE_PATH = re.compile(
    r"(?<![\w.:$}/-])/(?:"
    + "|".join(["ro" + "ot/", "wo" + "rk/", "op" + "t/py", "op" + "t/wh"])
    + ")"
)
# The continuous integration script may look beside the checkout for a cluster to test on.
MAY_NAME_NEIGHBOURS = {".ci/run"}


def repository_files() -> list[Path]:
    """List what git tracks, or would track: neither environments nor caches."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listed.returncode:
        pytest.skip("not a git checkout, so there is no list of the repository's files")
    paths = (ROOT / name for name in listed.stdout.split("\0") if name)
    return [path for path in paths if path.is_file()]


def test_operator_folder_is_no_package_as_it_would_shadow_the_standard_library() -> None:
    assert not (ROOT / "operator" / "__init__.py").exists()
    assert not (ROOT / "trainer" / "__init__.py").exists()


def test_no_folder_called_operator_below_tests_or_the_packages() -> None:
    found = [
        folder.relative_to(ROOT)
        for top in ("tests", "operator", "trainer", "examples", "docs")
        for folder in (ROOT / top).rglob("operator")
    ]

    assert found == []


def test_no_module_is_named_for_nothing_in_particular() -> None:
    assert [path.relative_to(ROOT) for path in SOURCES if path.stem in NO_MEANING] == []


def test_no_source_file_outgrows_one_idea() -> None:
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines())
        for path in SOURCES
    }

    assert {name: lines for name, lines in lengths.items() if lines > LONGEST_FILE} == {}


def test_no_function_has_to_be_scrolled() -> None:
    long = {
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}": lines
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (lines := (node.end_lineno or node.lineno) - node.lineno + 1) > LONGEST_FUNCTION
    }

    assert long == {}


def test_repository_tells_nothing_of_the_machine_it_was_written_on() -> None:
    found = []
    for path in repository_files():
        name = str(path.relative_to(ROOT))
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # no text, so nobody reads a path in it
        if name not in MAY_NAME_NEIGHBOURS:
            found += [
                f"{name}:{number}: {line.strip()}"
                for number, line in enumerate(text.splitlines(), start=1)
                if MACHINE_PATH.search(line) or ("../" + "shared") in line
            ]

    assert found == []


def test_a_path_of_one_machine_would_be_found() -> None:
    assert MACHINE_PATH.search("see /ro" + "ot/notes")
    assert MACHINE_PATH.search('"/wo' + 'rk/main"')
    assert not MACHINE_PATH.search("hf://ORG/wo" + "rk/x")
