"""Flags and variables of one field; whatever is wrong is named in one line."""

import pytest
from pydantic import Field
from pydantic_settings import SettingsConfigDict

from settings.loading import ProcessSettings, load_settings


class ExampleSettings(ProcessSettings):
    """Settings of an example."""

    model_config = SettingsConfigDict(env_prefix="TANDEM_EXAMPLE_")

    port: int = Field(7000, ge=1, le=65535)
    num_seqs: int | None = None
    verbose: bool = False


def load(*argv: str) -> ExampleSettings:
    return load_settings(ExampleSettings, "example", argv)


def test_flags_win_over_variables_and_variables_over_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_EXAMPLE_PORT", "7001")
    monkeypatch.setenv("TANDEM_EXAMPLE_NUM_SEQS", "8")
    assert load("--port", "7002", "--verbose") == ExampleSettings(port=7002, num_seqs=8, verbose=True)


def test_settings_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load().port = 1  # type: ignore[misc]  # the point of the test


@pytest.mark.parametrize("value", ["0", "70000", "many"])
def test_bad_value_names_flag_variable_and_value(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        load("--port", value)
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    for part in ("example:", "--port", "TANDEM_EXAMPLE_PORT", repr(value)):
        assert part in message


def test_unknown_flag_and_unknown_variable_stop_the_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        load("--prot", "1")
    assert "--prot" in capsys.readouterr().err
    monkeypatch.setenv("TANDEM_EXAMPLE_PROT", "1")
    with pytest.raises(SystemExit):
        load()
    assert "TANDEM_EXAMPLE_PROT" in capsys.readouterr().err
