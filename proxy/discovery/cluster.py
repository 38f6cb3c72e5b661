"""EndpointSlices over the official `kubernetes` client.

Only its connection, its credentials and the paths it builds are used; answers are read as JSON here, so that
its models, which differ between versions, do not matter.
"""

import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from proxy.discovery.errors import ClusterRefused, DiscoverySetupError, ListingExpired
from proxy.discovery.slices import Changed, Deleted, Listed, slice_from_json

if TYPE_CHECKING:  # an extra brings it
    from urllib3 import HTTPResponse

CONNECT_TIMEOUT_S = 3.0
LIST_TIMEOUT_S = 10.0
WATCH_SLACK_S = 10.0
"""A watch that is silent for so much longer than it was to last is dead."""
NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
REASONS = {401: "unauthorized", 403: "forbidden"}


class SlicesApi(Protocol):
    """What is used of `kubernetes.client.DiscoveryV1Api`."""

    def list_namespaced_endpoint_slice(self, namespace: str, **query: object) -> "HTTPResponse": ...


class ClusterSlices:
    """The slices that a label selector finds in a namespace."""

    def __init__(self, api: SlicesApi, namespace: str, selector: str) -> None:
        """`api` is used by nobody else."""
        self._api = api
        self._namespace = namespace
        self._selector = selector
        self._lock = threading.Lock()
        self._response: HTTPResponse | None = None
        self._is_closed = False

    def list(self) -> Listed:
        response = self._ask(LIST_TIMEOUT_S)
        try:
            answer = json.loads(response.data)
            slices = tuple(slice_from_json(item) for item in answer.get("items") or ())
            return Listed(slices, str(answer["metadata"]["resourceVersion"]))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ClusterRefused("nonsense", f"no list of EndpointSlices: {error!r}") from error
        except _transport_errors() as error:
            raise ClusterRefused("cut", f"the list broke off: {error}") from error
        finally:
            self._done(response)

    def watch(self, resource_version: str, timeout_s: float) -> Iterator[Changed | Deleted]:
        response = self._ask(
            timeout_s + WATCH_SLACK_S,
            watch=True,
            resource_version=resource_version,
            allow_watch_bookmarks=True,
            timeout_seconds=max(1, round(timeout_s)),
        )
        try:
            for line in _lines(response):
                event = _event(line)
                if event is not None:
                    yield event
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ClusterRefused("nonsense", f"no watch event: {error!r}") from error
        except _transport_errors() as error:
            raise ClusterRefused("cut", f"the watch broke off: {error}") from error
        finally:
            self._done(response)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            if self._response is not None:
                _shut(self._response)

    def _ask(self, read_timeout_s: float, **query: object) -> "HTTPResponse":
        from kubernetes.client.exceptions import ApiException

        try:
            response = self._api.list_namespaced_endpoint_slice(
                self._namespace,
                label_selector=self._selector,
                _preload_content=False,
                _request_timeout=(CONNECT_TIMEOUT_S, read_timeout_s),
                **query,
            )
        except ApiException as error:
            if error.status == 410:
                raise ListingExpired from error
            reason = REASONS.get(error.status, f"http_{error.status}")
            raise ClusterRefused(reason, f"HTTP {error.status} {error.reason}") from error
        except _transport_errors() as error:
            raise ClusterRefused("unreachable", f"the cluster's API cannot be reached: {error}") from error
        with self._lock:
            self._response = response
            if self._is_closed:
                _shut(response)
        return response

    def _done(self, response: "HTTPResponse") -> None:
        """A connection whose answer was not read to its end is of no use for the next question."""
        with self._lock:
            self._response = None
        response.close()


def in_cluster_api() -> SlicesApi:
    """The API of the cluster this process is a pod of, or of the kubeconfig file; `DiscoverySetupError`."""
    try:
        from kubernetes import client, config
    except ImportError as error:
        raise DiscoverySetupError(
            "--discovery kubernetes needs the package kubernetes: install tandem-serve[kubernetes]"
        ) from error
    configuration = client.Configuration()
    try:
        try:
            config.load_incluster_config(client_configuration=configuration)
        except config.ConfigException:
            config.load_kube_config(client_configuration=configuration)
    except (config.ConfigException, OSError) as error:
        raise DiscoverySetupError(f"--discovery kubernetes found no cluster: {error}") from error
    # Proxies named in the environment are for the outside world; failures are retried by whoever watches.
    configuration.proxy = None
    configuration.retries = False
    return cast(SlicesApi, client.DiscoveryV1Api(client.ApiClient(configuration)))


def own_namespace() -> str:
    """The namespace of this pod; `DiscoverySetupError` outside of one."""
    try:
        return NAMESPACE_FILE.read_text().strip()
    except OSError as error:
        raise DiscoverySetupError(
            f"--discovery kubernetes needs --discovery-namespace outside of a pod ({error})"
        ) from error


def _lines(response: "HTTPResponse") -> Iterator[bytes]:
    rest = b""
    for data in response.stream(1 << 16):
        *lines, rest = (rest + data).split(b"\n")
        yield from lines


def _event(line: bytes) -> Changed | Deleted | None:
    """None for bookmarks and empty lines; raises `ClusterRefused` for errors in the stream."""
    if not line.strip():
        return None
    message = json.loads(line)
    kind, value = message["type"], message["object"]
    if kind in ("ADDED", "MODIFIED"):
        return Changed(slice_from_json(value))
    if kind == "DELETED":
        return Deleted(str(value["metadata"]["name"]))
    if kind == "ERROR":
        code = value.get("code")
        if code == 410:
            raise ListingExpired
        raise ClusterRefused(f"http_{code}", f"the watch ended: {value.get('message')}")
    return None


def _shut(response: "HTTPResponse") -> None:
    with contextlib.suppress(ValueError, OSError, RuntimeError, AttributeError):  # it has ended already
        response.shutdown()


def _transport_errors() -> tuple[type[Exception], ...]:
    import urllib3

    return (urllib3.exceptions.HTTPError, OSError)
