"""`PYTHONPATH=tests python -m azureml_service`: run the service until SIGTERM.

Prints the variables to export, by which the operator or `ftctl` finds it. With `--control` it
takes the verbs of `control` instead, until its standard input ends.
"""

import argparse
import json
import os
import shlex
import signal
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType

from azureml_service import bodies
from azureml_service.compute import Settings
from azureml_service.control import Control, settings
from azureml_service.identity import CLIENT, TENANT
from azureml_service.resources import WORKSPACE
from azureml_service.server import Service

_KEPT = ("HOME", "LANG", "HF_HUB_OFFLINE", "OMP_NUM_THREADS", "TOKENIZERS_PARALLELISM")


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(prog="azureml_service", description=__doc__)
    parser.add_argument("--control", action="store_true", help="take verbs from standard input")
    parser.add_argument("--folder", type=Path, help="for all that it writes")
    parser.add_argument("--root", type=Path, help="of datastores and registered models")
    parser.add_argument("--settings", type=json.loads, default={"runs_jobs": True})
    parser.add_argument("--workspace", action="append", help="ARM id")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, _leave)
    with TemporaryDirectory(prefix="azureml-", ignore_cleanup_errors=True) as temporary:
        folder = given.folder or Path(temporary)
        service = Service(
            folder,
            given.root or folder,
            Settings(**settings(given.settings)),
            given.workspace or [WORKSPACE],
            _image(),
        )
        try:
            _serve(service, _environ(service, folder), is_controlled=given.control)
        finally:
            service.close()


def _serve(service: Service, environ: dict[str, str], *, is_controlled: bool) -> None:
    bodies.models()  # the first job that is put need not wait for their import
    service.start()
    if is_controlled:
        print(json.dumps(environ), flush=True)
        Control(service).serve(sys.stdin, sys.stdout)
        return
    for name, value in environ.items():
        print(f"export {name}={shlex.quote(value)}", flush=True)
    while True:
        signal.pause()


def _environ(service: Service, folder: Path) -> dict[str, str]:
    return {
        "AZURE_AUTHORITY_HOST": service.base,
        "AZUREML_DEV_URL_MFE": service.base,
        "REQUESTS_CA_BUNDLE": str(folder / "ca.pem"),
        "AZURE_TENANT_ID": TENANT,
        "AZURE_CLIENT_ID": CLIENT,
        "AZURE_FEDERATED_TOKEN_FILE": str(service.tokens.file),
    }


def _image() -> dict[str, str]:
    """Return the variables of an image whose `python` is the current interpreter."""
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    return {**kept, "PATH": f"{Path(sys.executable).parent}:{os.defpath}"}


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(0)


if __name__ == "__main__":
    main()
