"""The HTTP process of the completion service."""

from completion_service.app import create_app
from completion_service.settings import CompletionServiceSettings
from engine.serving.server import run_service
from engine.serving.supervisor import EngineSupervisor
from settings.loading import load_settings

PROGRAM = "completion_service"


def main(argv: list[str]) -> int:
    settings = load_settings(CompletionServiceSettings, PROGRAM, argv)
    supervisor = EngineSupervisor(settings, settings.engine)
    app = create_app(settings.engine, supervisor, settings.max_body_bytes)
    return run_service(app, supervisor, PROGRAM, settings)
