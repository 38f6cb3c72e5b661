"""Which transport `auto` takes to which peer, what UCX's log says of lanes, and when RDMA is required."""

import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from kv_transfer.errors import ReadError, TransferError, TransportUnavailable
from kv_transfer.layout import Region
from kv_transfer.transport import RemoteMemory
from kv_transfer.transports import check_rdma, make_transport
from kv_transfer.transports.auto import AutoTransport, Host, copies_on_one_host, rdma_devices
from kv_transfer.transports.fake import FakeConnection, FakeTransport
from kv_transfer.transports.ucx_log import is_rdma, parse
from kv_transfer.transports.zmq import ZmqTransport
from tests.kv_transfer.builders import Pool
from tests.kv_transfer.ends import a_sink, hand_over
from tests.kv_transfer.processes import Peer, needs_nixl

HERE, THERE = Host("here", has_rdma=False), Host("there", has_rdma=False)
HERE_RDMA, THERE_RDMA = Host("here", has_rdma=True), Host("there", has_rdma=True)
ADDRESS = "tcp://127.0.0.1:1"


class Refusing(FakeTransport):
    """A NIXL that starts, but cannot connect, or does not even start."""

    def __init__(self, starts: bool = True) -> None:
        super().__init__()
        self._starts = starts

    def register(self, regions: Sequence[Region], serve_at: str | None) -> bytes:
        if not self._starts:
            raise TransferError("NIXL cannot start UCX")
        return super().register(regions, serve_at)

    def connect(self, memory: RemoteMemory, regions: Sequence[Region] | None = None) -> FakeConnection:
        raise ReadError("NIXL cannot connect")


def chosen(source_host: Host, sink_host: Host, source_nixl: object = ..., sink_nixl: object = ...) -> str:
    """The path from a sink to a source; a fake stands for NIXL unless another object is given."""
    nixls = [FakeTransport() if item is ... else item for item in (source_nixl, sink_nixl)]
    assert all(item is None or isinstance(item, FakeTransport) for item in nixls)
    pool = Pool()
    source = AutoTransport(nixls[0], ZmqTransport(), source_host)  # type: ignore[arg-type]
    sink = AutoTransport(nixls[1], ZmqTransport(), sink_host)  # type: ignore[arg-type]
    blob = source.register(pool.regions, ADDRESS)
    sink.register(pool.regions, None)
    connection = sink.connect(RemoteMemory(blob, pool.regions, ADDRESS))
    path = connection.path
    connection.close()
    sink.close()
    source.close()
    return path


@pytest.mark.parametrize(
    ("source", "sink", "path"),
    [
        (HERE, HERE, "fake"),
        (THERE, HERE, "zmq tcp"),
        (THERE_RDMA, HERE_RDMA, "fake"),
        (THERE_RDMA, HERE, "zmq tcp"),
        (THERE, HERE_RDMA, "zmq tcp"),
    ],
)
def test_nixl_is_taken_on_one_host_or_over_rdma_and_zmq_elsewhere(
    source: Host, sink: Host, path: str
) -> None:
    assert chosen(source, sink) == path


@pytest.mark.parametrize("missing", ["source", "sink"])
def test_zmq_is_taken_where_one_end_has_no_nixl(missing: str) -> None:
    assert chosen(HERE, HERE, **{f"{missing}_nixl": None}) == "zmq tcp"


@pytest.mark.parametrize("ends", [{"sink_nixl": Refusing()}, {"source_nixl": Refusing(starts=False)}])
def test_zmq_is_taken_with_a_warning_where_nixl_does_not_work(
    ends: dict[str, Refusing], caplog: pytest.LogCaptureFixture
) -> None:
    assert chosen(HERE, HERE, **ends) == "zmq tcp"
    assert "NIXL cannot" in caplog.text


@pytest.mark.parametrize(
    ("ucx_tls", "copies"),
    [
        (None, True),
        ("", True),
        ("all", True),
        ("cma,tcp", True),
        ("tcp", False),
        ("rc,tcp", False),
        ("^rc", True),
        ("^cma", False),
    ],
)
def test_users_choice_of_lanes_decides_whether_one_host_is_special(ucx_tls: str | None, copies: bool) -> None:
    assert copies_on_one_host(ucx_tls) is copies


def test_address_that_is_not_one_is_refused() -> None:
    transport = AutoTransport(None, ZmqTransport(), HERE)
    with pytest.raises(ReadError, match="address is not valid"):
        transport.connect(RemoteMemory(b"\xc1", (), ADDRESS))


def test_lanes_are_read_from_ucxs_log() -> None:
    text = (
        "[17.3] [vm:8:0] ucp_worker.c:1997 UCX  INFO    4b76 self cfg#0 rma_am(tcp/lo)  am(tcp/lo)\n"
        "[17.3] [vm:8:0] ucp_worker.c:1997 UCX  INFO    4b76 intra-node cfg#1 rma_am(tcp/lo)  "
        "am(tcp/lo cma/memory)  ka(tcp/lo)\n"
        "[17.4] [vm:8:0] ucp_worker.c:1997 UCX  INFO    99ff inter-node cfg#2 rma(rc_mlx5/mlx5_0:1)\n"
        "noise\n"
    )
    assert parse(text) == [("4b76", ("tcp/lo", "cma/memory")), ("99ff", ("rc_mlx5/mlx5_0:1",))]


@pytest.mark.parametrize(
    ("lanes", "rdma"),
    [
        (("tcp/lo", "cma/memory"), False),
        (("tcp/lo", "rc_mlx5/mlx5_0:1"), True),
        (("dc_mlx5/x",), True),
        (("srd/rdmap0",), True),
        ((), False),
        (("cuda_copy/cuda",), False),
    ],
)
def test_rdma_lanes_are_known_by_name(lanes: tuple[str, ...], rdma: bool) -> None:
    assert is_rdma(lanes) is rdma


@needs_nixl
def test_auto_on_one_host_reads_through_the_kernel_and_says_so() -> None:
    with Peer("source", "auto") as peer, a_sink("auto") as sink:
        hand_over(peer, sink)
        deadline_s = time.monotonic() + 10
        while not (path := sink.sink.peers()[0].path):  # reports follow at the sink's next tick
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
    assert "cma/memory" in path.split()


def test_rdma_devices_are_listed(tmp_path: Path) -> None:
    assert rdma_devices(tmp_path / "absent") == ()
    (tmp_path / "mlx5_0").mkdir()
    assert rdma_devices(tmp_path) == ("mlx5_0",)


def test_required_rdma_fails_the_start_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("kv_transfer.transports.auto.RDMA_DEVICES", tmp_path)
    with pytest.raises(TransportUnavailable, match=r"--require-rdma: .* lists no device"):
        check_rdma("auto")
    with pytest.raises(TransportUnavailable, match="--transport zmq does not know RDMA"):
        check_rdma("zmq")


@needs_nixl
def test_nixl_backend_that_does_not_start_is_named() -> None:
    transport = make_transport("nixl", "LIBFABRIC")
    with pytest.raises(TransferError, match=r"LIBFABRIC.*--nixl-backend UCX"):
        transport.register(Pool().regions, None)
