"""What a sink knows of a source before it trusts it with hand-overs: the self-test and what it found."""

import logging
from dataclasses import dataclass

from kv_transfer.self_test import Broken, Measured, SelfTest, SinkScratch
from kv_transfer.settings import TransferSettings
from kv_transfer.sink_hello import Opened, Unusable
from kv_transfer.transports.ucx_log import is_rdma
from wire.services import PromptEngineAddress

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PathReport:
    """How a source is read, as its self-test found it."""

    path: str
    """Transport and lanes, such as `nixl cma/memory tcp/lo`."""
    version: str
    """Of the transport at the source."""
    latency_s: float
    rate_bytes_per_s: float


class FirstContact:
    """`poll` until it says that the source can be used, or why not."""

    def __init__(
        self,
        address: PromptEngineAddress,
        opened: Opened,
        scratch: SinkScratch,
        settings: TransferSettings,
        now_s: float,
    ) -> None:
        self.opened = opened
        self._address = address
        self._settings = settings
        self._until_s = now_s + settings.self_test_timeout_s
        self._test = SelfTest(opened.connection, opened.plan.index_of("scratch"), scratch, address.epoch)

    def poll(self) -> PathReport | Unusable | None:
        found = self._test.poll()
        if isinstance(found, Broken):
            return Unusable("self_test_failed", f"{self._path}: {found.message}")
        if found is None:
            return None
        return self._judged(found)

    def overdue(self, now_s: float) -> Unusable | None:
        if self._test.is_waiting:
            self._until_s = now_s + self._settings.self_test_timeout_s  # those before us end in time
        if now_s < self._until_s:
            return None
        text = f"{self._path}: nothing could be read within {self._settings.self_test_timeout_s:g} s"
        return Unusable("self_test_failed", text)

    def close(self) -> None:
        """After the last read ended or the connection was cut."""
        self._test.close()

    @property
    def _path(self) -> str:
        return self.opened.connection.path

    def _judged(self, found: Measured) -> PathReport | Unusable:
        report = PathReport(self._path, self.opened.version, found.latency_s, found.rate_bytes_per_s)
        if self._settings.require_rdma and not is_rdma(tuple(report.path.split())):
            return Unusable(
                "self_test_failed", f"it is read over {report.path}, which is not RDMA (--require-rdma)"
            )
        is_slow = report.rate_bytes_per_s < self._settings.min_self_test_bytes_per_s
        logger.log(
            logging.WARNING if is_slow else logging.INFO,
            "%s at %s is read over %s (version %s there): %.3g GB/s, %.0f us for 64 KiB%s",
            self._address.engine_id,
            self._address.control_address,
            report.path,
            report.version,
            report.rate_bytes_per_s / 1e9,
            report.latency_s * 1e6,
            "; that is slow (--min-self-test-rate)" if is_slow else "",
        )
        return report
