"""Build the images of the operator and the trainer, with docker, podman or buildah (make images).

    python operator/images/build_images.py [operator] [trainer]

Each becomes an archive in build/images, with a list of its packages beside it; images.json there
says what was built. Variables, all of them optional:

    ENGINE        docker, podman or buildah; by default the first that works
    BASE          image to build on; by default the one of the Dockerfiles, or where no registry
                  answers one of Debian packages
    PUSH          registry and folder, such as registry.example.com/team, to push to
    PLATFORMS     such as linux/amd64,linux/arm64: what to push for, with docker
    ACCELERATOR   cuda or cpu, for the trainer; cpu where WHEELS has such a build of torch
    TORCH         another build of torch than the locked one, such as torch==2.13.0+cpu
    WHEELS        folder that pip looks into besides the package index
    PIP_CONF, CA, APT_CONF    files that only the build sees: pip's settings (index, proxy),
                  certificates that pip trusts, apt's settings
    DEBIAN_MIRROR where the packages of a base come from
    NO_CACHE      1: make each layer anew
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import debian_base
import sbom
from engines import LOCAL, Build, Engine, EngineError, find
from oci_archive import opened, opened_if_whole, pack

ROOT = Path(__file__).parents[2]
OUTPUT = ROOT / "build" / "images"
TITLES = {"operator": "finetune-operator", "trainer": "finetune-trainer"}
SECRETS = {"pip": "PIP_CONF", "ca": "CA", "apt": "APT_CONF"}
VARIABLES = ("ENGINE", "BASE", "ACCELERATOR", "TORCH", "WHEELS", "DEBIAN_MIRROR", *SECRETS.values())
_CPU_WHEEL = "torch-*+cpu*.whl"


def main(wanted: list[str], given: Mapping[str, str]) -> int:
    """Build what is wanted; return the exit code."""
    try:
        unknown = sorted(set(wanted) - set(TITLES))
        if unknown:
            raise EngineError(f"{unknown[0]} is none of the images {', '.join(TITLES)}")
        built = [build(one, given, OUTPUT) for one in wanted or list(TITLES)]
    except EngineError as error:
        print(error, file=sys.stderr)
        return 1
    known = _known()
    for about in built:
        known[str(about["image"])] = about
        size = int(str(about["bytes"])) / 1e6
        print(f"{about['name']}  {size:.0f} MB  {about['digest']}  {about['seconds']} s")
    (OUTPUT / "images.json").write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    return 0


def build(image: str, given: Mapping[str, str], output: Path) -> dict[str, object]:
    """Build one image, and write its archive and the list of its packages; return what was made.

    Raises:
        EngineError: something is missing or failed; the message says what to do.
    """
    start = time.monotonic()
    engine = find(given.get("ENGINE", ""))
    plan = plan_of(image, given)
    output.mkdir(parents=True, exist_ok=True)
    base = base_of(engine, plan, given, output)
    if base:
        plan = replace(plan, arguments={**plan.arguments, "BASE": base})
    engine.build(plan, cached=given.get("NO_CACHE") != "1")
    archive = output / f"{TITLES[image]}.tar"
    layout = output / f"{TITLES[image]}.layout"
    with opened_if_whole(archive) as before:  # which mostly has all layers but that of our code
        engine.export(plan, layout, before.sizes if before else {})
        try:
            digest = pack(layout, plan.name, archive, before)
        except tarfile.ReadError as error:
            raise EngineError(f"{error}; remove {archive}, and build again") from error
    shutil.rmtree(layout)
    with opened(archive) as made:
        created = plan.labels.get("org.opencontainers.image.created", "1980-01-01T00:00:00Z")
        archive.with_suffix(".cdx.json").write_text(sbom.document(made, created), encoding="utf-8")
        layers = made.layers
    about = {"image": image, "name": plan.name, "digest": digest, "bytes": sum(layers)}
    about |= {"archive": archive.name, "layers": layers, "engine": engine.name}
    about["given"] = {name: given[name] for name in VARIABLES if given.get(name)}
    if given.get("PUSH"):
        pushed = output / f"{TITLES[image]}.pushed"
        engine.push(plan, pushed)
        about["pushed"] = pushed.read_text(encoding="utf-8").strip()
    return {**about, "seconds": round(time.monotonic() - start)}


def plan_of(image: str, given: Mapping[str, str]) -> Build:
    """Return what an image is built from, but for its base.

    Raises:
        EngineError: a variable names a file that is not there, or has no effect.
    """
    where = given.get("PUSH", "").rstrip("/") or LOCAL
    platforms = [one for one in given.get("PLATFORMS", "").split(",") if one]
    if platforms and not given.get("PUSH"):
        raise EngineError("PLATFORMS is for images that are pushed; name a registry by PUSH")
    wheels = Path(given["WHEELS"]) if given.get("WHEELS") else None
    if wheels is not None and not wheels.is_dir():
        raise EngineError(f"WHEELS={wheels} is no folder")
    secrets = {name: Path(given[one]) for name, one in SECRETS.items() if given.get(one)}
    for name, path in secrets.items():
        if not path.is_file():
            raise EngineError(f"{SECRETS[name]}={path} is no file")
    return Build(
        context=ROOT,
        dockerfile=f"{image}/Dockerfile",
        name=f"{where}/{TITLES[image]}:{version()}",
        arguments=trainer_arguments(wheels, given) if image == "trainer" else {},
        labels=_labels(image),
        secrets=secrets,
        wheels=wheels,
        platforms=platforms,
        mounted_stage="tools",
    )


def trainer_arguments(wheels: Path | None, given: Mapping[str, str]) -> dict[str, str]:
    """Return which build of torch the trainer gets."""
    release = re.search(
        r"^torch==([\d.]+)", (ROOT / "trainer/torch.lock").read_text(), re.MULTILINE
    )
    assert release is not None
    has_cpu_wheel = wheels is not None and any(wheels.glob(_CPU_WHEEL))
    accelerator = given.get("ACCELERATOR") or ("cpu" if has_cpu_wheel else "cuda")
    if accelerator not in ("cuda", "cpu"):
        raise EngineError(f"ACCELERATOR={accelerator} is neither cuda nor cpu")
    torch = given.get("TORCH") or (f"torch=={release[1]}+cpu" if accelerator == "cpu" else "")
    return {"ACCELERATOR": accelerator, "TORCH": torch}


def base_of(engine: Engine, plan: Build, given: Mapping[str, str], output: Path) -> str:
    """Return the base to name, or nothing where the Dockerfile's own is to be had.

    Raises:
        EngineError: there is none.
    """
    if given.get("BASE"):
        return given["BASE"]
    dockerfile = (plan.context / plan.dockerfile).read_text(encoding="utf-8")
    own = re.search(r"^ARG BASE=(\S+)$", dockerfile, flags=re.MULTILINE)
    assert own is not None
    if engine.has(own[1]):
        return ""
    compiler = plan.arguments.get("ACCELERATOR") == "cuda"
    archive = debian_base.make(
        output,
        compiler=compiler,
        mirror=given.get("DEBIAN_MIRROR", ""),
        fresh=given.get("NO_CACHE") == "1",
    )
    with archive.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    kind = "base-cuda" if compiler else "base"
    name = f"{LOCAL}/finetune-{kind}:{debian_base.SUITE}-{digest[:12]}"
    if not engine.holds(name):
        engine.load_root(archive, name)
    return name


def version() -> str:
    """Return the package's version, which is the images' tag."""
    return str(_project()["version"])


def _project() -> dict[str, Any]:
    read = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    project: dict[str, Any] = read["project"]
    return project


def _labels(image: str) -> dict[str, str]:
    start = "org.opencontainers.image."
    project = _project()
    urls = project["urls"]
    found = {
        "title": TITLES[image],
        "version": str(project["version"]),
        "licenses": str(project["license"]),
        "description": str(project["description"]),
        "documentation": str(urls["Documentation"]),
        "source": str(urls["Documentation"]).partition("/tree/")[0],
    }
    said = _git("log", "-1", "--format=%H %ct")
    if said:
        revision, _, seconds = said.partition(" ")
        is_changed = bool(_git("status", "--porcelain"))
        found["revision"] = revision + ("-changed" if is_changed else "")
        when = time.gmtime(int(seconds))
        found["created"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", when)
    return {start + key: value for key, value in found.items()}


def _git(*arguments: str) -> str:
    """Return what git says of this checkout; nothing in a copy without history."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _known() -> dict[str, object]:
    file = OUTPUT / "images.json"
    if not file.exists():
        return {}
    found: dict[str, object] = json.loads(file.read_text(encoding="utf-8"))
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
