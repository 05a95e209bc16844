"""YAML is read as kubectl reads it, with the line of every field."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from finetune_operator.api.manifest import Reading, read_manifests
from finetune_operator.api.manifest_files import MOST_BYTES
from finetune_operator.api.problems import Problem, Severity
from finetune_operator.api.validation import check_manifest
from finetune_operator.api.yaml_documents import YamlDocument, plain_scalar, read_yaml

JOB = "apiVersion: finetune.dev/v1alpha1\nkind: FineTuneJob\nmetadata: {name: a}\n"


def read(text: str) -> list[YamlDocument | Problem]:
    return list(read_yaml(text, "x.yaml"))


def value(text: str) -> Any:
    (document,) = read(text)
    assert isinstance(document, YamlDocument), document
    assert document.problems == []
    return document.value


def in_folder(folder: Path, **files: str) -> Reading:
    for name, text in files.items():
        file = folder / name.replace("__", ".")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return read_manifests([str(folder)])


# What `kubectl apply` of Kubernetes 1.34 stored for each.
@pytest.mark.parametrize(
    ("written", "read_as"),
    [
        ("2e-4", 2e-4),
        ("1e1", 10),
        ("8.0", 8),
        (".5", 0.5),
        ("1_000", 1000),
        ("010", 8),
        ("0o10", 8),
        ("0x10", 16),
        ("-0b11", -3),
        ("+5", 5),
        ("09", 9),
        ("12:30", "12:30"),
        ("2026-11-21", "2026-11-21"),
        ("1.2.3", "1.2.3"),
        ("y", True),
        ("Off", False),
        ("yEs", "yEs"),
        ("~", None),
        ("Null", None),
        ("nan", "nan"),
        ("=", "="),
        ("-", "-"),
        ("1e", "1e"),
    ],
)
def test_plain_scalars_mean_what_kubectl_takes_them_for(written: str, read_as: Any) -> None:
    result = plain_scalar(written)
    assert (type(result), result) == (type(read_as), read_as)


def test_quotes_and_tags_make_text() -> None:
    assert value("[\"2e-4\", 'y', !!str 5]") == ["2e-4", "y", "5"]


def test_keys_become_text_as_in_json() -> None:
    assert value("{y: 1, 2: b, 0x10: c}") == {"true": 1, "2": "b", "16": "c"}


def test_anchors_and_merges_are_followed() -> None:
    text = "a: &a {x: 1, y: 2}\nb:\n  <<: *a\n  x: 3\n"
    assert value(text)["b"] == {"true": 2, "x": 3}


def test_a_key_given_twice_is_a_problem_that_names_both_lines() -> None:
    (document,) = read("a:\n  b: 1\n  c: 2\n  b: 3\n")
    assert isinstance(document, YamlDocument)
    assert [str(problem) for problem in document.problems] == [
        "x.yaml:4: a.b is given twice (first on line 2); remove one"
    ]


def test_infinity_is_refused_as_json_has_none() -> None:
    (document,) = read("a: .inf")
    assert isinstance(document, YamlDocument)
    assert "is not a number" in str(document.problems[0])


@pytest.mark.parametrize(
    "digits",
    [
        pytest.param("9" * 5000, id="decimal"),
        pytest.param("-" + "9" * 400, id="more than a float holds"),
        pytest.param("0x" + "f" * 5000, id="hexadecimal"),
        pytest.param("0" + "7" * 5000, id="octal"),
        pytest.param("1e999", id="exponent"),
        pytest.param("9" * 5000 + ".5", id="fraction"),
    ],
)
def test_a_number_that_is_too_large_to_be_sent_is_a_problem(tmp_path: Path, digits: str) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(f"{JOB}spec: {{training: {{maxSteps: {digits}}}}}\n")

    (manifest,) = read_manifests([str(file)]).manifests
    found = [one for one in check_manifest(manifest) if one.path == "spec.training.maxSteps"]

    assert [(one.line, "is too large a number" in one.message) for one in found] == [(4, True)]
    assert len(found[0].message) < 150


def test_a_number_of_json_may_have_any_length(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(f'{{"kind": "Service", "spec": {"9" * 5000}}}')
    (note,) = read_manifests([str(tmp_path)]).problems
    assert "its kind is Service" in note.message


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("a: &a [*a]", id="an anchor inside itself"),
        pytest.param(
            "a0: &a0 [x, x, x, x, x, x, x, x, x]\n"
            + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9)),
            id="anchors that multiply",
        ),
        pytest.param("[" * 1500, id="brackets without end"),
        pytest.param("a: \x01", id="a control character"),
        pytest.param("a: *nowhere", id="an alias of nothing"),
    ],
)
def test_hostile_yaml_is_one_problem_with_a_line(text: str) -> None:
    (problem,) = read(text)
    assert isinstance(problem, Problem)
    assert problem.line is not None


def test_lines_count_from_the_start_of_the_file_over_all_documents() -> None:
    documents = read("# one\na: 1\n---\n# two\nb:\n  - c\n  - d: 1\n")
    second = documents[1]
    assert isinstance(second, YamlDocument)
    assert second.lines[("b", 0)] == 6
    assert second.lines[("b", 1, "d")] == 7


def test_a_broken_document_does_not_hide_the_others() -> None:
    documents = read("a: 1\n---\nb: [\n--- # third\nc: 3\n")
    values = [one.value for one in documents if isinstance(one, YamlDocument)]
    problems = [one.line for one in documents if isinstance(one, Problem)]
    assert values == [{"a": 1}, {"c": 3}]
    assert problems == [4]


def test_empty_documents_are_nothing() -> None:
    assert read("---\n# only a comment\n---\n") == []


def test_a_folder_is_read_in_order_with_all_below_it(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "x.yaml").write_text(JOB)
    (tmp_path / "b" / "c.json").write_text(
        json.dumps({"apiVersion": "finetune.dev/v1alpha1", "kind": "FineTuneJob"}, indent="\t")
    )
    reading = in_folder(tmp_path, a__yml=JOB, notes__txt="kind: FineTuneJob")
    names = [Path(one.file).relative_to(tmp_path).as_posix() for one in reading.manifests]
    assert names == ["a.yml", "b/c.json"]
    assert reading.problems == ()


def test_other_kinds_are_passed_over_with_a_note(tmp_path: Path) -> None:
    reading = in_folder(tmp_path, a__yaml=f"kind: Service\napiVersion: v1\n---\n{JOB}")
    (note,) = reading.problems
    assert (note.severity, note.line) == (Severity.WARNING, 1)
    assert "its kind is Service" in note.message
    assert [one.line for one in reading.manifests] == [4]


def test_the_record_of_a_run_is_no_manifest_of_its_folder(tmp_path: Path) -> None:
    record = "apiVersion: finetune.dev/v1alpha1\nkind: FineTuneJob\nmetadata: {uid: u}\nstatus: {}"
    reading = in_folder(tmp_path, a__yaml=JOB, job__yaml=record)
    assert [Path(one.file).name for one in reading.manifests] == ["a.yaml"]
    assert "record of a job" in reading.problems[0].message
    assert len(read_manifests([str(tmp_path / "job.yaml")]).manifests) == 1


def test_a_list_is_read_item_by_item(tmp_path: Path) -> None:
    text = (
        "apiVersion: v1\nkind: List\nitems:\n"
        "- apiVersion: finetune.dev/v1alpha1\n  kind: FineTuneJob\n  spec: {suspend: x}\n"
        "- apiVersion: v1\n  kind: Secret\n"
    )
    reading = in_folder(tmp_path, a__yaml=text)
    (manifest,) = reading.manifests
    assert manifest.line_of(("spec", "suspend")) == 6
    assert "Secret" in reading.problems[0].message


def test_standard_input_is_read_for_a_dash(tmp_path: Path) -> None:
    script = (
        "from finetune_operator.api.manifest import read_manifests\n"
        "(manifest,) = read_manifests(['-']).manifests\n"
        "print(manifest.file, manifest.directory)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], input=JOB, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout == f"- {tmp_path}\n", done.stderr


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.yaml", b"\xff\xfe", "is not UTF-8 text"),
        ("a.json", b'{"kind": }', "is not JSON: expecting value (column 10)"),
        ("a.yaml", b"[1, 2]", "is [1, 2], which is not a Kubernetes object"),
        ("a.yaml", b"services: {}", "kind is missing; write kind: FineTuneJob"),
    ],
)
def test_a_file_that_holds_no_object_is_a_problem(
    tmp_path: Path, name: str, content: bytes, says: str
) -> None:
    (tmp_path / name).write_bytes(content)
    (problem,) = read_manifests([str(tmp_path / name)]).problems
    assert says in str(problem)
    assert problem.severity is Severity.ERROR


def test_a_file_that_is_not_there_is_a_problem(tmp_path: Path) -> None:
    (problem,) = read_manifests([str(tmp_path / "none.yaml")]).problems
    assert str(problem).endswith("none.yaml: cannot be read (No such file or directory)")


def test_what_is_no_file_is_told_at_once_and_never_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "gone.yaml").symlink_to("nowhere.yaml")
    (tmp_path / "round.yaml").symlink_to("round.yaml")
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(tmp_path / "s.yaml"))
    expected = {
        "gone.yaml": "cannot be read: it is a link to nowhere.yaml, which does not exist",
        "pipe.yaml": "is a named pipe; name a file, or pipe it to standard input (-f -)",
        "round.yaml": "cannot be read (Too many levels of symbolic links)",
        "s.yaml": "is a socket; name a file, or pipe it to standard input (-f -)",
    }

    by_folder = read_manifests([str(tmp_path)]).problems
    by_name = read_manifests([str(tmp_path / name) for name in expected]).problems
    (device,) = read_manifests(["/dev/zero"]).problems

    assert {Path(one.file).name: one.message for one in by_folder} == expected
    assert by_name == by_folder
    assert device.message.startswith("is a device;")


@pytest.mark.parametrize(
    ("url", "advice"),
    [
        ("https://example.com/job.yaml", "save it and name the file"),
        ("https:/example.com/job.yaml", "save it and name the file"),
        ("file:///job.yaml", "name the file by its path"),
    ],
)
def test_a_url_is_said_not_to_be_read(url: str, advice: str) -> None:
    (problem,) = read_manifests([url]).problems
    assert str(problem) == f"{url}: is a URL, and URLs are not read; {advice}"


def test_a_file_that_is_larger_than_any_manifest_is_a_problem_and_data_is_passed_over(
    tmp_path: Path,
) -> None:
    for name in ("a.yaml", "data.json"):
        with (tmp_path / name).open("wb") as file:
            file.truncate(MOST_BYTES + 1)

    problems = read_manifests([str(tmp_path)]).problems

    assert [(Path(one.file).name, one.severity) for one in problems] == [
        ("a.yaml", Severity.ERROR),
        ("data.json", Severity.WARNING),
    ]
    assert all("is larger than 16 MiB" in one.message for one in problems)


def test_a_folder_that_cannot_be_read_and_a_linked_one_are_told(tmp_path: Path) -> None:
    inner, closed = tmp_path / "in", tmp_path / "in" / "closed"
    closed.mkdir(parents=True)
    (inner / "a.yaml").write_text(JOB)
    (inner / "link").symlink_to(tmp_path)
    closed.chmod(0)
    try:
        reading = read_manifests([str(inner)])
    finally:
        closed.chmod(0o700)

    told = {Path(one.file).name: one.message for one in reading.problems}
    assert told["link"] == "skipped: it is a link to a folder; name that folder"
    assert len(reading.manifests) == 1
    if os.geteuid() != 0:  # root may read everything
        assert told["closed"].startswith("cannot be read (Permission denied)")


def test_what_a_shell_makes_of_a_command_is_read_like_standard_input(tmp_path: Path) -> None:
    read, write = os.pipe()
    with open(write, "w") as feed:
        feed.write(JOB)
    try:
        (manifest,) = read_manifests([f"/dev/fd/{read}"]).manifests
    finally:
        os.close(read)
    assert manifest.directory == Path.cwd()


def test_closed_standard_input_is_a_problem(tmp_path: Path) -> None:
    script = (
        "from finetune_operator.api.manifest import read_manifests\n"
        "print(*read_manifests(['-']).problems)"
    )
    command = 'exec "$0" -c "$1" <&-'
    done = subprocess.run(
        ["sh", "-c", command, sys.executable, script], capture_output=True, text=True
    )
    assert done.stdout == "-: cannot be read: standard input is closed\n", done.stderr


def test_characters_beyond_the_first_plane_survive_json(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text(
        json.dumps({"apiVersion": "finetune.dev/v1alpha1", "kind": "FineTuneJob", "spec": "😀"})
    )
    (manifest,) = read_manifests([str(file)]).manifests
    assert manifest.value["spec"] == "😀"
