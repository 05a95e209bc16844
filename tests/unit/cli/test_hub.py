"""A hub that does not respond is found out at once; copies of this machine remain usable."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from finetune_operator.api.problems import InvalidJobError
from finetune_operator.cli.hub import has_copy, silence, without_silent_hub
from finetune_operator.cli.target import open_target
from support.api.builders import manifest


@contextmanager
def listening() -> Iterator[str]:
    """A socket that accepts connections and never responds."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@contextmanager
def responding(code: int) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(code)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def closed() -> str:
    with listening() as endpoint:
        return endpoint


def test_no_response_within_the_limit_is_silence() -> None:
    with listening() as endpoint:
        why = silence({"HF_ENDPOINT": endpoint}, seconds=0.2)
    assert why == f"the hub {endpoint} does not respond (no response within 0.2 s)"


def test_a_refused_connection_is_silence() -> None:
    endpoint = closed()
    why = silence({"HF_ENDPOINT": endpoint})
    assert why == f"the hub {endpoint} does not respond (Connection refused)"


def test_a_name_that_is_unknown_is_silence() -> None:
    why = silence({"HF_ENDPOINT": "http://hub.invalid"}, seconds=5)
    assert why is not None


@pytest.mark.parametrize(
    ("code", "responds"), [(200, True), (401, True), (404, True), (503, False)]
)
def test_an_error_of_the_hub_is_a_response_but_not_of_a_gateway(code: int, responds: bool) -> None:
    with responding(code) as endpoint:
        assert (silence({"HF_ENDPOINT": endpoint}) is None) == responds


def job(folder: Path, **changes: Any) -> Path:
    values = {"model.source": "hf://org/model", "dataset.source": "file://./rows.jsonl"}
    file = folder / "job.yaml"
    file.write_text(yaml.safe_dump(manifest(name="hub", **{**values, **changes})))
    return file


@pytest.fixture
def offline_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    endpoint = closed()
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    return endpoint


def test_an_input_without_a_copy_is_refused_with_its_line(tmp_path: Path, offline_hub: str) -> None:
    target = open_target(job(tmp_path), "local")
    with pytest.raises(InvalidJobError) as caught:
        without_silent_hub(target)
    [problem] = caught.value.problems
    assert problem.path == "spec.model.source"
    assert problem.line is not None
    assert problem.message == (
        f"hf://org/model: the hub {offline_hub} does not respond (Connection refused), and this "
        "machine has no copy; check the network and HF_ENDPOINT, or name a local path (file://)"
    )


def test_a_copy_is_used_without_asking_the_hub_again(
    tmp_path: Path, offline_hub: str, capsys: pytest.CaptureFixture[str]
) -> None:
    snapshot = tmp_path / "cache/huggingface/hub/models--org--model/snapshots/abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    target = without_silent_hub(open_target(job(tmp_path), "local"))
    assert target.context.environ["HF_HUB_OFFLINE"] == "1"
    assert "(Connection refused); the copies on this machine are used" in capsys.readouterr().err


def test_data_sets_have_copies_of_their_own(tmp_path: Path) -> None:
    environ = {"HF_HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    assert not has_copy("Org/My-Rows", environ, is_model=False)
    (tmp_path / "finetune-operator/tokens/datasets/org___my-rows").mkdir(parents=True)
    assert has_copy("Org/My-Rows", environ, is_model=False)
    assert not has_copy("Org/My-Rows", environ, is_model=True)


def test_local_inputs_ask_no_hub(tmp_path: Path, offline_hub: str) -> None:
    target = open_target(job(tmp_path, **{"model.source": "file://./model"}), "local")
    assert without_silent_hub(target) is target
