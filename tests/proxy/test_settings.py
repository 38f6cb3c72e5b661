import pytest

from proxy.settings import ProxySettings
from settings.loading import load_settings


def load(*argv: str) -> ProxySettings:
    return load_settings(ProxySettings, "proxy", argv)


def test_engines_come_from_repeated_flags() -> None:
    settings = load(
        "--prompt-url", "http://a:1/", "--prompt-url", "http://b:1", "--completion-url", "http://c"
    )
    assert settings.prompt_url == ("http://a:1", "http://b:1")
    assert settings.completion_url == ("http://c",)
    assert settings.normal_url == ()


def test_engines_come_from_a_comma_separated_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_PROXY_PROMPT_URL", "http://a:1, http://b:1,http://a:1")
    assert load().prompt_url == ("http://a:1", "http://b:1")


def test_flags_win_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_PROXY_PORT", "9001")
    assert load().port == 9001
    assert load("--port", "9002").port == 9002


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("port", "x"),
        ("port", "70000"),
        ("prompt-url", "a:1"),
        ("max-body-bytes", "0"),
        ("stall-timeout-s", "-1"),
    ],
)
def test_a_bad_value_stops_the_start_by_name(
    flag: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        load(f"--{flag}", value)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert f"--{flag}" in lines[0]
    assert f"TANDEM_PROXY_{flag.replace('-', '_').upper()}" in lines[0]


@pytest.mark.parametrize("role", ["prompt", "completion", "normal"])
def test_an_engines_url_with_a_user_is_refused_and_its_password_is_not_printed(
    role: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        load(f"--{role}-url", "http://user:geheim@host:1")
    (line,) = capsys.readouterr().err.splitlines()
    assert f"--{role}-url" in line
    assert "--service-token" in line
    assert "host:1" in line
    assert "geheim" not in line


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--discovery", "kubernetes"), "--prompt-selector"),
        (("--prompt-selector", "a=b"), "--prompt-selector needs --discovery kubernetes"),
        (
            ("--discovery", "kubernetes", "--prompt-selector", "a=b", "--completion-url", "http://c"),
            "--completion-url does not go with --discovery kubernetes",
        ),
        (("--discovery", "dns", "--prompt-url", "https://a"), "--prompt-url must be http"),
    ],
)
def test_options_of_discovery_that_do_not_go_together(
    arguments: tuple[str, ...], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        load(*arguments)
    assert named in capsys.readouterr().err
