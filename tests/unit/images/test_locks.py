"""Lock files of the images: outdated and edited locks are reported without a network."""

import re
import shutil
import tomllib
from pathlib import Path

import pytest

import lock_images

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
LOCKS = sorted(lock_images.requirements(PROJECT))


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the locks and of pyproject.toml."""
    for name in (*LOCKS, "pyproject.toml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def change(file: Path, old: str, new: str) -> None:
    text = file.read_text(encoding="utf-8")
    assert old in text
    file.write_text(text.replace(old, new, 1), encoding="utf-8")


def test_the_locks_follow_pyproject() -> None:
    assert lock_images.faults(ROOT) == []


def test_new_requirement_outdates_the_locks_of_its_extra(copy: Path) -> None:
    change(copy / "pyproject.toml", '"jsonpatch>=1.33"', '"jsonpatch>=1.34"')
    expected = ["operator/requirements.lock is out of date with pyproject.toml; run: make locks"]
    assert lock_images.faults(copy) == expected


def test_new_common_requirement_outdates_all_locks_except_tools_and_torch(copy: Path) -> None:
    change(copy / "pyproject.toml", '"pyyaml>=6"', '"pyyaml>=6.1"')
    outdated = {one.partition(" ")[0] for one in lock_images.faults(copy)}
    assert outdated == set(LOCKS) - {"operator/images/tools.lock", "trainer/torch.lock"}


def test_extra_that_no_image_has_outdates_no_lock(copy: Path) -> None:
    change(copy / "pyproject.toml", '"trl>=1.16,<2"', '"trl>=1.17,<2"')
    assert lock_images.faults(copy) == []


@pytest.mark.parametrize("name", LOCKS)
def test_edited_hash_is_reported(copy: Path, name: str) -> None:
    change(copy / name, "--hash=sha256:", "--hash=sha256:0")
    assert lock_images.faults(copy) == [f"{name} was edited by hand; run: make locks"]


def test_missing_lock_is_reported(copy: Path) -> None:
    (copy / LOCKS[0]).unlink()
    assert lock_images.faults(copy) == [f"{LOCKS[0]} is missing; run: make locks"]


@pytest.mark.parametrize("name", LOCKS)
def test_each_package_has_one_version_and_a_hash(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    packages = re.split(r"^(?=[a-z0-9])", text, flags=re.MULTILINE)[1:]
    assert packages
    for one in packages:
        assert re.match(r"[a-z0-9._-]+==[^ ]+ ", one), one
        assert "--hash=sha256:" in one


def test_the_layers_of_the_trainer_share_no_package() -> None:
    names = [
        re.findall(r"^([a-z0-9._-]+)==", (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE)
        for name in LOCKS
        if name.startswith("trainer/")
    ]
    assert [set(a) & set(b) for a in names for b in names if a is not b] == [set()] * 6
