"""Two thousand faults on the hand-over protocol, on a virtual clock: `make chaos`."""

import gc
import os

import psutil
import pytest

from tests.kv_transfer.storm import Storm

pytestmark = pytest.mark.chaos

NUM_STORMS, NUM_FAULTS = 20, 100
MEMORY_LIMIT_BYTES = 32 << 20


@pytest.mark.parametrize("verify_kv", [True, False])
def test_two_thousand_faults_leave_no_wrong_byte_and_memory_and_descriptors_flat(verify_kv: bool) -> None:
    Storm(1000, verify_kv).run(NUM_FAULTS)
    gc.collect()
    process = psutil.Process()
    before = process.memory_info().rss, len(os.listdir("/proc/self/fd"))
    for seed in range(NUM_STORMS):
        Storm(seed, verify_kv).run(NUM_FAULTS)
    gc.collect()
    after = process.memory_info().rss, len(os.listdir("/proc/self/fd"))
    assert after[0] - before[0] < MEMORY_LIMIT_BYTES
    assert after[1] == before[1]
