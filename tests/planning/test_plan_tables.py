"""The committed table of counted plans, against what the vendors' compilers make of the code today."""

import importlib.util

import pytest

from benchmarks import plan_tables

NEEDED = {"v5e:2x4": "libtpu", "a100:8": "jax_plugins"}
# Numbers that a compiler's other choices may move a little; turns follow from the spans alone.
COUNTED = {
    "v5e:2x4": ("ms", "cycles", "dense_cycles", "forward_kernel_cycles", "backward_kernel_cycles"),
    "a100:8": ("ms", "turns", "kernels", "conditions"),
}


def committed(config: str, topology: str) -> dict[str, dict[str, str]]:
    return {row["spans"]: row for row in plan_tables.read() if (row["config"], row["topology"]) == (config, topology)}


def test_every_row_is_there():
    rows = plan_tables.read()
    assert list(dict.fromkeys((row["config"], row["topology"]) for row in rows)) == list(plan_tables.ROWS)
    for row in rows:
        counted = "cycles" if row["topology"].startswith("v") else "kernels"
        assert float(row[counted]) > 0 < float(row["ms"])
    # One line for each in the documentation, under two of headings.
    assert len(plan_tables.markdown().splitlines()) == len(plan_tables.ROWS) + 2


def test_gpus_take_few_turns():
    rows = committed("enwik8", "a100:8")
    turns, milliseconds = ({name: float(row[key]) for name, row in rows.items()} for key in ("turns", "ms"))
    assert (turns["start"], turns["trained"] <= 120, turns["2048"] <= 180) == (0, True, True)
    assert (milliseconds["trained"] <= 55, milliseconds["2048"] <= 140) == (True, True)


@pytest.mark.slow
@pytest.mark.parametrize("topology", list(NEEDED))
def test_a_step_takes_what_the_committed_table_says(topology):
    if importlib.util.find_spec(NEEDED[topology]) is None:
        pytest.skip(f"needs {NEEDED[topology]}: requirements-tpu.txt, requirements-cuda-plan.txt")
    expected = committed("enwik8", topology)
    found = {row["spans"]: row for row in plan_tables.count("enwik8", topology)}
    assert found.keys() == expected.keys()
    for setting, row in found.items():
        numbers, wanted = (
            {name: float(each[setting][name]) for name in COUNTED[topology]} for each in (found, expected)
        )
        assert numbers == pytest.approx(wanted, rel=0.03), setting
        assert float(row["total_gib"]) == pytest.approx(float(expected[setting]["total_gib"]), rel=0.03)
        assert row["limited_by"] == expected[setting]["limited_by"]
    if topology == "a100:8":
        # Heads that reach no further than the near part must not pay for the far one: nothing is hoisted out of it.
        assert int(found["start"]["turns"]) == 0
        assert int(found["start"]["kernels"]) <= int(expected["start"]["kernels"])
