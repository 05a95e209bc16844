"""Preconditions of the first hour on Azure: checked in this order before each call, read-only."""

import shutil
from collections.abc import Callable

from support.first_hour.shell import (
    NUM_GPU_NODES,
    NUM_SPOT_NODES,
    NUM_SYSTEM_NODES,
    TAG,
    Options,
    Shell,
    State,
    StepError,
)

PROGRAMS = ("az", "kubectl", "helm", "make", "ftctl", "python")


def check_programs(_: Shell, options: Options) -> str:
    """Check that each program is on the PATH."""
    absent = [one for one in PROGRAMS if shutil.which(one) is None]
    if absent:
        raise StepError(f"{', '.join(absent)} not on the PATH; make install puts ftctl into .venv")
    if options.azureml_profile is not None and not options.azureml_profile.is_file():
        raise StepError(f"--azureml-profile {options.azureml_profile} does not exist")
    return ", ".join(PROGRAMS)


def check_login(shell: Shell, _: Options) -> str:
    """Check that the Azure CLI is logged in."""
    try:
        account = shell.az("account", "show")
    except StepError as error:
        raise StepError(f"the Azure CLI is not logged in; run: az login ({error})") from error
    return f"subscription {account['name']} ({account['id']})"


def check_images(shell: Shell, options: Options) -> str:
    """Check that both images are in an Azure container registry."""
    if not options.acr:
        return f"not checked: {options.registry} is not an Azure container registry"
    for image in options.images.values():
        found = image.partition("/")[2]
        try:
            shell.az("acr", "repository", "show", "--name", options.acr, "--image", found)
        except StepError as error:
            raise StepError(f"{image} is missing; run: docker buildx bake --push") from error
    return ", ".join(options.images.values())


def check_group(shell: Shell, options: Options) -> str:
    """Check that the resource group does not exist, or was created by this script."""
    state = State.load(options.folder)
    if state.name not in ("", options.name):
        raise StepError(f"an earlier call used --name {state.name}; use that, or --clean first")
    if not shell.az("group", "exists", "--name", options.name):
        return f"{options.name} does not exist yet"
    if tag_of(shell, options.name) != state.id:
        raise StepError(
            f"resource group {options.name} exists and was not created from this checkout; "
            "choose another --name"
        )
    return f"{options.name} is of an earlier call"


def tag_of(shell: Shell, name: str) -> str:
    """Return the tag of the resource group; empty if it has none."""
    tags = shell.az("group", "show", "--name", name)["tags"] or {}
    return str(tags.get(TAG, ""))


def check_context(shell: Shell, options: Options) -> str:
    """Check that the kubeconfig of this script names its cluster; the user's is never used."""
    if not shell.kubeconfig.exists():
        return "created with the cluster"
    context = shell.kubectl("config", "current-context").strip()
    if context != options.name:
        raise StepError(f"{shell.kubeconfig} uses context {context}, not {options.name}; delete it")
    return context


def check_quota(shell: Shell, options: Options) -> str:
    """Check sizes and vCPUs of the location; spot nodes have a quota of their own."""
    if State.load(options.folder).has_passed("cluster"):
        return "checked by an earlier call"
    wanted: dict[str, int] = {}
    for size, nodes, spot_nodes in (
        (options.cpu_size, NUM_SYSTEM_NODES, NUM_SPOT_NODES),
        (options.gpu_size, NUM_GPU_NODES, 0),
    ):
        family, cores = size_of(shell, options.location, size)
        for quota, count in (
            (family, nodes),
            ("cores", nodes),
            ("lowPriorityCores", spot_nodes),
        ):
            wanted[quota] = wanted.get(quota, 0) + count * cores
    usages = shell.az("vm", "list-usage", "--location", options.location)
    free = {one["name"]["value"]: int(one["limit"]) - int(one["currentValue"]) for one in usages}
    for quota, count in wanted.items():
        if free.get(quota, 0) < count:
            raise StepError(
                f"quota {quota} in {options.location} has {free.get(quota, 0)} free vCPUs of the "
                f"{count} needed; request more in the portal, or choose another --location or size"
            )
    return ", ".join(f"{quota}: {count} vCPUs" for quota, count in wanted.items())


def size_of(shell: Shell, location: str, size: str) -> tuple[str, int]:
    """Return the family and the vCPUs of a VM size that the subscription may use."""
    where = ("--location", location, "--resource-type", "virtualMachines")
    found = shell.az("vm", "list-skus", *where, "--size", size, "--all")
    exact = [one for one in found if one["name"] == size]
    if not exact or any(one["type"] == "Location" for one in exact[0]["restrictions"]):
        raise StepError(f"VM size {size} is unavailable in {location}; choose another size")
    capabilities = {one["name"]: one["value"] for one in exact[0]["capabilities"]}
    return exact[0]["family"], int(capabilities["vCPUs"])


PRECONDITIONS: dict[str, Callable[[Shell, Options], str]] = {
    "programs": check_programs,
    "login": check_login,
    "images": check_images,
    "resource group": check_group,
    "kubectl context": check_context,
    "quota": check_quota,
}
