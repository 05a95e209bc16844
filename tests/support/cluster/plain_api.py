"""A real or embedded API server in plain HTTP: texts go out as they are written."""

import json
import warnings
from dataclasses import dataclass
from typing import Any

JSON = "application/json"
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
_APPLY = "application/apply-patch+yaml"


@dataclass(frozen=True)
class Answer:
    """What the API server said."""

    status: int
    body: dict[str, Any]
    warning: str | None

    @property
    def is_accepted(self) -> bool:
        return self.status in (200, 201)

    @property
    def message(self) -> str:
        return str(self.body.get("message", ""))


class PlainApi:
    """Plain HTTP with the kubeconfig's certificates: the text goes out as it is written."""

    def __init__(self, kubeconfig: str) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # raised inside its own import
            from kubernetes import client, config

        configuration = client.Configuration()
        config.load_kube_config(kubeconfig, client_configuration=configuration)
        self._host = configuration.host
        self._pool = client.ApiClient(configuration).rest_client.pool_manager

    def send(
        self, method: str, path: str, text: str = "", kind: str = "application/yaml", **query: str
    ) -> Answer:
        asked = "&".join(f"{key}={value}" for key, value in query.items())
        headers = {"Content-Type": kind, "Accept": "application/json"}
        url = f"{self._host}{path}?{asked}"
        response = self._pool.request(method, url, body=text.encode(), headers=headers)
        is_json = response.headers.get("Content-Type") == "application/json"
        body = json.loads(response.data) if is_json else {}  # a path not served yet answers in text
        return Answer(response.status, body, response.headers.get("Warning"))

    def define(self, name: str, text: str) -> None:
        """Apply a CustomResourceDefinition, and wait until it is established."""
        query = {"fieldManager": "tests", "force": "true", "fieldValidation": "Strict"}
        answer = self.send("PATCH", f"{CRDS}/{name}", text, _APPLY, **query)
        assert answer.is_accepted, answer.message
        assert answer.warning is None
        while not _is_established(self.send("GET", f"{CRDS}/{name}").body):
            pass


def _is_established(crd: dict[str, Any]) -> bool:
    conditions = {one["type"]: one["status"] for one in crd["status"].get("conditions") or []}
    assert conditions.get("NonStructuralSchema") != "True"
    return conditions.get("Established") == "True"
