"""Hand-overs under random faults end, with the right bytes or an error, and leave nothing behind."""

import pytest

from tests.kv_transfer.storm import Storm


@pytest.mark.parametrize("verify_kv", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_fifty_faults_leave_no_wrong_byte_and_nothing_held(seed: int, verify_kv: bool) -> None:
    storm = Storm(seed, verify_kv)
    storm.run(50)
    assert storm.outcomes["arrived"] > 0
