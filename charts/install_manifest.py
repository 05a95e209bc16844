"""Write kustomize/install.yaml, the chart rendered with default values, for use without helm.

`make crd` runs it; it needs helm. `python charts/install_manifest.py --check` checks that the file
is current. Its first lines contain digests of the chart and of the rest of the file, so that the
check does not need helm.
"""

import hashlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
CHART = HERE / "finetune-operator"
MANIFEST = HERE / "kustomize" / "install.yaml"
NAMESPACE = "finetune-operator"
IMAGE = "ghcr.io/finetune-operator/finetune-operator"

_HEADER = """\
# Generated from charts/finetune-operator with its default values: make crd
# chart {chart}
# below {below}
"""
_NAMESPACE = f"""\
apiVersion: v1
kind: Namespace
metadata:
  name: {NAMESPACE}
  labels:
    app.kubernetes.io/name: finetune-operator
    app.kubernetes.io/instance: finetune-operator
    pod-security.kubernetes.io/enforce: restricted
"""
# Labels by which helm finds its objects, and comments that name templates. The operator finds its
# own namespace, so that an overlay may choose another.
_OF_HELM = re.compile(
    r"^ *(app\.kubernetes\.io/managed-by: Helm|helm\.sh/chart: .*)\n|^# .*\n"
    r"|^ *- name: FINETUNE_OPERATOR_LEASE_NAMESPACE\n.*\n",
    re.MULTILINE,
)


def main() -> int:
    """Write the file, or with `--check` compare it; return the exit code."""
    helm, chart = shutil.which("helm"), digest_of_chart()
    there = MANIFEST.read_text(encoding="utf-8") if MANIFEST.exists() else ""
    if "--check" in sys.argv[1:]:
        same = there == manifest(helm, chart) if helm else is_of(there, chart)
        if not same:
            print(f"{MANIFEST.name} is out of date; with helm on the PATH run: make crd")
        elif not helm:
            print(f"helm is not on the PATH: {MANIFEST.name} was compared by its digests alone")
        return 0 if same else 1
    if helm is None:
        stale = not is_of(there, chart)
        print(f"helm is not on the PATH: {MANIFEST.name} is {'out of date' if stale else 'kept'}")
        return 1 if stale else 0
    if there != (wanted := manifest(helm, chart)):
        MANIFEST.write_text(wanted, encoding="utf-8")
        print(f"wrote {MANIFEST.relative_to(HERE)}")
    return 0


def is_of(text: str, chart: str) -> bool:
    """Whether the text was rendered from the chart with this digest, and not changed since."""
    body = "".join(text.splitlines(keepends=True)[3:])
    return text == _with_header(body, chart)


def digest_of_chart() -> str:
    """Return a digest of all inputs of the manifest, including this program."""
    files = [CHART / "Chart.yaml", CHART / "values.yaml", Path(__file__)]
    files += [*(CHART / "templates").iterdir(), *(CHART / "files").glob("*.yaml")]
    total = hashlib.sha256()
    for file in sorted(files):
        total.update(f"{file.name}\n".encode() + file.read_bytes())
    return total.hexdigest()[:16]


def manifest(helm: str, chart: str) -> str:
    """Return the text of the file.

    Raises:
        subprocess.CalledProcessError: helm refuses the chart and has printed the reason.
    """
    values = ("--set", f"image.repository={IMAGE}")
    command = [helm, "template", NAMESPACE, str(CHART), "--namespace", NAMESPACE, *values]
    # The version is set, because helm's default may be older than the chart accepts.
    command += ["--kube-version", "1.34.0", "--skip-tests"]
    made = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    parts = [_OF_HELM.sub("", part).strip() for part in re.split(r"^---$", made, flags=re.M)]
    objects = [_NAMESPACE.strip(), *(part for part in parts if part)]
    # Namespaces and CRDs come first, because other objects need them.
    objects.sort(key=lambda text: "\nkind: CustomResourceDefinition\n" not in text)
    objects.sort(key=lambda text: "\nkind: Namespace\n" not in text)
    return _with_header("".join(f"---\n{one}\n" for one in objects), chart)


def _with_header(body: str, chart: str) -> str:
    below = hashlib.sha256(body.encode()).hexdigest()[:16]
    return _HEADER.format(chart=chart, below=below) + body


if __name__ == "__main__":
    sys.exit(main())
