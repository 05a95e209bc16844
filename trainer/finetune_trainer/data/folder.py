"""Find the files of a data folder, and refuse a folder that mixes sets of rows.

Called by `source` and `inspection`. A folder is read as one split, because a manifest names the
rows to train on and the held-out rows separately. Words for splits follow the hub, with a few more.
"""

import json
import os
import re
from collections.abc import Iterable
from pathlib import Path

from finetune_trainer.config import COMPRESSIONS, DATA_SUFFIXES, data_suffix, is_data_file
from finetune_trainer.data.rules import Rules
from finetune_trainer.errors import DataError
from finetune_trainer.links import leads_back

SPLIT_OF = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "validate", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(
        ("test", "testing", "eval", "evaluate", "evaluation", "heldout", "holdout"), "test"
    ),
}
FOREIGN = ("dataset_info", "dataset_infos", "metadata", "state")  # names without suffix
EVAL = "spec.dataset.evalSource"
SHOWN = 3  # file names that a message lists of each kind


def files_of(folder: Path, field: str, rules: Rules) -> list[Path]:
    """Return the files of rows in a folder, in the order of their names.

    Args:
        folder: Folder that `field` names.
        field: Field of the manifest; messages begin with it.
        rules: With `RELEASE_0_1_0`, every file with a known suffix is read.

    Raises:
        DataError: the folder has no such file, has files of several splits or files that hold no
            rows, or was written by `save_to_disk`.
    """
    entries = sorted(one for one in folder.iterdir() if not one.name.startswith("."))
    files = [one for one in entries if is_data_file(one.name) and one.is_file()]
    if rules is not Rules.RELEASE_0_1_0:
        _refuse_saved(folder, entries, field)
        _refuse_broken_links(folder, entries, field)
    if not files:
        raise DataError(
            f"{field} {folder} holds no {', '.join(DATA_SUFFIXES)} file{_below(entries)}"
        )
    if rules is not Rules.RELEASE_0_1_0:
        _refuse_foreign(folder, files, field)
        _refuse_splits(folder, files, entries, field)
    return files


def split_folder(folder: Path, field: str) -> tuple[Path, Path | None]:
    """Return where the rows to train on and the held-out rows of a folder are.

    The names of files or folders give their splits; validation is preferred to test. A folder with
    a single split is returned itself.

    Args:
        folder: Folder that the user names.
        field: Option or field that names it; messages begin with it.

    Raises:
        DataError: a split consists of several files, so no path names it, or the files have
            different types.
    """
    entries = sorted(one for one in folder.iterdir() if not one.name.startswith("."))
    groups: dict[str, list[Path]] = {}
    for entry in entries:
        if entry.is_file() and is_data_file(entry.name) and _stem(entry).lower() not in FOREIGN:
            groups.setdefault(_split(_stem(entry)) or "train", []).append(entry)
    if not groups:
        for entry in entries:
            split = _split(entry.name)
            if split and entry.is_dir() and _data_files(entry):
                groups.setdefault(split, []).append(entry)
        if "train" not in groups:
            return folder, None
    if len(groups) <= 1 and all(one.is_file() for group in groups.values() for one in group):
        files = [one for group in groups.values() for one in group]
        kinds = sorted({_kind(one) for one in files})
        if len(kinds) > 1:
            raise DataError(
                f"{field} {folder} holds {' and '.join(kinds)} files ({_names(files)}); name a "
                "file, or a folder with files of one type"
            )
        return folder, None
    train = groups.get("train", [])
    held_out = groups.get("validation") or groups.get("test") or []
    crowded = [group for group in (train, held_out) if len(group) > 1]
    if crowded or not train:
        raise DataError(
            f"{field} {folder} holds several splits ({'; '.join(map(_names, groups.values()))}), "
            "and no single file of rows to train on; move the files of each split into a folder "
            "of its own, such as train/ and validation/"
        )
    return train[0], next(iter(held_out), None)


def _kind(file: Path) -> str:
    """Return the suffix of a data file without its compression."""
    suffix = data_suffix(file.name) or ""
    return next(
        one for one in DATA_SUFFIXES if suffix in (one, *(one + end for end in COMPRESSIONS))
    )


def _refuse_saved(folder: Path, entries: list[Path], field: str) -> None:
    saved = [one for one in entries if one.name == "dataset_dict.json" or one.suffix == ".arrow"]
    if saved:
        also = [one for one in entries if one.name in ("dataset_info.json", "state.json")]
        raise DataError(
            f"{field} {folder} was written by save_to_disk ({_names(also + saved)}), whose files "
            "cannot be read; write each split with datasets.load_from_disk and to_json, and name "
            f"the file of one split in {field}"
        )


def _refuse_broken_links(folder: Path, entries: list[Path], field: str) -> None:
    broken = [one for one in entries if is_data_file(one.name) and not one.exists()]
    if broken:
        end = "leads back to itself" if leads_back(broken[0]) else "has no target"
        raise DataError(
            f"{field} {folder} has the symbolic link {broken[0].name}, which {end}; remove it, or "
            "replace it by the file"
        )


def _refuse_foreign(folder: Path, files: list[Path], field: str) -> None:
    foreign = [one for one in files if _stem(one).lower() in FOREIGN]
    if len(foreign) == len(files):  # lines and tables hold rows under any name
        foreign = [one for one in foreign if _is_json_file(one)]
    rest = [one for one in files if one not in foreign]
    single = [one for one in rest if not _split(_stem(one)) and _is_one_object(one)]
    if len(single) < len(rest):  # otherwise each file may hold one row
        foreign += single
    if foreign:
        raise DataError(
            f"{field} {folder} has files that do not hold rows ({_names(foreign)}); delete them, "
            f"or name one file of rows, or a folder without other files, in {field}"
        )


def _refuse_splits(folder: Path, files: list[Path], entries: list[Path], field: str) -> None:
    """Refuse a folder with files of several splits, or with a folder of the training split."""
    groups: dict[str, list[Path]] = {}
    for file in files:
        # A name without a split belongs to the rows to train on.
        groups.setdefault(_split(_stem(file)) or "train", []).append(file)
    beside = [one for one in entries if one.is_dir() and _split(one.name) == "train"]
    if field != EVAL and any(map(_data_files, beside)):
        groups["folders"] = beside
    if len(groups) > 1:
        held_out = "" if field == EVAL else f", and held-out rows in {EVAL}"
        raise DataError(
            f"{field} {folder} holds several splits ({'; '.join(map(_names, groups.values()))}), "
            "which would be read as one or not at all; name the file or the folder of a single "
            f"split in {field}{held_out}"
        )


def _is_json_file(file: Path) -> bool:
    return (data_suffix(file.name) or "").removesuffix(".gz").removesuffix(".zst") == ".json"


def _stem(file: Path) -> str:
    return file.name.removesuffix(data_suffix(file.name) or "")


def _split(name: str) -> str | None:
    """Return the split of a name, by its last word for one."""
    apart = re.sub("([a-z])([A-Z])", r"\1 \2", name).lower()
    joined = re.sub("(held|hold)[-_ ]out", r"\1out", apart)
    words = [re.sub("(set|split|data|s)$", "", word) for word in re.split("[^a-z]+", joined)]
    return next((SPLIT_OF[word] for word in reversed(words) if word in SPLIT_OF), None)


def _is_one_object(file: Path) -> bool:
    """Whether a .json file, which may hold a row per line, is one object instead."""
    if file.suffix != ".json" or not os.access(file, os.R_OK):  # reported when rows are read
        return False
    with file.open("rb") as content:
        first = next((line for line in content if line.strip()), b"")
        if not first.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"{"):
            return False
        if _is_json(first):
            return not any(line.strip() for line in content)
        return _is_json(first + content.read())


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        return False
    return True


def _names(files: Iterable[Path]) -> str:
    names = [one.name + "/" * one.is_dir() for one in files]
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _data_files(folder: Path) -> list[Path]:
    if not os.access(folder, os.R_OK | os.X_OK):  # such as lost+found of a volume
        return []
    return [one for one in folder.iterdir() if is_data_file(one.name) and one.is_file()]


def _below(entries: list[Path]) -> str:
    """Return the advice for a folder without files of rows."""
    folders = [one for one in entries if one.is_dir() and _data_files(one)]
    if folders:
        return f" itself, only {_names(folders)} does; name the folder of one split"
    return "; add one"
