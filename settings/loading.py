"""Load a settings class once in `main()`: flags win over environment, environment over defaults."""

import os
import re
import sys
from collections.abc import Sequence
from typing import NoReturn, TypeVar

from pydantic import ValidationError
from pydantic_settings import BaseSettings, CliApp, SettingsConfigDict

SettingsT = TypeVar("SettingsT", bound="ProcessSettings")


class ProcessSettings(BaseSettings):
    """Base of every process's settings. A field `max_num_seqs` is the flag `--max-num-seqs` and the
    variable `<env_prefix>MAX_NUM_SEQS`; subclasses set `env_prefix`."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_avoid_json=True,
        cli_hide_none_type=True,
    )


def load_settings(settings_class: type[SettingsT], program: str, argv: Sequence[str]) -> SettingsT:
    """Parse `argv` and the environment; a bad value or an unknown name ends the process with one line."""
    prefix = settings_class.model_config.get("env_prefix") or ""
    unknown = sorted(_unknown_variables(settings_class, prefix))
    if unknown:
        _stop(program, f"unknown environment variable {unknown[0]}; see {program} --help for the names")
    # The parser prints the program's name in its usage line, which it takes from here.
    sys.argv[0] = program
    try:
        return CliApp.run(settings_class, cli_args=list(argv))
    except ValidationError as error:
        _stop(program, _describe(error, prefix))


_USER_OF_URL = re.compile(r"//[^/@\s]*@")
"""Which may have a password, and messages end up in logs."""


def _unknown_variables(settings_class: type[ProcessSettings], prefix: str) -> set[str]:
    if not prefix:
        return set()
    known = {f"{prefix}{name}".upper() for name in settings_class.model_fields}
    return {name for name in os.environ if name.startswith(prefix.upper()) and name.upper() not in known}


def _describe(error: ValidationError, prefix: str) -> str:
    first = error.errors(include_url=False)[0]
    message = first["msg"].removeprefix("Value error, ")
    if not first["loc"]:
        return message
    name = str(first["loc"][0])
    flag = "--" + name.replace("_", "-")
    given = _USER_OF_URL.sub("//***@", repr(first["input"]))
    return f"{flag} (or {prefix}{name.upper()}): {message}; got {given}"


def _stop(program: str, message: str) -> NoReturn:
    print(f"{program}: {message}", file=sys.stderr)
    raise SystemExit(2)
