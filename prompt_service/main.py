"""The HTTP process of the prompt service."""

from engine.serving.server import run_service
from engine.serving.supervisor import EngineSupervisor
from prompt_service.app import create_app
from prompt_service.settings import PromptServiceSettings
from settings.loading import load_settings

PROGRAM = "prompt_service"


def main(argv: list[str]) -> int:
    settings = load_settings(PromptServiceSettings, PROGRAM, argv)
    supervisor = EngineSupervisor(settings, "prompt")
    app = create_app(supervisor, settings.max_body_bytes)
    return run_service(app, supervisor, PROGRAM, settings)
