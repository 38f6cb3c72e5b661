"""What a container is started with: environment, volumes, mounts, the command that enters its namespaces."""

import base64
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.k8s.cluster.api import ClusterApi, Json
from tests.k8s.cluster.kubelet.node import NodeSettings
from tests.k8s.cluster.network import NODE_IP
from tests.k8s.tools import REPOSITORY

POD_VARIABLE = "TEST_POD_UID"
"""Says of every process of a pod whose it is."""


@dataclass(frozen=True, slots=True)
class PodPlace:
    """Where a pod is: its object, its address and namespace, its folder on the node."""

    pod: Json
    ip: str
    network: str
    folder: Path

    @property
    def namespace(self) -> str:
        return str(self.pod["metadata"]["namespace"])

    @property
    def name(self) -> str:
        return str(self.pod["metadata"]["name"])

    @property
    def uid(self) -> str:
        return str(self.pod["metadata"]["uid"])


def environment(place: PodPlace, container: Json, settings: NodeSettings, api: ClusterApi) -> dict[str, str]:
    values = {
        **settings.environment,
        "HOSTNAME": place.name,
        "HOME": "/tmp",
        POD_VARIABLE: place.uid,
        "KUBERNETES_SERVICE_HOST": settings.api_host,
        "KUBERNETES_SERVICE_PORT": str(settings.api_port),
    }
    for variable in container.get("env") or ():
        source = variable.get("valueFrom")
        value = variable.get("value", "") if source is None else _from(source, place, settings, api)
        if value is not None:
            values[variable["name"]] = expand(value, values)
    return values


def _from(source: Json, place: PodPlace, settings: NodeSettings, api: ClusterApi) -> str | None:
    """None for an optional key that does not exist."""
    if "fieldRef" in source:
        return _field(source["fieldRef"]["fieldPath"], place, settings)
    for kind, path in (("secretKeyRef", "secrets"), ("configMapKeyRef", "configmaps")):
        if kind in source:
            reference = source[kind]
            found = api.get(f"/api/v1/namespaces/{place.namespace}/{path}/{reference['name']}")
            text = str(found["data"][reference["key"]])
            return base64.b64decode(text).decode() if kind == "secretKeyRef" else text
    raise NotImplementedError(f"a variable from {source}")


def _field(path: str, place: PodPlace, settings: NodeSettings) -> str:
    fields = {
        "status.podIP": place.ip,
        "status.hostIP": NODE_IP,
        "spec.nodeName": settings.node_name,
        "metadata.name": place.name,
        "metadata.namespace": place.namespace,
        "metadata.uid": place.uid,
    }
    return fields[path]


def expand(text: str, values: Mapping[str, str]) -> str:
    """`$(NAME)` as the kubelet replaces it: unknown names stay."""
    return re.sub(r"\$\(([\w.-]+)\)", lambda found: values.get(found[1], found[0]), text)


def make_volumes(place: PodPlace, settings: NodeSettings, api: ClusterApi) -> dict[str, Path]:
    """The pod's volumes by name, as folders of the node."""
    volumes: dict[str, Path] = {}
    for volume in place.pod["spec"].get("volumes") or ():
        folder = volumes[volume["name"]] = place.folder / "volumes" / volume["name"]
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in _contents(volume, place, settings, api):
            (folder / name).write_bytes(content)
    return volumes


def _contents(
    volume: Json, place: PodPlace, settings: NodeSettings, api: ClusterApi
) -> Iterator[tuple[str, bytes]]:
    base = f"/api/v1/namespaces/{place.namespace}"
    if "configMap" in volume:
        found = api.get(f"{base}/configmaps/{volume['configMap']['name']}")
        yield from ((name, text.encode()) for name, text in (found.get("data") or {}).items())
    elif "secret" in volume:
        found = api.get(f"{base}/secrets/{volume['secret']['secretName']}")
        yield from ((name, base64.b64decode(text)) for name, text in (found.get("data") or {}).items())
    elif "projected" in volume:
        for source in volume["projected"]["sources"]:
            yield from _projected(source, place, settings, api)
    elif "emptyDir" not in volume:
        raise NotImplementedError(f"the volume {volume}")


def _projected(
    source: Json, place: PodPlace, settings: NodeSettings, api: ClusterApi
) -> Iterator[tuple[str, bytes]]:
    base = f"/api/v1/namespaces/{place.namespace}"
    if "serviceAccountToken" in source:
        account = place.pod["spec"].get("serviceAccountName", "default")
        bound = {"kind": "Pod", "apiVersion": "v1", "name": place.name, "uid": place.uid}
        request = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"audiences": [], "expirationSeconds": 3600, "boundObjectRef": bound},
        }
        answer = api.create(f"{base}/serviceaccounts/{account}/token", request)
        yield source["serviceAccountToken"]["path"], answer["status"]["token"].encode()
    elif "configMap" in source:
        yield "ca.crt", Path(settings.ca).read_bytes()
    elif "downwardAPI" in source:
        yield "namespace", place.namespace.encode()
    else:
        raise NotImplementedError(f"the projected source {source}")


def hosts_file(namespace: str, services: list[Json]) -> str:
    """Names of Services with an address, as a pod of the namespace may write them."""
    lines = ["127.0.0.1 localhost"]
    for service in services:
        address, owner = service["spec"].get("clusterIP"), service["metadata"]["namespace"]
        if address not in (None, "", "None"):
            name = f"{service['metadata']['name']}.{owner}"
            short = [service["metadata"]["name"]] if owner == namespace else []
            lines.append(" ".join([address, *short, name, f"{name}.svc", f"{name}.svc.cluster.local"]))
    return "\n".join(lines) + "\n"


def enter_command(
    place: PodPlace, container: Json, volumes: Mapping[str, Path], values: Mapping[str, str], workdir: str
) -> list[str]:
    """Runs the container's command in the pod's network namespace, with its volumes mounted for it alone."""
    mounts = [(str(volumes[m["name"]]), str(m["mountPath"])) for m in container.get("volumeMounts") or ()]
    script = ["mount --make-rprivate /"]
    # The node's own folders stay as they are; what is mounted over a parent of this checkout would hide it.
    if any(path.startswith("/var/run/secrets") for _, path in mounts):
        script.append("mount -t tmpfs tmpfs /run")
    for source, target in mounts:
        if not str(REPOSITORY).startswith(target + "/") and not str(place.folder).startswith(target + "/"):
            script += [
                f"mkdir -p {shlex.quote(target)}",
                f"mount --bind {shlex.quote(source)} {shlex.quote(target)}",
            ]
    script.append(f"mount --bind {shlex.quote(str(place.folder / 'hosts'))} /etc/hosts")
    argv = [expand(part, values) for part in (container.get("command") or []) + (container.get("args") or [])]
    script += [f"cd {shlex.quote(workdir)}", "exec " + shlex.join(argv)]
    return [
        *("setpriv", "--pdeathsig", "KILL", "ip", "netns", "exec", place.network),
        *("unshare", "-m", "bash", "-ec", "\n".join(script)),
    ]
