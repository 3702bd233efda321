"""The command line of benchmarks/span_sweep.py, with results instead of trainings."""

from pathlib import Path
from typing import Any

from benchmarks import runs, span_sweep


def test_the_table_has_a_row_for_every_run_with_its_seeds_side_by_side(monkeypatch, tmp_path, capsys):
    def finish(config: str, workdir: Path, fields: dict[str, Any]) -> dict[str, Any]:
        kind, limit = config.removeprefix("span_sweep.py:").split("-")
        seed = fields["seed"]
        return {
            "seed": seed,
            "span": {"kind": kind, "limit": int(limit)},
            "steps": fields["train.steps"],
            "dev_bits": 2 + seed / 100,
            "test_bits": 3 + seed / 100,
            "average_span": 30.0 + seed,
            "longest_span": 40.0 + seed,
            "flops_per_token": 350_000 + 10_000 * seed,
            "seconds": 9.0,
            "unit": "byte",
        }

    monkeypatch.setattr(runs, "finish", finish)
    command = ["span_sweep.py", "text", f"--workdir={tmp_path}", "--runs", "fixed-64", "adaptive-1024"]
    monkeypatch.setattr("sys.argv", command)
    span_sweep.main()
    rows = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    for kind, limit in (("fixed", "64"), ("adaptive", "1024")):
        assert [kind, limit, "2.010 / 2.020", "3.010 / 3.020", "31 / 32", "41 / 42", "0.36 / 0.37"] in cells
    assert len((tmp_path / "span_sweep.csv").read_text().splitlines()) == 5
