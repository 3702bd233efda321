"""Strict JSON: it has no NaN or Infinity, so non-finite numbers become null."""

import json
import math
from collections.abc import Callable, Mapping
from typing import Any


def finite(value: Any) -> Any:
    """The same value with None for every non-finite number, at any depth."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: finite(item) for name, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, (list, tuple)) else value


def dumps(value: Any, indent: int | None = None, default: Callable[[Any], Any] | None = None) -> str:
    """A value as JSON; used for all JSON that this package writes."""
    return json.dumps(finite(value), indent=indent, default=default, allow_nan=False)


def loads(text: str | bytes) -> Any:
    """A value from JSON; None also for a bare NaN or Infinity, which older versions of this package wrote."""
    return finite(json.loads(text))
