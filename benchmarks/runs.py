"""Ordinary runs of main.py, each in a process of its own, for the benchmarks that compare finished runs."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def finish(config: str, workdir: Path, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The result of a run, which is trained to its end unless it is complete: result.json with `seed` and `span`."""
    command = [sys.executable, "main.py", f"--config=configs/{config}", f"--workdir={workdir}"]
    command += [f"--config.{name}={value}" for name, value in fields.items()]
    print(f"== {workdir.name}", flush=True)
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    if code:
        raise SystemExit(code)  # its message is above
    saved = json.loads((workdir / "config.json").read_text())
    return json.loads((workdir / "result.json").read_text()) | {"seed": saved["seed"], "span": saved["span"]}
