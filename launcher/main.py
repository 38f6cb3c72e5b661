"""`tandem serve`: one prompt engine, one completion engine and the proxy on this machine."""

import argparse
import asyncio
import sys
from importlib.metadata import version

from launcher.stack import StackSettings, serve
from model_files.errors import ModelFilesError
from settings.loading import load_settings


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="tandem", description="Serve a language model with prompt and completion engines."
    )
    parser.add_argument("--version", action="version", version=f"tandem {version('tandem-serve')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("serve", help="run a whole stack on this machine", add_help=False)
    arguments, rest = parser.parse_known_args(argv)
    assert arguments.command == "serve"
    settings = load_settings(StackSettings, "tandem serve", rest)
    try:
        return asyncio.run(serve(settings))
    except ModelFilesError as error:
        print(f"tandem serve: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
