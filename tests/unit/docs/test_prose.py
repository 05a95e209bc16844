"""The ratchet of `make check` on the words and constructions to avoid (docs/prose.py)."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "docs" / "prose.py"
TWO_WORDS = '"""Read the file anew, for ever."""\n'


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A git repository with the script, a package of two occurrences, and their record."""
    write(tmp_path, "operator/product/loader.py", TWO_WORDS)
    write(tmp_path, "docs/prose.json", json.dumps({"operator/product": 2}))
    shutil.copy(SCRIPT, tmp_path / "docs")
    git(tmp_path, "init", "-q")
    commit(tmp_path)
    return tmp_path


def write(checkout: Path, path: str, text: str) -> None:
    (checkout / path).parent.mkdir(parents=True, exist_ok=True)
    (checkout / path).write_text(text)


def git(checkout: Path, *command: str) -> None:
    identity = ("-c", "user.name=test", "-c", "user.email=test@example.com")
    subprocess.run(["git", *identity, *command], cwd=checkout, check=True, capture_output=True)


def commit(checkout: Path) -> None:
    git(checkout, "add", "-A")
    git(checkout, "commit", "-qm", "state")


def run(checkout: Path, *options: str) -> tuple[int, str]:
    command = [sys.executable, "docs/prose.py", *options]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_unchanged_counts_pass_without_output(checkout: Path) -> None:
    assert run(checkout) == (0, "")


def test_new_file_with_a_listed_word_names_the_package_and_how_to_find_it(checkout: Path) -> None:
    write(checkout, "operator/product/writer.py", "# nobody reads it\n")

    assert run(checkout) == (
        1,
        "operator/product: has 3 words or constructions to avoid, 2 are allowed; "
        "reword them: python docs/prose.py --list operator/product\n",
    )
    assert run(checkout, "--list", "operator/product/writer.py")[1].startswith(
        "operator/product/writer.py:1: word\n"
    )


def test_new_package_starts_at_zero(checkout: Path) -> None:
    write(checkout, "operator/other/writer.py", "# nobody reads it\n")

    code, text = run(checkout)

    assert code == 1
    assert text.startswith("operator/other: has 1 words or constructions to avoid, 0 are allowed")


def test_renamed_package_takes_its_count_along(checkout: Path) -> None:
    (checkout / "operator/product").rename(checkout / "operator/renamed")

    assert run(checkout) == (
        1,
        "docs/prose.json is stale: counts fell; run: python docs/prose.py --write\n",
    )
    assert run(checkout, "--write") == (0, "")
    assert run(checkout) == (0, "")


def test_renamed_package_with_one_more_word_is_refused(checkout: Path) -> None:
    (checkout / "operator/product").rename(checkout / "operator/renamed")
    write(checkout, "operator/renamed/writer.py", "# nobody reads it\n")

    assert run(checkout, "--write")[0] == 1


@pytest.mark.parametrize(
    ("path", "text"),
    [
        pytest.param("docs/a.md", "# Page\n\n```\nnobody\n```\n`told`\n", id="code in Markdown"),
        pytest.param("operator/product/a.py", 'KEY = "nobody"\n', id="a key of one word"),
        pytest.param("operator/product/a.py", "# made of two, do nothing\n", id="idioms"),
        pytest.param("crds/a.yaml", "# nobody\n", id="generated file"),
        pytest.param(
            "CHANGELOG.md", "## Unreleased\n\n## 0.1.0\n\nnobody\n", id="released changelog section"
        ),
    ],
)
def test_text_that_is_no_prose_or_idiomatic_is_not_counted(
    checkout: Path, path: str, text: str
) -> None:
    write(checkout, path, text)

    assert run(checkout, "--write", path) == (0, "")
    assert sum(json.loads((checkout / "docs/prose.json").read_text()).values()) == 2


def test_counts_that_fell_must_be_recorded(checkout: Path) -> None:
    write(checkout, "operator/product/loader.py", '"""Read the file indefinitely."""\n')

    assert run(checkout) == (
        1,
        "docs/prose.json is stale: counts fell; run: python docs/prose.py --write\n",
    )
    assert run(checkout, "--write") == (0, "")
    assert json.loads((checkout / "docs/prose.json").read_text())["operator/product"] == 0


@pytest.mark.parametrize("is_committed", [False, True])
def test_record_raised_by_hand_is_refused(checkout: Path, *, is_committed: bool) -> None:
    write(checkout, "operator/product/writer.py", "# nobody reads it\n")
    write(checkout, "docs/prose.json", json.dumps({"operator/product": 3}))
    if is_committed:
        commit(checkout)

    assert run(checkout) == (
        1,
        "operator/product: docs/prose.json was raised to 3 words or constructions to avoid, "
        "2 are allowed; reword them: python docs/prose.py --list operator/product\n",
    )
