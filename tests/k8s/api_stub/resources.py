"""The kinds that the stub serves."""

from dataclasses import dataclass

VERBS = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]


@dataclass(frozen=True, slots=True)
class Resource:
    group: str
    version: str
    plural: str
    kind: str
    is_namespaced: bool = True

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def is_built_in(self) -> bool:
        """Kubernetes' own, so that there is a schema of it."""
        return "." not in self.group or (self.group.endswith(".k8s.io") and self.group not in CUSTOM_GROUPS)

    def described(self) -> dict[str, object]:
        """As the API's discovery lists it."""
        names = {"name": self.plural, "singularName": self.kind.lower(), "kind": self.kind}
        return {**names, "namespaced": self.is_namespaced, "verbs": VERBS}


CUSTOM_GROUPS = ("gateway.networking.k8s.io", "inference.networking.k8s.io", "leaderworkerset.x-k8s.io")

_NAMESPACED = {
    "v1": "pods:Pod services:Service configmaps:ConfigMap secrets:Secret serviceaccounts:ServiceAccount "
    "events:Event endpoints:Endpoints persistentvolumeclaims:PersistentVolumeClaim",
    "apps/v1": "deployments:Deployment replicasets:ReplicaSet statefulsets:StatefulSet",
    "batch/v1": "jobs:Job",
    "autoscaling/v2": "horizontalpodautoscalers:HorizontalPodAutoscaler",
    "policy/v1": "poddisruptionbudgets:PodDisruptionBudget",
    "networking.k8s.io/v1": "networkpolicies:NetworkPolicy ingresses:Ingress",
    "discovery.k8s.io/v1": "endpointslices:EndpointSlice",
    "coordination.k8s.io/v1": "leases:Lease",
    "rbac.authorization.k8s.io/v1": "roles:Role rolebindings:RoleBinding",
    "monitoring.coreos.com/v1": "servicemonitors:ServiceMonitor podmonitors:PodMonitor "
    "prometheusrules:PrometheusRule",
    "keda.sh/v1alpha1": "scaledobjects:ScaledObject",
    "gateway.networking.k8s.io/v1": "httproutes:HTTPRoute",
    "inference.networking.k8s.io/v1": "inferencepools:InferencePool",
    "leaderworkerset.x-k8s.io/v1": "leaderworkersets:LeaderWorkerSet",
}
_GLOBAL = {"v1": "namespaces:Namespace nodes:Node"}


def _resources(table: dict[str, str], is_namespaced: bool) -> list[Resource]:
    found = []
    for api_version, kinds in table.items():
        group, _, version = api_version.rpartition("/")
        for pair in kinds.split():
            plural, _, kind = pair.partition(":")
            found.append(Resource(group, version, plural, kind, is_namespaced))
    return found


RESOURCES = (*_resources(_NAMESPACED, True), *_resources(_GLOBAL, False))
BY_PATH = {(r.group, r.version, r.plural): r for r in RESOURCES}
BY_KIND = {(r.api_version, r.kind): r for r in RESOURCES}
BY_PLURAL = {r.plural: r for r in RESOURCES}
