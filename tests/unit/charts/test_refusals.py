"""Values that cannot work are refused before anything is installed, with what mends them."""

import re

import pytest
from pydantic.alias_generators import to_snake

from finetune_operator import __version__
from finetune_operator.kernel.settings import PREFIX, LogLevel, SettingsError, read_settings
from support.charts.helm_chart import Json, helm, needs_helm, of_kind, rendered

pytestmark = needs_helm
DIGEST = f"sha256:{64 * '0'}"


def sentences(values: Json) -> list[str]:
    """Return what helm says of values that the chart refuses, a sentence a line."""
    answer = helm(values=values)
    assert answer.returncode != 0, "nothing is refused"
    assert answer.stdout == ""
    said = re.search(r"execution error at \(.*?\): (.*?)\n(\n|$)", answer.stderr, re.DOTALL)
    assert said, answer.stderr
    return said[1].splitlines()


REFUSED: dict[str, tuple[Json, str]] = {
    "no image": (
        {"image": {"repository": ""}},
        "image.repository is empty, and only a released chart knows its image; make one (make "
        "images) and name it: --set image.repository=registry.example.com/finetune-operator",
    ),
    "a tag in the repository": (
        {"image": {"repository": "reg.test:5000/team/x:1"}},
        "image.repository is reg.test:5000/team/x:1, which holds a tag; write --set "
        "image.repository=reg.test:5000/team/x --set-string image.tag=1",
    ),
    "a digest in the repository": (
        {"image": {"repository": f"reg.test/x@{DIGEST}"}},
        f"image.repository is reg.test/x@{DIGEST}, which holds a digest; write --set "
        f"image.repository=reg.test/x --set image.digest={DIGEST}",
    ),
    "a tag and a digest in the repository": (
        {"image": {"repository": f"reg.test:5000/team/x:1@{DIGEST}"}},
        f"image.repository is reg.test:5000/team/x:1@{DIGEST}, which holds a digest; write --set "
        f"image.repository=reg.test:5000/team/x --set image.digest={DIGEST}",
    ),
    "a repository with a scheme": (
        {"image": {"repository": "https://reg.test/x"}},
        "image.repository is https://reg.test/x, but an image has no scheme; write --set "
        "image.repository=reg.test/x",
    ),
    "a repository in capitals": (
        {"image": {"repository": "reg.test/Team/x"}},
        "image.repository is reg.test/Team/x, which is no name of an image (lower case, no "
        "spaces); write --set image.repository=registry.example.com/finetune-operator",
    ),
    "the tag latest": (
        {"image": {"repository": "reg.test/x", "tag": "latest"}},
        "image.tag is latest, which is another image each time (AKS refuses it, too); name a "
        f"version: --set image.tag={__version__}",
    ),
    "a tag with a fraction": (
        {"image": {"repository": "reg.test/x", "tag": 1.1}},
        "image.tag is the number 1.1, and YAML reads other tags as this number, too (1.10 is "
        "1.1); put the tag in quotes, or write --set-string image.tag=TAG",
    ),
    "a tag of more digits than a number has": (
        {"image": {"repository": "reg.test/x", "tag": 12345678901234567890}},
        "image.tag is the number 1.2345678901234567e+19, and YAML reads other tags as this "
        "number, too (1.10 is 1.1); put the tag in quotes, or write --set-string image.tag=TAG",
    ),
    "a negative tag": (
        {"image": {"repository": "reg.test/x", "tag": -3}},
        f"image.tag is -3, which is no tag; write --set image.tag={__version__}",
    ),
    "a tag that is none": (
        {"image": {"repository": "reg.test/x", "tag": "a b"}},
        f"image.tag is a b, which is no tag; write --set image.tag={__version__}",
    ),
    "an unknown log level": (
        {"settings": {"logLevel": "LOUD"}},
        "settings.logLevel is LOUD, which is none of DEBUG, INFO, WARNING, ERROR; write --set "
        "settings.logLevel=INFO",
    ),
    "an unknown log format": (
        {"settings": {"logFormat": "xml"}},
        "settings.logFormat is xml, which is none of text, json; write --set "
        "settings.logFormat=json",
    ),
    "times of the Lease out of order": (
        {"settings": {"renewSeconds": 60}},
        "settings.renewSeconds, .renewDeadlineSeconds and .leaseSeconds are 60, 10 and 15, and "
        "each must be longer than the one before; write --set settings.renewSeconds=2 --set "
        "settings.renewDeadlineSeconds=10 --set settings.leaseSeconds=15",
    ),
    "a first wait longer than the longest": (
        {"settings": {"retrySeconds": 60}},
        "settings.retrySeconds is 60 and settings.maxRetrySeconds 30, which is shorter; write "
        "--set settings.maxRetrySeconds=60",
    ),
    "a name that no Lease has": (
        {"settings": {"leaseName": "Bad_Name"}},
        "settings.leaseName is Bad_Name, which is no name of a Lease (a-z, 0-9, and - or . between "
        "them); write --set settings.leaseName=finetune-operator",
    ),
    "a name that no namespace has": (
        {"settings": {"namespaces": ["team-a", "team_A"]}},
        "settings.namespaces holds team_A, which is no name of a namespace (up to 63 of a-z, 0-9, "
        "and - between them); write --set 'settings.namespaces={team-a,team-b}'",
    ),
    "a name that no namespace of jobs has": (
        {"monitoring": {"monitors": {"create": True, "namespaces": ["x" * 64]}}},
        f"monitoring.monitors.namespaces holds {'x' * 64}, which is no name of a namespace (up to "
        "63 of a-z, 0-9, and - between them); write --set "
        "'monitoring.monitors.namespaces={team-a,team-b}'",
    ),
    "a name that no namespace of Grafana has": (
        {"monitoring": {"dashboards": {"create": True, "namespace": "a.b"}}},
        "monitoring.dashboards.namespace is a.b, which is no name of a namespace; write --set "
        "monitoring.dashboards.namespace=grafana",
    ),
    "an address that no probe reaches": (
        {"settings": {"healthHost": "127.0.0.1"}},
        "settings.healthHost is 127.0.0.1, where no probe reaches it; write --set "
        "settings.healthHost=0.0.0.0",
    ),
    "a backend without its class": (
        {"settings": {"backends": ["mine"]}},
        "settings.backends holds mine, which is not NAME=MODULE:CLASS; write --set "
        "'settings.backends={mine=package.module:Class}'",
    ),
    "a quantity that is none": (
        {"resources": {"limits": {"memory": "banana"}}},
        "resources.limits.memory is banana, which is no quantity; write --set "
        "resources.limits.memory=512Mi",
    ),
    "a cpu that is none": (
        {"resources": {"requests": {"cpu": "one"}}},
        "resources.requests.cpu is one, which is no quantity; write --set "
        "resources.requests.cpu=500m",
    ),
    "a thousandth of a byte": (
        {"resources": {"limits": {"memory": "512m"}}},
        "resources.limits.memory is 512m, which is 0.512 bytes, and the operator starts with no "
        "less than 64Mi; write --set resources.limits.memory=512Mi",
    ),
    "more than the limit": (
        {"resources": {"requests": {"memory": "1Gi"}}},
        "resources.requests.memory is 1Gi, which is more than the limit of 512Mi; write --set "
        "resources.limits.memory=1Gi",
    ),
    "a resource that is none": (
        {"resources": {"limits": {"cpus": 1}}},
        "resources.limits holds cpus, which is no resource of a container; write cpu, memory or "
        "ephemeral-storage",
    ),
    "a quantity of an init container": (
        {"initContainers": [{"name": "a", "image": "b", "resources": {"limits": {"cpu": "x"}}}]},
        "initContainers[0].resources.limits.cpu is x, which is no quantity; write --set "
        "initContainers[0].resources.limits.cpu=500m",
    ),
    "root": (
        {"podSecurityContext": {"runAsUser": 0}},
        "podSecurityContext.runAsUser is 0, which is root, and the operator needs nothing of "
        "root's; write --set podSecurityContext.runAsUser=65532",
    ),
    "an image that may be root's": (
        {"securityContext": {"runAsNonRoot": False}},
        "securityContext.runAsNonRoot is false, so that an image could run as root; write --set "
        "securityContext.runAsNonRoot=true",
    ),
    "a name that no Service has": (
        {"fullnameOverride": "1-Tuning"},
        "the release ft gives the name 1-Tuning, which a Service cannot have (up to 50 of a-z, "
        "0-9, and - between them, a letter first); write --set fullnameOverride=finetune-operator",
    ),
    "two names": (
        {"nameOverride": "a", "fullnameOverride": "b"},
        "nameOverride is a, but has no effect beside fullnameOverride b; leave one of them out",
    ),
    "an account without a name": (
        {"serviceAccount": {"create": False}},
        "serviceAccount.create is false and serviceAccount.name empty, so that every pod of the "
        "namespace would have the operator's rights; write --set "
        "serviceAccount.name=finetune-operator",
    ),
    "annotations of an account that is not made": (
        {"serviceAccount": {"create": False, "name": "x", "annotations": {"a": "b"}}},
        "serviceAccount.annotations has no effect, as serviceAccount.create is false; write --set "
        "serviceAccount.create=true, or leave it out",
    ),
    "a name that no account has": (
        {"serviceAccount": {"name": "A B"}},
        "serviceAccount.name is A B, which is no name in Kubernetes (a-z, 0-9, and - or . between "
        "them); write --set serviceAccount.name=finetune-operator",
    ),
    "a label that is none": (
        {"commonLabels": {"team": "a b"}},
        "commonLabels holds team=a b, which is no label; write up to 63 letters, digits, and - _ . "
        "between them, as in --set-string commonLabels.team=research",
    ),
    "an annotation without a name": (
        {"podAnnotations": {"a/b/c": "x"}},
        "podAnnotations holds a/b/c, which is no key of an annotation; write up to 63 letters, "
        "digits, and - _ . between them, as in --set-string podAnnotations.note=text",
    ),
    "a label of the chart's own": (
        {"podLabels": {"app.kubernetes.io/name": "x"}},
        "podLabels holds app.kubernetes.io/name, which the chart sets itself; leave it out",
    ),
    "a setting among the variables": (
        {"extraEnv": [{"name": "FINETUNE_OPERATOR_LOG_LEVEL", "value": "DEBUG"}]},
        "extraEnv holds FINETUNE_OPERATOR_LOG_LEVEL, which is a setting; write --set "
        "settings.logLevel=DEBUG",
    ),
    "a variable twice": (
        {"extraEnv": [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]},
        "extraEnv holds A, which the chart or another entry sets already; leave it out",
    ),
    "a volume twice": (
        {"extraVolumes": [{"name": "tmp", "emptyDir": {}}]},
        "extraVolumes holds tmp, which the chart or another entry has already; give it another "
        "name",
    ),
    "a mount of no volume": (
        {"extraVolumeMounts": [{"name": "plugins", "mountPath": "/plugins"}]},
        "extraVolumeMounts holds plugins, which is no volume; add it to extraVolumes: [{name: "
        "plugins, emptyDir: {}}]",
    ),
    "two leaders without a Lease": (
        {"settings": {"leaderElection": False}},
        "replicas is 2, but settings.leaderElection is false or settings.identity is set, so that "
        "several would lead at once; write --set replicas=1",
    ),
    "jobs in a namespace that the policy closes": (
        {
            "settings": {"namespaces": ["team-a", "tigera-operator"]},
            "admissionPolicy": {"create": True},
        },
        "settings.namespaces holds tigera-operator, but admissionPolicy lets the operator write "
        "nothing in kube-* and in its systemNamespaces; leave it out of one of them",
    ),
    "volumes of a profile that the policy refuses": (
        {
            "exampleProfile": {
                "create": True,
                "spec": {
                    "image": "x",
                    "volumes": [
                        {"name": "a", "source": {"hostPath": {"path": "/data/a"}}},
                        {"name": "b", "source": {"hostPath": {"path": "/database"}}},
                    ],
                },
            },
            "admissionPolicy": {"hostPaths": ["/data"]},
        },
        "admissionPolicy.hostPaths lacks /database of FineTuneProfile default, so that no new "
        "attempt of their jobs could start; write --set 'admissionPolicy.hostPaths={/data,"
        "/database}'",
    ),
    "a monitor of a Service that is not made": (
        {"monitoring": {"monitors": {"create": True}}, "service": {"create": False}},
        "monitoring.monitors.create is true, but a ServiceMonitor finds the operator by its "
        "Service; write --set service.create=true",
    ),
    "rules where there is no such kind": (
        {"monitoring": {"group": "azmonitoring.coreos.com", "rules": {"create": True}}},
        "monitoring.rules.create is true, but AKS's managed Prometheus has no PrometheusRule; "
        "write --set monitoring.rules.create=false, and deploy files/azure-rules.json of the "
        "chart: az deployment group create",
    ),
    "labels of what is not made": (
        {"monitoring": {"rules": {"labels": {"release": "stack"}}}},
        "monitoring.rules.labels has no effect, as monitoring.rules.create is false; write --set "
        "monitoring.rules.create=true, or leave it out",
    ),
    "a profile that is not made": (
        {"exampleProfile": {"spec": {"image": "x"}}},
        "exampleProfile.spec has no effect, as exampleProfile.create is false; write --set "
        "exampleProfile.create=true, or leave it out",
    ),
    "the tenant of nobody": (
        {"azure": {"tenantId": "x"}},
        "azure.tenantId has no effect without azure.clientId; write --set "
        "azure.clientId=00000000-0000-0000-0000-000000000000, or leave it out",
    ),
    "a container twice": (
        {"initContainers": [{"name": "operator", "image": "x"}]},
        "initContainers holds operator, which is another container's name; give it one of its own",
    ),
}


@pytest.mark.parametrize(("values", "sentence"), REFUSED.values(), ids=REFUSED)
def test_value_that_cannot_work_is_refused_with_what_mends_it(values: Json, sentence: str) -> None:
    assert sentences(values) == [sentence]


def test_all_faults_are_told_at_once() -> None:
    faults = [REFUSED[one] for one in ("an unknown log level", "a quantity that is none", "root")]
    values: Json = {}
    for fault, _ in faults:
        values |= fault

    assert sentences(values) == [sentence for _, sentence in faults]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        pytest.param({"settings": {"workers": "many"}}, "/settings/workers", id="no number"),
        pytest.param({"podSecurityContext": {"runAsUsr": 1}}, "runAsUsr", id="typo"),
        pytest.param({"securityContext": {"privileged": True}}, "privileged", id="privilege"),
        pytest.param({"tolerations": [{"keys": "a"}]}, "keys", id="toleration"),
        pytest.param({"settings": {"leaseSeconds": "0.0"}}, "/settings/leaseSeconds", id="zero"),
        pytest.param({"networkPolicy": {"from": [{"pod": {}}]}}, "'pod' not allowed", id="peer"),
        pytest.param({"networkPolicy": None}, "missing property 'networkPolicy'", id="no section"),
        pytest.param({"resources": None}, "missing property 'resources'", id="no resources"),
        pytest.param(
            {"topologySpreadConstraints": [{"maxSkew": 1}]}, "topologyKey", id="what is missing"
        ),
        pytest.param({"extraEnv": [{"name": "A", "value": 1}]}, "extraEnv", id="number as text"),
    ],
)
def test_word_that_no_value_has_is_refused_by_the_schema(values: Json, words: str) -> None:
    answer = helm(values=values)

    assert answer.returncode != 0
    assert words in answer.stderr


@pytest.mark.parametrize(
    "repository",
    ["operator", "localhost/x", "reg.test:5000/x", "127.0.0.1:5000/a/b_c/d--e", "REG.test/x"],
)
def test_every_form_of_an_image_is_taken(repository: str) -> None:
    image = {"repository": repository, "tag": "v1"}

    assert image_of(rendered(image=image)) == f"{repository}:v1"


@pytest.mark.parametrize(
    "tag",
    [
        pytest.param("1", id="integer"),
        pytest.param("20261126", id="date"),
        pytest.param("0", id="zero"),
        pytest.param("007", id="leading zeros"),
        pytest.param("1.10", id="text with a point"),
    ],
)
def test_tag_of_digits_is_taken_as_it_was_written(tag: str) -> None:
    for text in ("--set", "--set-string"):
        assert image_of(rendered(text, f"image.tag={tag}")) == f"registry.test/operator:{tag}"


@pytest.mark.parametrize("tag", [1, 0, 20261126, 9007199254740991])
def test_integer_in_a_file_of_values_is_taken_as_tag(tag: int) -> None:
    image = {"repository": "reg.test/x", "tag": tag}

    assert image_of(rendered(image=image)) == f"reg.test/x:{tag}"


def image_of(objects: list[Json]) -> str:
    """Return the image of the operator."""
    (deployment,) = of_kind(objects, "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    return str(container["image"])


@pytest.mark.parametrize("memory", ["128Mi", "1e9", "0.5Gi", "134217728", 134217728, "1E", "2T"])
def test_every_form_of_a_quantity_is_taken(memory: str | int) -> None:
    assert rendered(resources={"limits": {"memory": memory}})


def test_fraction_is_taken_as_helm_sets_it() -> None:
    settings = ["--set", "settings.retrySeconds=0.5", "--set", "settings.leaseSeconds=20.5"]
    made = rendered(*settings, "--set", "azure.requestsPerSecond=.5")

    (deployment,) = of_kind(made, "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    env = {one["name"]: one.get("value") for one in container["env"]}
    assert env[f"{PREFIX}RETRY_SECONDS"] == "0.5"
    assert env[f"{PREFIX}LEASE_SECONDS"] == "20.5"
    assert env["FINETUNE_AZUREML_REQUESTS_PER_SECOND"] == ".5"


def test_digest_says_more_than_the_tag_latest() -> None:
    image = {"repository": "reg.test/x", "tag": "latest", "digest": DIGEST}

    assert of_kind(rendered(image=image), "Deployment")


@pytest.mark.parametrize("level", [*LogLevel, "debug"])
def test_every_log_level_of_the_process_is_taken(level: str) -> None:
    assert rendered(settings={"logLevel": level})


@pytest.mark.parametrize(
    "setting",
    [
        {"logLevel": "LOUD"},
        {"logFormat": "xml"},
        {"renewSeconds": 60},
        {"leaseSeconds": 10},
        {"retrySeconds": 60},
        {"leaseName": "Bad_Name"},
        {"namespaces": ["team_A"]},
    ],
    ids=str,
)
def test_setting_that_the_chart_refuses_is_refused_by_the_process(setting: Json) -> None:
    variables = {
        f"{PREFIX}{to_snake(name).upper()}": ",".join(one) if isinstance(one, list) else str(one)
        for name, one in setting.items()
    }

    assert len(sentences({"settings": setting})) == 1
    with pytest.raises(SettingsError):
        read_settings(variables)
