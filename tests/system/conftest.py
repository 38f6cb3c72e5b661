"""One stack with short chunks for every system test that does not need its own."""

from collections.abc import Iterator

import pytest

from tests.system.processes import RunningStack


@pytest.fixture(scope="module")
def stack() -> Iterator[RunningStack]:
    with RunningStack(dtype="fp32", transport="zmq", max_num_batched_tokens=64) as stack:
        yield stack
