"""Readable messages for invalid command lines; the flag libraries' own messages contain tracebacks and reprs."""

import difflib
import typing
from collections.abc import Sequence
from pathlib import Path

from adaptive_span_jax.config import Config
from adaptive_span_jax.runtime.command_line import PROGRAM

_KINDS = {int: "a whole number", float: "a number", bool: "True or False"}
_SEE = f"\nSee {PROGRAM} --help and adaptive_span_jax/config.py"


def explain(argv: Sequence[str], error: Exception) -> str:
    """Why the flags could not be parsed; `error` is from the flag libraries, often with a traceback in its text."""
    message = str(error).replace("\\n", "\n").replace("\\'", "'")
    for word in argv:
        if word.startswith("--config.") and (found := _field(word, message)):
            return found + _SEE
    for word in argv:
        if word.startswith("--config=") and (found := _file(word, error, message)):
            return found + _SEE
    return message.rstrip("; \n").splitlines()[-1] + _SEE


def _field(word: str, message: str) -> str | None:
    """The error in --config.SECTION.FIELD=VALUE, or None."""
    name, _, value = word.removeprefix("--").partition("=")
    path, type_ = "config", Config
    for part in name.split(".")[1:]:
        fields = typing.get_type_hints(type_) if type_ not in _KINDS else {}
        if part not in fields:
            close = difflib.get_close_matches(part, fields, n=1)
            hint = f"Did you mean {close[0]}? " if close else ""
            has = f"{path} has {', '.join(sorted(fields))}" if fields else f"{path} has no fields"
            return f"--{name}: {path}.{part} is not a known field. {hint}{has}"
        path, type_ = f"{path}.{part}", fields[part]
    if f"--{name}={value}:" not in message:
        return None
    if type_ in _KINDS:
        return f"--{name}={value}: {name} is {value!r}; it must be {_KINDS[type_]}"
    if hasattr(type_, "__dataclass_fields__"):
        fields = ", ".join(f"{name}.{field}" for field in typing.get_type_hints(type_))
        return f"--{name}={value}: {name} is a group of fields; set one of them: {fields}"
    return None


def _file(word: str, error: Exception, message: str) -> str | None:
    """The error in --config=FILE:ARGUMENT, or None."""
    file, colon, argument = word.partition("=")[2].partition(":")
    about_the_file = f"flag {word}:" in message or not type(error).__module__.startswith("absl.")
    if not about_the_file or not Path(file).is_file():
        return None
    # The first error of the chain is the one that the config file raised.
    cause: BaseException = error
    while cause.__context__ is not None:
        cause = cause.__context__
    if isinstance(cause, SyntaxError):
        return f"{word}: line {cause.lineno} of {file} is a syntax error ({cause.msg})"
    if "'get_config'" in str(cause):
        return f"{word}: {file} has no function get_config; see the files in configs/"
    if argument:
        return f"{word}: {file} does not accept the argument {argument!r} ({cause}); remove or change it"
    if colon:
        return f"{word} has no argument after the colon; add one, e.g. --config={file}:1024, or remove the colon"
    return f"{word}: {file} raised {type(cause).__name__}: {cause}"
