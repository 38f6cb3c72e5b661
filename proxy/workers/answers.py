"""What a worker tells the others (`proxy.workers.peers`)."""

from proxy.operation_routes import metrics_now
from proxy.page.routes import engine_names, trace_json
from proxy.proxy_services import ProxyServices
from proxy.workers.merged_metrics import encode_samples
from wire.json_body import to_json


def answer_peer(services: ProxyServices, line: str) -> bytes:
    question, _, argument = line.partition(" ")
    match question:
        case "metrics":
            return encode_samples(metrics_now(services))
        case "trace":
            trace = services.activity.find(argument)
            return b"" if trace is None else to_json(trace_json(trace, engine_names(services)))
    raise ValueError(f"a worker asked {line!r}")
