"""What only the embedded API server has: a file for its objects, and a secret in its URL."""

import json
import stat
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from finetune_operator.api.crd import custom_resource_definition
from finetune_operator.embedded.server import EmbeddedApi
from finetune_operator.embedded.store import StateError
from finetune_operator.kube.api_errors import GoneError
from finetune_operator.kube.resources import FINE_TUNE_JOBS, NAMESPACES, SECRETS
from support.api.builders import manifest
from support.cluster.clusters import embedded_cluster
from support.cluster.operators import Api, wait_until


@contextmanager
def serving(folder: Path) -> Iterator[Api]:
    """Serve what `folder` holds, with our CRD."""
    crds = [custom_resource_definition()]
    with embedded_cluster(folder, crds, state=folder / "state.json") as cluster:
        api = Api(cluster.kubeconfig)
        try:
            yield api
        finally:
            api.close()


def test_objects_are_there_again_after_a_restart_with_their_uids(tmp_path: Path) -> None:
    job = manifest(name="kept")
    with serving(tmp_path) as api:
        made = api.run(api.client.create(FINE_TUNE_JOBS, job, "default"))
        api.run(api.client.create(NAMESPACES, {"metadata": {"name": "team"}}))
    with serving(tmp_path) as api:
        assert api.job("default", "kept") == made
        assert api.get(NAMESPACES, "", "team") is not None
        later = api.run(api.client.list(FINE_TUNE_JOBS)).resource_version
        assert int(later) > int(made["metadata"]["resourceVersion"])

        async def watch() -> None:
            version = made["metadata"]["resourceVersion"]
            async for _ in api.client.watch(FINE_TUNE_JOBS, resource_version=version):
                raise AssertionError("the history did not end with the process")

        with pytest.raises(GoneError):
            api.run(watch())


def test_what_is_stored_survives_a_process_that_is_killed(tmp_path: Path) -> None:
    with serving(tmp_path) as api:
        api.run(api.client.create(FINE_TUNE_JOBS, manifest(name="soon"), "default"))
        state = tmp_path / "state.json"
        wait_until(lambda: state.exists() and '"soon"' in state.read_text(), 30)
        assert stat.S_IMODE(state.stat().st_mode) == 0o600
    assert [one.name for one in tmp_path.iterdir() if one.name.startswith(".")] == []


def test_a_file_that_holds_something_else_is_named(tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    state.write_text('{"kind": "Nothing"}')
    with pytest.raises(StateError, match=r"state\.json holds no objects .* move it away"):
        EmbeddedApi([], state=state)


def test_a_file_that_cannot_be_written_for_a_while_stops_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place, away = tmp_path / "place", tmp_path / "away"
    place.mkdir()
    with embedded_cluster(tmp_path, state=place / "state.json") as cluster:
        api = Api(cluster.kubeconfig)
        owner = api.run(api.client.create(SECRETS, {"metadata": {"name": "owner"}}, "default"))
        state = place / "state.json"
        wait_until(lambda: state.exists() and '"owner"' in state.read_text(), 30)
        place.rename(away)
        uid = owner["metadata"]["uid"]
        reference = {"apiVersion": "v1", "kind": "Secret", "name": "owner", "uid": uid}
        owned = {"metadata": {"name": "owned", "ownerReferences": [reference]}}
        api.run(api.client.create(SECRETS, owned, "default"))
        wait_until(lambda: "objects not saved" in caplog.text, 30)
        api.run(api.client.delete(SECRETS, "owner", "default"))
        wait_until(lambda: api.get(SECRETS, "default", "owned") is None, 30)
        away.rename(place)
        wait_until(lambda: '"owner"' not in state.read_text(), 30)
        api.close()


def test_a_crd_of_a_newer_release_takes_the_place_of_the_stored_one(tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    with serving(tmp_path):
        pass
    stored = json.loads(state.read_text())
    (crd,) = stored["objects"]["customresourcedefinitions.apiextensions.k8s.io"]
    crd["spec"]["versions"][0]["additionalPrinterColumns"] = []
    state.write_text(json.dumps(stored))
    with serving(tmp_path):
        pass
    (crd,) = json.loads(state.read_text())["objects"][
        "customresourcedefinitions.apiextensions.k8s.io"
    ]
    assert crd["spec"]["versions"] == custom_resource_definition()["spec"]["versions"]


def test_nobody_is_served_who_does_not_know_the_secret(tmp_path: Path) -> None:
    with embedded_cluster(tmp_path) as cluster:
        config = json.loads(Path(cluster.kubeconfig).read_text())
        url = config["clusters"][0]["cluster"]["server"]
        with urllib.request.urlopen(f"{url}/healthz", timeout=5) as answer:
            assert answer.read() == b"ok"
        origin, secret = url.rsplit("/", 1)
        assert len(secret) >= 32
        for place in ("healthz", "api/v1/secrets", f"{secret[:-1]}/api/v1/secrets", "é/version"):
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(f"{origin}/{urllib.parse.quote(place)}", timeout=5)
            with refused.value as error:
                assert error.code == 404
