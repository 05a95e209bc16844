"""Each manifest with one flaw is refused, with the field, the line and the sentence it promises."""

import json

import pytest
from typer.testing import CliRunner

from finetune_operator.cli.app import app
from support.api.bad_manifests import BadManifest, bad_manifests

BAD = [pytest.param(bad, id=bad.file.stem) for bad in bad_manifests()]


def test_there_are_at_least_25_bad_manifests() -> None:
    assert len(BAD) >= 25


@pytest.mark.parametrize("bad", BAD)
def test_a_manifest_with_one_flaw_has_one_problem_which_names_it(bad: BadManifest) -> None:
    result = CliRunner().invoke(app, ["validate", "-o", "json", str(bad.file)])
    assert result.exit_code == 1
    (problem,) = json.loads(result.stdout)["problems"]
    assert problem["path"] == bad.path
    assert bad.says in problem["message"]
    assert problem["file"] == str(bad.file)
    assert problem["line"] == bad.line
