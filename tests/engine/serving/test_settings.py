"""Settings of a service that cannot work together are refused by name."""

import pytest
from pydantic import ValidationError

from completion_service.settings import CompletionServiceSettings
from prompt_service.settings import PromptServiceSettings


@pytest.mark.parametrize("settings_class", [PromptServiceSettings, CompletionServiceSettings])
@pytest.mark.parametrize(
    "told",
    [{}, {"control_host": "localhost"}, {"control_host": "::1"}, {"control_advertise_host": "p.example"}],
)
def test_k7_who_serves_others_does_not_tell_them_a_loopback_address(
    settings_class: type[PromptServiceSettings] | type[CompletionServiceSettings], told: dict[str, str]
) -> None:
    with pytest.raises(ValidationError, match="--control-host"):
        settings_class.model_validate({"host": "0.0.0.0", **told})


def test_an_address_that_others_can_reach_is_taken() -> None:
    PromptServiceSettings.model_validate({"host": "0.0.0.0", "control_host": "10.0.0.1"})
    PromptServiceSettings.model_validate(
        {"host": "0.0.0.0", "control_host": "0.0.0.0", "control_advertise_host": "p.example"}
    )
    PromptServiceSettings.model_validate({"host": "127.0.0.2"})


def test_an_engine_that_hands_nothing_over_tells_nobody() -> None:
    CompletionServiceSettings.model_validate({"host": "0.0.0.0", "engine": "normal"})
