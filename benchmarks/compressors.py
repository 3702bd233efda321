"""What general compressors and short contexts make of the test part of enwik8, beside the bits of a model.

    python benchmarks/compressors.py [--workdir=models/enwik8_cpu] [--archive=enwik8.zip]

Runs gzip -9, bzip2 -9, xz -9e and zstd -19 on the 5,000,000 bytes of test alone; a program that is not installed is
left out. The entropies given the last 2 and 5 symbols are those of train under its own counts: no model that predicts
train from so short a context does better, and on test such a model needs more. Dev and test bits of the model
are read from its result.json. A minute on one core.
"""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import track

sys.path.insert(0, str(Path(__file__).parents[1]))

from adaptive_span_jax.config import DataConfig
from adaptive_span_jax.data import corpus as corpora
from adaptive_span_jax.data.entropy import order_bits
from adaptive_span_jax.report.result import read_result
from adaptive_span_jax.runtime import terminal

COMPRESSORS = (("gzip", "-9"), ("bzip2", "-9"), ("xz", "-9e"), ("zstd", "-19"))
ORDERS = (2, 5)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workdir", type=Path, default=Path("models/enwik8_cpu"), help="a finished run on enwik8")
    parser.add_argument("--archive", default="", help="a local archive of enwik8 to use instead of downloading")
    arguments = parser.parse_args()
    corpus = corpora.load(DataConfig(archive=arguments.archive))
    text, rows = corpus.decode(corpus.test), []
    for command in track(COMPRESSORS, "compressing test", console=Console(stderr=True)):
        if shutil.which(command[0]):
            packed = subprocess.run([*command, "-c"], input=text, capture_output=True, check=True).stdout
            rows.append([" ".join(command), "test", f"{8 * len(packed) / len(text):.3f}"])
    for order in ORDERS:
        rows.append([f"entropy given {order} symbols", "train", f"{order_bits(corpus.train, order):.3f}"])
    if result := read_result(arguments.workdir, 0):
        rows += [[str(arguments.workdir), part, f"{result[f'{part}_bits']:.3f}"] for part in ("dev", "test")]
    terminal.show_table(["what", "part of enwik8", "bits per byte"], rows)


if __name__ == "__main__":
    main()
