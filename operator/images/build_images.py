"""Build the operator and trainer images with buildah (make images).

    python operator/images/build_images.py [operator] [trainer]

docker-bake.json defines both images; `docker buildx bake` builds them with docker. This program
builds the same definition with buildah, also without a registry: it then creates the base image
from Debian packages (root and mmdebstrap). Each image is written to build/images as a docker
archive; images.json lists names and IDs.

Optional environment variables, besides the variables of docker-bake.json:

    BASE          base image; default: the Dockerfile's, or Debian packages if the pull fails
    WHEELS        folder of wheels that pip searches besides the package index; with a CPU build of
                  torch in it, ACCELERATOR defaults to cpu
    PIP_CONF, CA, APT_CONF    files mounted during the build and stored in no layer: settings of
                  pip (index, proxy), CA certificates for pip, settings of apt
    DEBIAN_MIRROR mirror that the base's packages are downloaded from
    NO_CACHE      1: rebuild all layers and the base
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from string import Template
from typing import Any

ROOT = Path(__file__).parents[2]
OUTPUT = ROOT / "build" / "images"
IMAGES = ("operator", "trainer")
SECRETS = {"pip": "PIP_CONF", "ca": "CA", "apt": "APT_CONF"}
REMOVED = {
    "ENGINE": "make images builds with buildah; build with docker by: docker buildx bake",
    "PUSH": "push with `docker buildx bake --push`, or with `buildah push` after make images",
    "PLATFORMS": "build for other platforms with docker buildx bake --set '*.platform=…'",
}
# 1980, the earliest time that every archive format can store. A commit's time would change every
# layer with every commit; it is in a label instead.
EPOCH = "315532800"
COMMON = ("--timestamp", EPOCH, "--layers", "--isolation", "chroot", "--identity-label=false")

DEBIAN = "bookworm"
# torch and numpy load libstdc++, which a base with apt has anyway.
PACKAGES = ("usr-is-merged", "python3", "python3-venv", "ca-certificates", "libstdc++6")
CUDA_PACKAGES = ("gcc", "libc6-dev", "python3-dev")


class BuildError(Exception):
    """A setting is invalid, or a program is missing or has failed; the message names the remedy."""


def main(names: list[str], environ: Mapping[str, str], output: Path = OUTPUT) -> int:
    """Build the named images, or both, into a folder; return the exit code."""
    try:
        for name, remedy in REMOVED.items():
            if environ.get(name):
                raise BuildError(f"{name}={environ[name]}: {remedy}")
        if unknown := sorted(set(names) - set(IMAGES)):
            raise BuildError(f"unknown image {unknown[0]}; use {' or '.join(IMAGES)}")
        if shutil.which("buildah") is None:
            raise BuildError(
                "buildah is not on the PATH; install it (on Debian: apt-get install buildah), "
                "or build with docker: docker buildx bake"
            )
        records = {name: build(name, environ, output) for name in names or IMAGES}
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    file = output / "images.json"
    earlier = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    file.write_text(json.dumps({**earlier, **records}, indent=1) + "\n", encoding="utf-8")
    for record in records.values():
        megabytes = (output / record["archive"]).stat().st_size / 1e6
        print(f"{record['name']}  {megabytes:.0f} MB  {record['id']}  {record['seconds']} s")
    return 0


def build(image: str, environ: Mapping[str, str], output: Path) -> dict[str, Any]:
    """Build an image and write its archive; return its record in images.json.

    Raises:
        BuildError: A setting is invalid, or a program is missing or has failed.
    """
    start = time.monotonic()
    target = read_target(image, environ)
    name = str(target["tags"][0])
    archive = output / f"finetune-{image}.tar"
    options = build_options(target, environ)
    output.mkdir(parents=True, exist_ok=True)
    if base := resolve_base(target, environ, output):
        options += ["--build-arg", f"BASE={base}"]
    # buildah 1.28 cannot mount a stage that its cache already holds, but it can mount an image.
    tools = f"localhost/finetune-tools:{image}"
    _buildah("build", *options, "--target", "tools", "--tag", tools, str(ROOT))
    options += ["--build-context", f"tools=container-image://{tools}"]
    unlabelled = f"localhost/finetune-unlabelled:{image}"
    _buildah("build", *options, "--tag", unlabelled, str(ROOT))
    # buildah labels intermediate images too, and the history of an image names their IDs. Labels of
    # a cached commit would therefore change the image ID: they are added last, without a cache.
    labels = [f"--label={key}={value}" for key, value in target["labels"].items()]
    command = ["build", *COMMON, "--no-cache", *labels, "--file", "-", "--tag", name, str(output)]
    _buildah(*command, stdin=f"FROM {unlabelled}\n")
    # This format leaves layers uncompressed; compressing gigabytes takes minutes.
    new = archive.with_suffix(".new")
    new.unlink(missing_ok=True)
    _buildah("push", "--quiet", name, f"docker-archive:{new}:{name}")
    new.replace(archive)
    return {
        "name": name,
        "id": _output("buildah", "inspect", "--type=image", "--format={{.FromImageID}}", name),
        "archive": archive.name,
        "environ": {key: environ[key] for key in _variables() if environ.get(key)},
        "seconds": round(time.monotonic() - start),
    }


def read_target(image: str, environ: Mapping[str, str]) -> dict[str, Any]:
    """Return an image's target in docker-bake.json with all variables replaced.

    Raises:
        BuildError: ACCELERATOR is unknown.
    """
    text = (ROOT / "docker-bake.json").read_text(encoding="utf-8")
    values = {name: str(one["default"]) for name, one in json.loads(text)["variable"].items()}
    wheels = Path(environ.get("WHEELS") or "/nonexistent")
    if any(wheels.glob("torch-*+cpu*.whl")):
        values["ACCELERATOR"] = "cpu"
    values |= {name: environ[name] for name in values if environ.get(name)}
    if values["ACCELERATOR"] not in ("cuda", "cpu"):
        raise BuildError(f"ACCELERATOR={values['ACCELERATOR']} is unknown; use cuda or cpu")
    if values["ACCELERATOR"] == "cpu" and not values["TORCH"]:
        lock = (ROOT / "trainer" / "torch.lock").read_text(encoding="utf-8")
        values["TORCH"] = re.findall(r"^torch==[\d.]+", lock, re.MULTILINE)[0] + "+cpu"
    escaped = {name: json.dumps(value)[1:-1] for name, value in values.items()}
    targets: dict[str, Any] = json.loads(Template(text).substitute(escaped))["target"]
    (parent,) = targets[image]["inherits"]
    labels = targets[parent]["labels"] | targets[image]["labels"] | commit_labels()
    return {"args": {}, **targets[parent], **targets[image], "labels": labels}


def commit_labels() -> dict[str, str]:
    """Return labels with the commit of the checkout and its time; none without a repository."""
    start = "org.opencontainers.image."
    commit = _output("git", "-C", str(ROOT), "log", "-1", "--format=%H %ct")
    if not commit:
        return {}
    revision, _, seconds = commit.partition(" ")
    is_changed = _output("git", "-C", str(ROOT), "status", "--porcelain") != ""
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(int(seconds)))
    suffix = "-changed" if is_changed else ""
    return {f"{start}revision": revision + suffix, f"{start}created": created}


def build_options(target: Mapping[str, Any], environ: Mapping[str, str]) -> list[str]:
    """Return buildah's options for a target without base, labels and tag.

    Raises:
        BuildError: A variable names a missing file or folder.
    """
    options = ["--file", str(ROOT / target["dockerfile"])]
    options += [f"--build-arg={key}={value}" for key, value in target["args"].items()]
    for secret, variable in SECRETS.items():
        if path := environ.get(variable):
            if not Path(path).is_file():
                raise BuildError(f"{variable}={path}: file not found")
            options += ["--secret", f"id={secret},src={path}"]
    if wheels := environ.get("WHEELS"):
        if not Path(wheels).is_dir():
            raise BuildError(f"WHEELS={wheels}: folder not found")
        options += ["--build-context", f"wheels={wheels}"]
    return [*COMMON, *_cache_options(environ), *options]


def resolve_base(target: Mapping[str, Any], environ: Mapping[str, str], output: Path) -> str:
    """Return the base image to build on; empty for the Dockerfile's own.

    Raises:
        BuildError: No base can be created.
    """
    if environ.get("BASE"):
        return environ["BASE"]
    dockerfile = (ROOT / target["dockerfile"]).read_text(encoding="utf-8")
    (own,) = re.findall(r"^ARG BASE=(\S+)$", dockerfile, re.MULTILINE)
    if _exists(own) or _succeeds("pull", "--quiet", own):
        return ""
    has_compiler = target["args"].get("ACCELERATOR") == "cuda"
    archive = debian_base(environ, output, has_compiler=has_compiler)
    with archive.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    name = f"localhost/finetune-base{'-cuda' if has_compiler else ''}:{DEBIAN}-{digest[:12]}"
    if not _exists(name):
        command = ["build", *COMMON, *_cache_options(environ), "--file", "-", "--tag", name]
        _buildah(*command, str(output), stdin=f"FROM scratch\nADD {archive.name} /\n")
    return name


def debian_base(environ: Mapping[str, str], output: Path, *, has_compiler: bool) -> Path:
    """Return a tar archive of a root file system with Python, created from Debian packages.

    The base contains certificates and Debian's essential packages, but neither apt nor
    documentation. The same packages give the same bytes.

    Args:
        environ: Environment variables of the build.
        output: Folder of the archive, which later builds reuse.
        has_compiler: Include a C compiler and Python's headers.

    Raises:
        BuildError: mmdebstrap is missing or has failed.
    """
    mirror = environ.get("DEBIAN_MIRROR", "")
    options = _mmdebstrap_options(has_compiler=has_compiler)
    digest = hashlib.sha256(repr([*options, mirror]).encode()).hexdigest()
    archive = output / f"base-{digest[:12]}.tar"
    if archive.exists() and environ.get("NO_CACHE") != "1":
        return archive
    if shutil.which("mmdebstrap") is None:
        raise BuildError(
            "the Dockerfile's base cannot be pulled, and mmdebstrap is not on the PATH to create a "
            "base; run: apt-get install mmdebstrap, or name a local image: make images BASE=…"
        )
    print("the Dockerfile's base cannot be pulled; creating it from Debian", file=sys.stderr)
    new = archive.with_suffix(".new.tar")
    done = subprocess.run(
        ["mmdebstrap", *options, DEBIAN, str(new), *([mirror] if mirror else [])],
        env={**os.environ, "SOURCE_DATE_EPOCH": EPOCH},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        last = "\n".join(done.stderr.strip().splitlines()[-5:])
        raise BuildError(f"mmdebstrap failed (exit {done.returncode}):\n{last}")
    return new.rename(archive)


def _mmdebstrap_options(*, has_compiler: bool) -> list[str]:
    packages = PACKAGES + (CUDA_PACKAGES if has_compiler else ())
    # Package triggers write these with the time of day, or only apt uses them.
    files = '"$1"/var/cache/ldconfig/aux-cache "$1"/var/cache/debconf/*-old "$1"/var/log/*'
    compiled = '"$1"/usr/lib/python3* "$1"/usr/share/python3 -name __pycache__'
    return [
        *("--quiet", "--variant=essential", f"--include={','.join(packages)}"),
        # Without it Debian 12 installs usrmerge, which depends on all of perl.
        "--hook-dir=/usr/share/mmdebstrap/hooks/merged-usr",
        *(f"--dpkgopt=path-exclude=/usr/share/{one}/*" for one in ("doc", "info", "locale", "man")),
        "--dpkgopt=path-include=/usr/share/doc/*/copyright",
        f"--customize-hook=find {compiled} -prune -exec rm -rf {{}} + ; rm -rf {files}",
    ]


def _cache_options(environ: Mapping[str, str]) -> list[str]:
    return ["--no-cache"] if environ.get("NO_CACHE") == "1" else []


def _variables() -> list[str]:
    bake = json.loads((ROOT / "docker-bake.json").read_text(encoding="utf-8"))
    return [*bake["variable"], "BASE", "WHEELS", "DEBIAN_MIRROR", *SECRETS.values()]


def _buildah(*arguments: str, stdin: str = "") -> None:
    # Progress goes to stderr; stdout is for the lines that main prints.
    done = subprocess.run(["buildah", *arguments], input=stdin, text=True, stdout=sys.stderr)
    if done.returncode:
        raise BuildError(f"buildah {arguments[0]} failed (exit {done.returncode}); see above")


def _exists(name: str) -> bool:
    return _succeeds("inspect", "--type=image", name)


def _succeeds(*arguments: str) -> bool:
    return subprocess.run(["buildah", *arguments], capture_output=True).returncode == 0


def _output(*command: str) -> str:
    """Return a program's output; empty if it fails or is not installed."""
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
