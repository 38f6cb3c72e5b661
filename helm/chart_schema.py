"""Writes `helm/tandem/values.schema.json`: `settings` may hold what the services' settings classes have.

python helm/chart_schema.py           write it
python helm/chart_schema.py --check   say whether the committed file is what would be written
"""

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from completion_service.settings import CompletionServiceSettings
from prompt_service.settings import PromptServiceSettings
from proxy.settings import ProxySettings
from settings.loading import ProcessSettings

Schema = dict[str, Any]

FILE = Path(__file__).parent / "tandem" / "values.schema.json"

OWNED_BY_CHART = frozenset(
    (
        *("host", "port", "model", "control_host", "control_port", "control_advertise_host"),
        *("service_token", "service_token_file", "api_keys", "api_keys_file"),
        *("discovery", "discovery_namespace", "prompt_selector", "completion_selector", "normal_selector"),
        *("prompt_url", "completion_url", "normal_url", "engine"),
        *("dp_size", "dp_rank", "dp_address", "dp_step_timeout_s"),
        *("worker_number", "worker_directory", "worker_socket"),
    )
)
"""They follow from other values, would put a secret into a manifest, are for NORMAL engines only, or are what
a process tells its own children."""

SETTINGS: dict[str, type[ProcessSettings]] = {
    "proxy": ProxySettings,
    "prompt": PromptServiceSettings,
    "completion": CompletionServiceSettings,
}

TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
TEXTS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}
OWN_LABELS = ("name", "instance", "component", "version", "managed-by")
LABELS: Schema = {
    **TEXTS,
    "propertyNames": {
        "not": {"enum": [*(f"app.kubernetes.io/{name}" for name in OWN_LABELS), "helm.sh/chart"]}
    },
}
"""More of them; the chart's own say which pods belong to what."""
FREE: Schema = {"type": "object"}
LIST: Schema = {"type": "array", "items": {"type": "object"}}
QUANTITY: Schema = {"type": ["string", "number"]}
PULL_POLICY: Schema = {"enum": ["Always", "IfNotPresent", "Never"]}
SECRET_NAME: Schema = {"type": "string", "pattern": "^([a-z0-9]([-a-z0-9.]*[a-z0-9])?)?$", "maxLength": 253}
SECRET_KEY: Schema = {"type": "string", "pattern": "^[-._a-zA-Z0-9]+$"}


def whole(minimum: int, maximum: int | None = None) -> Schema:
    return {"type": "integer", "minimum": minimum, **({} if maximum is None else {"maximum": maximum})}


def entries(**properties: Schema) -> Schema:
    """An object with these properties and no others."""
    return {"type": "object", "additionalProperties": False, "properties": properties}


def described(schema: Schema, description: str) -> Schema:
    return {**schema, "description": description}


def or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def wants_one_of(field: str) -> Schema:
    """Where `enabled` is on, the list `field` must not be empty."""
    is_on = {"properties": {"enabled": {"const": True}}, "required": ["enabled"]}
    return {"if": is_on, "then": {"properties": {field: {"minItems": 1}}, "required": [field]}}


def not_both(first: str, second: str, message: str) -> Schema:
    on = {"properties": {"enabled": {"const": True}}, "required": ["enabled"]}
    both = {"properties": {first: on, second: on}, "required": [first, second]}
    return {"not": {**both, "description": message}}


def settings_schema(settings_class: type[ProcessSettings]) -> Schema:
    """One property for each flag that a chart's user may set."""
    fields = settings_class.model_json_schema()["properties"]
    allowed = {name: _setting(field) for name, field in fields.items() if name not in OWNED_BY_CHART}
    return described(
        entries(**allowed), f"Flags of {settings_class.model_config['env_prefix']}* by field name."
    )


def _setting(field: Schema) -> Schema:
    # A default may come from the machine at hand; titles repeat the name.
    kept = {name: value for name, value in field.items() if name not in ("default", "title", "format")}
    if kept.get("type") == "array":
        kept["items"] = TEXT
    return or_null(kept) if "type" in kept or "enum" in kept else kept


def autoscaling(**targets: Schema) -> Schema:
    keda = entries(
        enabled=FLAG,
        serverAddress=TEXT,
        pollingInterval=whole(1),
        authenticationRef=entries(name=TEXT, kind=TEXT),
    )
    schema = entries(
        hpa=entries(enabled=FLAG),
        keda=keda,
        minReplicas=whole(1),
        maxReplicas=whole(1),
        targets=entries(**{name: or_null(target) for name, target in targets.items()}),
        behavior=FREE,
    )
    return {
        **schema,
        **not_both("hpa", "keda", "hpa and keda would scale against each other: enable one of them"),
    }


def role(name: str, **more: Schema) -> Schema:
    """What the three kinds of process have in common."""
    budget = entries(enabled=FLAG, minAvailable=_count_or_share(), maxUnavailable=or_null(_count_or_share()))
    seconds = whole(1)
    return entries(
        replicas=whole(0),
        settings=settings_schema(SETTINGS[name]),
        resources=FREE,
        rollingUpdate=entries(maxSurge=_count_or_share(), maxUnavailable=_count_or_share()),
        preStopSeconds=whole(0),
        probes=entries(startupSeconds=seconds, startupPeriodSeconds=seconds, readinessPeriodSeconds=seconds),
        podDisruptionBudget=budget,
        serviceAccount=entries(create=FLAG, name=TEXT, annotations=TEXTS),
        nodeSelector=TEXTS,
        tolerations=LIST,
        affinity=FREE,
        topologySpreadConstraints=LIST,
        priorityClassName=TEXT,
        runtimeClassName=TEXT,
        schedulerName=TEXT,
        podAnnotations={**TEXTS, "propertyNames": {"not": {"const": "checksum/settings"}}},
        podLabels=LABELS,
        extraEnv=LIST,
        **more,
    )


def engine(name: str, **targets: Schema) -> Schema:
    nodes = described({"const": 1}, "Tandem's engines do not span nodes: an engine is one pod.")
    return role(
        name,
        gpu=entries(count=whole(0), resource={"type": "string", "pattern": "^[a-z0-9.-]+/[A-Za-z0-9._-]+$"}),
        nodesPerEngine=nodes,
        sharedMemory=QUANTITY,
        autoscaling=autoscaling(cpuUtilization=whole(1), **targets),
    )


def _count_or_share() -> Schema:
    return {"anyOf": [whole(0), {"type": "string", "pattern": "^[0-9]+%$"}]}


def _positive() -> Schema:
    return {"type": "number", "exclusiveMinimum": 0}


def _share() -> Schema:
    return {"type": "number", "exclusiveMinimum": 0, "maximum": 1}


def model() -> Schema:
    schema = entries(
        source={"enum": ["embedded", "pvc", "image", "download"]},
        name={"type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9._-]*$", "maxLength": 128},
        file={"type": "string", "pattern": "^([^/].*\\.gguf)?$"},
        pvc=entries(claimName=TEXT, subPath=TEXT),
        image=entries(reference=TEXT, pullPolicy=PULL_POLICY),
        download=entries(
            repository=TEXT,
            revision=TEXT,
            endpoint=TEXT,
            tokenSecret=entries(name=SECRET_NAME, key=SECRET_KEY),
            size=QUANTITY,
            claimName=TEXT,
            resources=FREE,
        ),
    )
    needs = {"pvc": "claimName", "image": "reference", "download": "repository"}
    conditions: list[Schema] = [
        {
            "if": {"properties": {"source": {"const": source}}},
            "then": {"properties": {source: {"properties": {field: {"minLength": 1}}, "required": [field]}}},
        }
        for source, field in needs.items()
    ]
    is_embedded = {"properties": {"source": {"const": "embedded"}}}
    only = {"properties": {"name": {"const": "smollm2-135m-instruct"}, "file": {"const": ""}}}
    return {**schema, "allOf": [*conditions, {"if": is_embedded, "then": only}]}


def monitoring() -> Schema:
    monitor = entries(enabled=FLAG, interval={"type": "string", "pattern": "^[0-9]+(ms|s|m)$"}, labels=TEXTS)
    labelled = entries(enabled=FLAG, labels=TEXTS)
    schema = entries(podMonitor=monitor, serviceMonitor=monitor, rules=labelled, dashboard=labelled)
    return {
        **schema,
        **not_both("podMonitor", "serviceMonitor", "every pod would be scraped twice: enable one"),
    }


def entry_points() -> dict[str, Schema]:
    ingress = entries(
        enabled=FLAG, className=TEXT, annotations=TEXTS, hosts={"type": "array", "items": TEXT}, tls=LIST
    )
    route = entries(
        enabled=FLAG, annotations=TEXTS, parentRefs=LIST, hostnames={"type": "array", "items": TEXT}
    )
    picker = entries(name=TEXT, port=whole(1, 65535), failureMode={"enum": ["FailOpen", "FailClose"]})
    is_on = {"properties": {"enabled": {"const": True}}, "required": ["enabled"]}
    named = {"properties": {"endpointPicker": {"properties": {"name": {"minLength": 1}}}}}
    return {
        "ingress": {**ingress, **wants_one_of("hosts")},
        "httpRoute": {**route, **wants_one_of("parentRefs")},
        "inferencePool": {**entries(enabled=FLAG, endpointPicker=picker), "if": is_on, "then": named},
    }


def values_schema() -> Schema:
    image = entries(
        repository={"type": "string", "minLength": 1},
        tag=TEXT,
        digest={"type": "string", "pattern": "^(sha256:[0-9a-f]{64})?$"},
        pullPolicy=PULL_POLICY,
    )
    service = entries(
        type={"enum": ["ClusterIP", "NodePort", "LoadBalancer"]}, port=whole(1, 65535), annotations=TEXTS
    )
    rdma = entries(
        enabled=FLAG,
        resource={"type": "string", "pattern": "^rdma/[A-Za-z0-9._-]+$"},
        count=whole(1),
        runAsUser=or_null(whole(0)),
    )
    schema = entries(
        fullnameOverride={"type": "string", "pattern": "^([a-z]([-a-z0-9]*[a-z0-9])?)?$"},
        commonLabels=LABELS,
        images=entries(proxy=image, engine=image),
        imagePullSecrets=LIST,
        model=model(),
        proxy=role(
            "proxy",
            discovery={"enum": ["static", "dns", "kubernetes"]},
            service=service,
            autoscaling=autoscaling(cpuUtilization=whole(1), openRequests=_positive()),
        ),
        prompt=engine("prompt", queuedPromptTokens=_positive(), firstTokenSeconds=_positive()),
        completion=engine("completion", kvUse=_share(), sequenceUse=_share(), interTokenSeconds=_positive()),
        rdma=rdma,
        apiKeys=entries(existingSecret=SECRET_NAME, key=SECRET_KEY),
        serviceToken=entries(existingSecret=SECRET_NAME, key=SECRET_KEY, generate=FLAG),
        networkPolicy=entries(enabled=FLAG, clients=LIST, scrapers=LIST),
        monitoring=monitoring(),
        podSecurityContext=FREE,
        containerSecurityContext=FREE,
        test=entries(url=TEXT, resources=FREE),
        **{"global": FREE},
        **entry_points(),
    )
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Values of the chart tandem",
        **schema,
    }


def text() -> str:
    return json.dumps(values_schema(), indent=1) + "\n"


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        is_same = FILE.read_text() == text()
        sys.exit(0 if is_same else f"{FILE} is not what the settings say; run: make chart-schema")
    FILE.write_text(text())
