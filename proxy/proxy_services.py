"""What every request uses."""

import asyncio
from dataclasses import dataclass, field

from proxy.activity import Activity
from proxy.admission import Admission
from proxy.departures import Departures
from proxy.draining import Draining
from proxy.engines import EngineDirectory
from proxy.key_limits import KeyGate
from proxy.legs import EngineCalls
from proxy.metrics import ProxyMetrics
from proxy.migration import MigrationLimits
from proxy.preparation import Preparation
from proxy.routes import Routes
from proxy.settings import ProxySettings
from proxy.text_model import TextModel
from proxy.workers.peers import Peers
from settings.secret_keys import SecretKeys


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyServices:
    """What every request uses; built once, in `create_app`."""

    settings: ProxySettings
    keys: SecretKeys
    """One of them is each client's, where there are any."""
    text: TextModel
    directory: EngineDirectory
    routes: Routes
    preparation: Preparation
    calls: EngineCalls
    admission: Admission
    key_use: KeyGate
    metrics: ProxyMetrics
    activity: Activity
    departures: Departures
    migration_limits: MigrationLimits
    draining: Draining
    peers: Peers
    """The other workers of this proxy."""
    vital: list[asyncio.Task[None]] = field(default_factory=list)
    """What finds engines and what asks them how they are: without these a proxy serves from its last look."""
