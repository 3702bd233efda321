"""What `result.json` says of a run, to compare runs."""

from typing import Any


def without_times(result: dict[str, Any]) -> dict[str, Any]:
    """A result without what depends on the machine's speed."""
    return {name: value for name, value in result.items() if name not in ("seconds", "wall_seconds", "goodput", "mfu")}
