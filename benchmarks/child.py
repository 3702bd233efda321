"""One implementation of a comparison in a child process: it reads commands and prints a line of JSON for each."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


class Child:
    """The parent's handle on a script of this folder."""

    def __init__(self, script: str, *arguments: str, environment: Mapping[str, str] | None = None):
        command = [sys.executable, str(Path(__file__).with_name(script)), *arguments]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | (environment or {})
        )

    def ask(self, command: str) -> Any:
        """The result of a command, once it has finished."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(f"the process for {self._process.args} ended early; its message is above")
        return json.loads(answer)

    def close(self) -> None:
        """Ends the process."""
        self._process.communicate()


def serve(commands: Mapping[str, Callable[..., Any]]) -> None:
    """The child's side: runs the commands of standard input, a name and arguments per line, until its end."""
    for line in sys.stdin:
        name, *arguments = line.split()
        print(json.dumps(commands[name](*arguments)), flush=True)
