"""A stand-in for Google Cloud Storage, for all tests of this folder."""

import importlib.util
from pathlib import Path

import pytest

from adaptive_span_jax.checkpoint import sealing
from adaptive_span_jax.runtime import storage
from tests.support import object_storage
from tests.support.sealed_folders import CONTENT

needs_gcsfs = pytest.mark.skipif(
    importlib.util.find_spec("gcsfs") is None, reason="needs gcsfs: pip install -r requirements-gcs.txt"
)


@pytest.fixture(scope="module")
def bucket():
    """An empty bucket, which this process and those that it starts find at gs://bucket."""
    with object_storage.running() as found, pytest.MonkeyPatch.context() as patch:
        for name, value in (found.environment() | storage.ENVIRONMENT).items():
            patch.setenv(name, value)
        yield found
        assert found.unknown == []


def make_sealed(directory: Path, step: int) -> None:
    sealing.begin(directory, step)
    for name, content in CONTENT.items():
        (sealing.unfinished(directory, step) / name).write_bytes(content)
    sealing.seal(directory, step)
