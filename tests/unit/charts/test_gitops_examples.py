"""examples/gitops: what the manifests name is there, and is of this version."""

import json
from pathlib import Path

import yaml

from finetune_operator import __version__
from finetune_operator.kube.resources import Object
from install_manifest import IMAGE
from support.api.verdicts import EXAMPLES
from support.charts.helm_chart import needs_helm, template

ROOT = Path(__file__).parents[3]


def objects(*parts: str) -> list[Object]:
    found = yaml.safe_load_all(EXAMPLES.joinpath(*parts).read_text(encoding="utf-8"))
    return [one for one in found if one]


def test_argo_cd_is_given_folders_that_are_there_and_this_version() -> None:
    sources = [
        one for made in objects("argocd", "applications.yaml") for one in made["spec"]["sources"]
    ]

    assert [one["path"] for one in sources if not (ROOT / one["path"]).is_dir()] == []
    assert {one["targetRevision"] for one in sources} == {f"v{__version__}"}


def test_argo_cd_may_apply_jobs_and_profiles_before_their_kind_is_there() -> None:
    option = "SkipDryRunOnMissingResource=true"
    *_, jobs = objects("argocd", "applications.yaml")
    (profile,) = objects("profiles", "cpu.yaml")

    assert option in jobs["spec"]["syncPolicy"]["syncOptions"]
    assert profile["metadata"]["annotations"]["argocd.argoproj.io/sync-options"] == option


def test_flux_waits_for_what_is_there_and_is_given_this_version() -> None:
    steps = {one["metadata"]["name"]: one["spec"] for one in objects("flux", "kustomizations.yaml")}
    waits = {
        name: [one["name"] for one in spec.get("dependsOn", ())] for name, spec in steps.items()
    }
    _, repository, release = objects("flux", "operator.yaml")
    chart = release["spec"]["chart"]["spec"]

    assert waits == {
        "finetune-operator": [],
        "finetune-profiles": ["finetune-operator"],
        "finetune-jobs": ["finetune-profiles"],
        "finetune-models": ["finetune-profiles"],
    }
    assert repository["spec"]["ref"] == {"tag": f"v{__version__}"}
    assert chart["sourceRef"]["name"] == repository["metadata"]["name"]
    assert (ROOT / chart["chart"] / "Chart.yaml").is_file()


@needs_helm
def test_each_tool_gives_the_chart_in_git_the_image_that_it_asks_for() -> None:
    operator, _ = objects("argocd", "applications.yaml")
    chart, _ = operator["spec"]["sources"]
    *_, release = objects("flux", "operator.yaml")

    for values in (chart["helm"]["valuesObject"], release["spec"]["values"]):
        made = template("--values", "-", stdin=json.dumps(values))
        assert made.returncode == 0, made.stderr
        assert f'image: "{IMAGE}:{__version__}"' in made.stdout


def test_no_tool_prunes_jobs() -> None:
    *_, jobs = objects("argocd", "applications.yaml")
    models = ("finetune-jobs", "finetune-models")
    prunes = [
        one["spec"]["prune"]
        for one in objects("flux", "kustomizations.yaml")
        if one["metadata"]["name"] in models
    ]

    assert "prune" not in jobs["spec"]["syncPolicy"]["automated"]
    assert prunes == [False, False]


def test_job_names_the_profile_beside_it() -> None:
    (profile,) = objects("profiles", "cpu.yaml")
    _, job = objects("jobs", "team-a.yaml")

    assert job["spec"]["backend"]["kubernetes"]["profile"] == profile["metadata"]["name"]
    assert profile["spec"]["image"].endswith(f":{__version__}")
