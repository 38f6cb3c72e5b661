import pytest

from kv_transfer.errors import SettingsError
from kv_transfer.settings import TransferSettings


def test_bad_setting_is_named() -> None:
    with pytest.raises(SettingsError, match="lease_s must be positive, got 0"):
        TransferSettings(lease_s=0)
    with pytest.raises(SettingsError, match="max_handovers"):
        TransferSettings(max_handovers=-1)
    with pytest.raises(SettingsError, match="heartbeat_timeout_s"):
        TransferSettings(heartbeat_timeout_s=0.1)


def test_read_deadline_grows_with_the_bytes() -> None:
    settings = TransferSettings(read_timeout_s=2, min_rate_bytes_per_s=100)
    assert settings.read_deadline_s(0) == 2
    assert settings.read_deadline_s(300) == 5


def test_lease_is_renewed_six_times_in_its_life() -> None:
    assert TransferSettings(lease_s=6).renew_interval_s == 1
