"""Schemas of parts of a PodSpec: `podTemplate.spec` of a job and `volumes[].source` of a profile.

The CRDs, `ftctl validate` and the Kubernetes backend use the same schemas. A field that a job may
not set is declared with a rule that refuses it, because the API server drops undeclared fields
without an error for clients that do not ask for strict validation. Affinity, tolerations and
volumes have all fields of Kubernetes up to 1.35: a missing field would vanish from stored jobs.
Values of enumerations are left to Kubernetes, which may add values.
"""

from collections.abc import Iterator
from typing import Any

from finetune_operator.api.openapi import REFUSED, Schema, is_refused
from finetune_operator.api.paths import FieldPath, Finding

_REFUSAL = "cannot be set by a job; remove it"
_BOUNDS = frozenset({"maxItems", "maxLength", "maxProperties", "maximum", "minimum"})

_TEXT: Schema = {"type": "string", "maxLength": 4096}
_BOOLEAN: Schema = {"type": "boolean"}
_INTEGER: Schema = {"type": "integer", "minimum": -(10**12), "maximum": 10**12}
_QUANTITY: Schema = {
    "x-kubernetes-int-or-string": True,
    **{"minimum": 0, "maximum": 2**53, "maxLength": 64},
}


def _fields(*required: str, **properties: Schema) -> Schema:
    described = {
        name: {"description": f"{name}, as in a PodSpec.", **schema}
        for name, schema in properties.items()
    }
    found: Schema = {"type": "object", "properties": described}
    return found | ({"required": list(required)} if required else {})


def _list(items: Schema, most: int = 64) -> Schema:
    return {"type": "array", "maxItems": most, "items": items}


def _map(values: Schema, most: int = 64) -> Schema:
    return {"type": "object", "maxProperties": most, "additionalProperties": values}


def _refused(**types: str) -> dict[str, Schema]:
    """Return fields that are refused, given the names of each type."""
    rules = [{"rule": REFUSED, "message": _REFUSAL}]
    found: dict[str, Schema] = {}
    for type_, names in types.items():
        schema: Schema = {"type": type_.removesuffix("s")}
        if type_ in ("objects", "texts"):
            item = "string" if type_ == "texts" else "object"
            schema = {"type": "array", "items": {"type": item}}
        found |= {name: {**schema, "x-kubernetes-validations": rules} for name in names.split()}
    return found


_REQUIREMENT = _fields("key", "operator", key=_TEXT, operator=_TEXT, values=_list(_TEXT, 256))
_LABELS = _fields(matchLabels=_map(_TEXT), matchExpressions=_list(_REQUIREMENT))
_NODES = _fields(matchExpressions=_list(_REQUIREMENT), matchFields=_list(_REQUIREMENT))
_PODS = _fields(
    "topologyKey",
    labelSelector=_LABELS,
    matchLabelKeys=_list(_TEXT),
    mismatchLabelKeys=_list(_TEXT),
    namespaceSelector=_LABELS,
    namespaces=_list(_TEXT),
    topologyKey=_TEXT,
)
_POD_AFFINITY = _fields(
    requiredDuringSchedulingIgnoredDuringExecution=_list(_PODS),
    preferredDuringSchedulingIgnoredDuringExecution=_list(
        _fields("weight", "podAffinityTerm", weight=_INTEGER, podAffinityTerm=_PODS)
    ),
)
_AFFINITY = _fields(
    nodeAffinity=_fields(
        requiredDuringSchedulingIgnoredDuringExecution=_fields(
            "nodeSelectorTerms", nodeSelectorTerms=_list(_NODES)
        ),
        preferredDuringSchedulingIgnoredDuringExecution=_list(
            _fields("weight", "preference", weight=_INTEGER, preference=_NODES)
        ),
    ),
    podAffinity=_POD_AFFINITY,
    podAntiAffinity=_POD_AFFINITY,
)
_TOLERATION = _fields(
    key=_TEXT, operator=_TEXT, value=_TEXT, effect=_TEXT, tolerationSeconds=_INTEGER
)
_NAMED = _fields(name=_TEXT)
_EMPTY_DIR = _fields(medium=_TEXT, sizeLimit=_QUANTITY)
_CLAIM = _fields("claimName", claimName=_TEXT, readOnly=_BOOLEAN)
_SECRET_KEY = _fields("name", "key", name=_TEXT, key=_TEXT, optional=_BOOLEAN)
_VALUE: Schema = {"type": "string", "maxLength": 32768}
_VARIABLE = _fields(
    "name",
    name=_TEXT,
    value=_VALUE,
    valueFrom=_fields("secretKeyRef", secretKeyRef=_SECRET_KEY),
)
_MOUNT = _fields(
    "name",
    "mountPath",
    name=_TEXT,
    mountPath=_TEXT,
    readOnly=_BOOLEAN,
    subPath=_TEXT,
    **_refused(string="mountPropagation recursiveReadOnly subPathExpr"),
)
_CONTAINER = _fields(
    "name",
    name=_TEXT,
    env=_list(_VARIABLE),
    resources=_fields(
        requests=_map(_QUANTITY), limits=_map(_QUANTITY), **_refused(objects="claims")
    ),
    volumeMounts=_list(_MOUNT),
    **_refused(
        string="image imagePullPolicy restartPolicy terminationMessagePath"
        " terminationMessagePolicy workingDir",
        boolean="stdin stdinOnce tty",
        object="lifecycle livenessProbe readinessProbe securityContext startupProbe",
        objects="envFrom ports resizePolicy restartPolicyRules volumeDevices",
        texts="args command",
    ),
)
_VOLUME: Schema = {
    **_fields("name", name=_TEXT, emptyDir=_EMPTY_DIR, persistentVolumeClaim=_CLAIM),
    "x-kubernetes-validations": [
        {
            "rule": "has(self.emptyDir) != has(self.persistentVolumeClaim)",
            "message": "must be either emptyDir or persistentVolumeClaim",
        }
    ],
}

JOB_POD_SPEC = _fields(
    affinity=_AFFINITY,
    containers=_list(_CONTAINER, 1),
    imagePullSecrets=_list(_fields("name", name=_TEXT), 16),
    nodeSelector=_map(_TEXT),
    tolerations=_list(_TOLERATION),
    volumes=_list(_VOLUME, 32),
    **_refused(
        boolean="automountServiceAccountToken enableServiceLinks hostIPC hostNetwork hostPID"
        " hostUsers setHostnameAsFQDN shareProcessNamespace",
        integer="activeDeadlineSeconds priority terminationGracePeriodSeconds",
        string="dnsPolicy hostname hostnameOverride nodeName preemptionPolicy priorityClassName"
        " restartPolicy runtimeClassName schedulerName serviceAccount serviceAccountName subdomain",
        object="dnsConfig os overhead resources securityContext workloadRef",
        objects="ephemeralContainers hostAliases initContainers readinessGates resourceClaims"
        " schedulingGates topologySpreadConstraints",
    ),
)
"""The fields of a PodSpec that a job may set, and refusals of all others."""

_KEYS = _list(_fields("key", "path", key=_TEXT, mode=_INTEGER, path=_TEXT))
_FIELD_REF = _fields("fieldPath", apiVersion=_TEXT, fieldPath=_TEXT)
_RESOURCE_REF = _fields("resource", containerName=_TEXT, divisor=_QUANTITY, resource=_TEXT)
_DOWNWARD = _list(
    _fields("path", fieldRef=_FIELD_REF, mode=_INTEGER, path=_TEXT, resourceFieldRef=_RESOURCE_REF)
)
_TYPED = _fields("kind", "name", apiGroup=_TEXT, kind=_TEXT, name=_TEXT, namespace=_TEXT)
_CLAIM_TEMPLATE = _fields(
    "spec",
    metadata=_fields(annotations=_map(_TEXT), labels=_map(_TEXT)),
    spec=_fields(
        accessModes=_list(_TEXT),
        dataSource=_TYPED,
        dataSourceRef=_TYPED,
        resources=_fields(limits=_map(_QUANTITY), requests=_map(_QUANTITY)),
        selector=_LABELS,
        storageClassName=_TEXT,
        volumeAttributesClassName=_TEXT,
        volumeMode=_TEXT,
        volumeName=_TEXT,
    ),
)
_PROJECTED = _fields(
    clusterTrustBundle=_fields(
        "path",
        labelSelector=_LABELS,
        name=_TEXT,
        optional=_BOOLEAN,
        path=_TEXT,
        signerName=_TEXT,
    ),
    configMap=_fields(items=_KEYS, name=_TEXT, optional=_BOOLEAN),
    downwardAPI=_fields(items=_DOWNWARD),
    podCertificate=_fields(
        "signerName",
        "keyType",
        certificateChainPath=_TEXT,
        credentialBundlePath=_TEXT,
        keyPath=_TEXT,
        keyType=_TEXT,
        maxExpirationSeconds=_INTEGER,
        signerName=_TEXT,
        userAnnotations=_map(_TEXT),
    ),
    secret=_fields(items=_KEYS, name=_TEXT, optional=_BOOLEAN),
    serviceAccountToken=_fields("path", audience=_TEXT, expirationSeconds=_INTEGER, path=_TEXT),
)

VOLUME_SOURCE = _fields(
    awsElasticBlockStore=_fields(
        "volumeID", fsType=_TEXT, partition=_INTEGER, readOnly=_BOOLEAN, volumeID=_TEXT
    ),
    azureDisk=_fields(
        "diskName",
        "diskURI",
        cachingMode=_TEXT,
        diskName=_TEXT,
        diskURI=_TEXT,
        fsType=_TEXT,
        kind=_TEXT,
        readOnly=_BOOLEAN,
    ),
    azureFile=_fields(
        "secretName", "shareName", readOnly=_BOOLEAN, secretName=_TEXT, shareName=_TEXT
    ),
    cephfs=_fields(
        "monitors",
        monitors=_list(_TEXT),
        path=_TEXT,
        readOnly=_BOOLEAN,
        secretFile=_TEXT,
        secretRef=_NAMED,
        user=_TEXT,
    ),
    cinder=_fields("volumeID", fsType=_TEXT, readOnly=_BOOLEAN, secretRef=_NAMED, volumeID=_TEXT),
    configMap=_fields(defaultMode=_INTEGER, items=_KEYS, name=_TEXT, optional=_BOOLEAN),
    csi=_fields(
        "driver",
        driver=_TEXT,
        fsType=_TEXT,
        nodePublishSecretRef=_NAMED,
        readOnly=_BOOLEAN,
        volumeAttributes=_map(_TEXT),
    ),
    downwardAPI=_fields(defaultMode=_INTEGER, items=_DOWNWARD),
    emptyDir=_EMPTY_DIR,
    ephemeral=_fields(volumeClaimTemplate=_CLAIM_TEMPLATE),
    fc=_fields(
        fsType=_TEXT, lun=_INTEGER, readOnly=_BOOLEAN, targetWWNs=_list(_TEXT), wwids=_list(_TEXT)
    ),
    flexVolume=_fields(
        "driver",
        driver=_TEXT,
        fsType=_TEXT,
        options=_map(_TEXT),
        readOnly=_BOOLEAN,
        secretRef=_NAMED,
    ),
    flocker=_fields(datasetName=_TEXT, datasetUUID=_TEXT),
    gcePersistentDisk=_fields(
        "pdName", fsType=_TEXT, partition=_INTEGER, pdName=_TEXT, readOnly=_BOOLEAN
    ),
    gitRepo=_fields("repository", directory=_TEXT, repository=_TEXT, revision=_TEXT),
    glusterfs=_fields("endpoints", "path", endpoints=_TEXT, path=_TEXT, readOnly=_BOOLEAN),
    hostPath=_fields("path", path=_TEXT, type=_TEXT),
    image=_fields(pullPolicy=_TEXT, reference=_TEXT),
    iscsi=_fields(
        "targetPortal",
        "iqn",
        "lun",
        chapAuthDiscovery=_BOOLEAN,
        chapAuthSession=_BOOLEAN,
        fsType=_TEXT,
        initiatorName=_TEXT,
        iqn=_TEXT,
        iscsiInterface=_TEXT,
        lun=_INTEGER,
        portals=_list(_TEXT),
        readOnly=_BOOLEAN,
        secretRef=_NAMED,
        targetPortal=_TEXT,
    ),
    nfs=_fields("server", "path", path=_TEXT, readOnly=_BOOLEAN, server=_TEXT),
    persistentVolumeClaim=_CLAIM,
    photonPersistentDisk=_fields("pdID", fsType=_TEXT, pdID=_TEXT),
    portworxVolume=_fields("volumeID", fsType=_TEXT, readOnly=_BOOLEAN, volumeID=_TEXT),
    projected=_fields(defaultMode=_INTEGER, sources=_list(_PROJECTED)),
    quobyte=_fields(
        "registry",
        "volume",
        group=_TEXT,
        readOnly=_BOOLEAN,
        registry=_TEXT,
        tenant=_TEXT,
        user=_TEXT,
        volume=_TEXT,
    ),
    rbd=_fields(
        "monitors",
        "image",
        fsType=_TEXT,
        image=_TEXT,
        keyring=_TEXT,
        monitors=_list(_TEXT),
        pool=_TEXT,
        readOnly=_BOOLEAN,
        secretRef=_NAMED,
        user=_TEXT,
    ),
    scaleIO=_fields(
        "gateway",
        "system",
        "secretRef",
        fsType=_TEXT,
        gateway=_TEXT,
        protectionDomain=_TEXT,
        readOnly=_BOOLEAN,
        secretRef=_NAMED,
        sslEnabled=_BOOLEAN,
        storageMode=_TEXT,
        storagePool=_TEXT,
        system=_TEXT,
        volumeName=_TEXT,
    ),
    secret=_fields(defaultMode=_INTEGER, items=_KEYS, optional=_BOOLEAN, secretName=_TEXT),
    storageos=_fields(
        fsType=_TEXT, readOnly=_BOOLEAN, secretRef=_NAMED, volumeName=_TEXT, volumeNamespace=_TEXT
    ),
    vsphereVolume=_fields(
        "volumePath", fsType=_TEXT, storagePolicyID=_TEXT, storagePolicyName=_TEXT, volumePath=_TEXT
    ),
)
"""Every source of a volume; a volume has one."""


def refusals(value: Any, schema: Schema, path: FieldPath) -> Iterator[Finding]:
    """Yield the fields of a value that its schema refuses by a rule."""
    if is_refused(schema):
        yield Finding(path, _REFUSAL)
    elif isinstance(value, dict):
        for key, item in value.items():
            inner = schema.get("properties", {}).get(key, schema.get("additionalProperties", {}))
            yield from refusals(item, inner, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from refusals(item, schema.get("items", {}), (*path, index))


def without_bounds(schema: Schema) -> Schema:
    """Return a schema without upper bounds, which a job stored before them may exceed."""
    found = {key: value for key, value in schema.items() if key not in _BOUNDS}
    if "properties" in found:
        inner = found["properties"].items()
        found["properties"] = {name: without_bounds(part) for name, part in inner}
    for below in ("items", "additionalProperties"):
        if below in found:
            found[below] = without_bounds(found[below])
    return found
