"""Training speed of the small model compared with the published algorithm in PyTorch, on this machine's CPU.

    pip install -r requirements-benchmark.txt
    python benchmarks/train_speed.py [--json] [--rounds 5] [--cases start,trained,fixed] [--keep-freed-memory]

12 layers, width 512, segment 512, 4 streams, dropout 0.3, float32; a step is forward, backward and optimizer. Cases:

    start    S = 8192, every span at 0, as training starts
    trained  S = 8192, the spans in trained_spans.json: 21 long heads of 96, up to 5,600 positions, average span 314
    fixed    every head 2048

Each side is a separate process, so that peak memory is measured per side, and they take turns. A turn is two steps, of
which the second is timed, because the first step after a pause is slower. Before timing, three steps without dropout
must give the same loss and the same gradient norm of every parameter on both sides. Ratios are of medians. For `start`,
the fraction of our step that its dense products alone would take is printed; for `trained`, the speedup of evaluation,
in which we cache projected keys and values and the published algorithm projects its memory at every segment.

Both sides use the default allocator. Much of PyTorch's time at long spans is spent in the kernel: it returns large
arrays to the system and gets them zeroed again many times per step. With --keep-freed-memory both sides use glibc
settings that avoid this at the price of more memory.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.progress import track

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.cases import CASES, STREAMS
from benchmarks.child import Child
from configs import base

# For glibc: one heap, grown and never shrunk.
KEEP_FREED_MEMORY = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}

# Three steps from equal weights, in float32, with sums in different order.
TOLERANCE = 2e-3


def compare(case: str, rounds: int, weights: Path, environment: dict[str, str]) -> dict[str, float]:
    """Checks that both sides compute the same, then times them in alternation; returns the medians."""
    sides = _sides(case, weights, environment)
    checked = {name: side.ask("check") for name, side in sides.items()}
    difference = _difference(checked["ours"], checked["torch"])
    print(f"{case}: losses {checked['ours']['nats']}, largest relative difference of losses and gradient norms "
          f"{difference:.1e}", flush=True)  # fmt: skip
    if not difference < TOLERANCE:
        raise SystemExit(f"{case}: the results of the two sides differ: {checked}")
    for side in sides.values():
        side.close()

    # New processes, so that peak memory does not include the check's arrays and compilations.
    sides = _sides(case, weights, environment)
    seconds: dict[tuple[str, str], list[float]] = {}
    memory: dict[str, float] = {}
    for side in sides.values():
        side.ask("load")
    for command in ("train", "evaluate") if case == "trained" else ("train",):
        for turn in track(range(rounds + 1), f"{case}, {command}", console=Console(stderr=True)):
            for name, side in sides.items():
                side.ask(command)
                taken = side.ask(command)
                if turn:  # in the first, programs are compiled and memory grows
                    seconds.setdefault((command, name), []).append(taken)
        if command == "train":
            memory = {name: side.ask("memory") for name, side in sides.items()}
    result = {
        "ours_seconds": median(seconds["train", "ours"]),
        "torch_seconds": median(seconds["train", "torch"]),
        "ours_megabytes": memory["ours"],
        "torch_megabytes": memory["torch"],
    }
    if case == "start":
        result["dense_share"] = sides["ours"].ask("dense") / result["ours_seconds"]
    if case == "trained":
        for name in sides:
            result[f"{name}_evaluation_seconds"] = median(seconds["evaluate", name])
        result["evaluation_ratio"] = result["torch_evaluation_seconds"] / result["ours_evaluation_seconds"]
    for side in sides.values():
        side.close()
    return result


def _sides(case: str, weights: Path, environment: dict[str, str]) -> dict[str, Child]:
    return {name: Child("side.py", name, case, str(weights), environment=environment) for name in ("ours", "torch")}


def _difference(ours: dict, theirs: dict) -> float:
    if ours["norms"].keys() != theirs["norms"].keys():
        raise SystemExit(f"parameters differ: {sorted(ours['norms'].keys() ^ theirs['norms'].keys())}")
    pairs = [*zip(ours["nats"], theirs["nats"], strict=True)]
    pairs += [(ours["norms"][name], theirs["norms"][name]) for name in ours["norms"]]
    return max(abs(a - b) / max(abs(b), 1e-12) for a, b in pairs)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each side")
    parser.add_argument("--cases", default=",".join(CASES), help="which of start, trained, fixed")
    parser.add_argument("--keep-freed-memory", action="store_true", help="do not return freed memory to the system")
    arguments = parser.parse_args()
    environment = KEEP_FREED_MEMORY if arguments.keep_freed_memory else {}
    tokens = STREAMS * base.get_config().train.segment
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for case in arguments.cases.split(","):
            results[case] = compare(case, arguments.rounds, Path(folder) / f"{case}.npz", environment)
    print(f"\n{'case':8} {'ours':>12} {'torch':>12} {'ratio':>6} {'ours':>9} {'torch':>9} {'memory':>7}")
    for case, found in results.items():
        print(
            f"{case:8} {tokens / found['ours_seconds']:8.0f} t/s {tokens / found['torch_seconds']:8.0f} t/s "
            f"{found['torch_seconds'] / found['ours_seconds']:6.2f} {found['ours_megabytes']:6.0f} MB "
            f"{found['torch_megabytes']:6.0f} MB {found['ours_megabytes'] / found['torch_megabytes']:6.2f}x"
        )
    if "start" in results:
        print(f"start: dense matrix products alone would take {results['start']['dense_share']:.0%} of our step")
    if "trained" in results:
        ours, theirs = (results["trained"][f"{name}_evaluation_seconds"] for name in ("ours", "torch"))
        print(f"trained: evaluation is {theirs / ours:.2f} times as fast, {ours:.2f} s against {theirs:.2f} s")
    if arguments.json:
        summary = {case: round(found["torch_seconds"] / found["ours_seconds"], 3) for case, found in results.items()}
        if "trained" in results:
            found = results["trained"]
            summary["trained_memory"] = round(found["ours_megabytes"] / found["torch_megabytes"], 3)
            summary["trained_evaluation"] = round(found["evaluation_ratio"], 3)
        if "start" in results:
            summary["start_dense_share"] = round(results["start"]["dense_share"], 3)
        print(json.dumps(summary))


if __name__ == "__main__":
    main()
