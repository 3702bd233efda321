"""Schedules in the form of the TPU compiler's."""

from adaptive_span_jax.planning import bundles

SLOTS = ("",) * bundles.JUMP_SLOTS
AROUND = 3 + bundles.JUMP_SLOTS  # bundles of an empty loop


def listing(*contents: str) -> str:
    """Bundles as the compiler writes them; `@5` starts region 5, `PF` is where skipped bundles continue."""
    lines = ["= control target key start", "LB: loop body", "= control target key end", ""]
    for address, content in enumerate(contents):
        regions = [word[1:] for word in content.split() if word[0] == "@"]
        inside = " ".join(word for word in content.split() if word[0] != "@" and word != "PF")
        label = "PF" if "PF" in content.split() else "LB" if regions else "  "
        comment = " :: ".join(f"Start region {region}" for region in regions)
        depth = "> " if inside else ""  # an empty bundle shows no depth
        lines.append(f"{address:#6x} {label}: {depth}{{ {inside} }} {f'/* {comment} */' if comment else ''}".rstrip())
    return "\n".join(lines)


def skip(predicate: str, region: int) -> tuple[str, ...]:
    """A jump to a region where the predicate holds, with the bundles before it happens."""
    return (f"%9 = sbr.rel (%{predicate}) target = $region{region}", *SLOTS)


def loop(number: int, *body: str, turns: int | str = 4) -> tuple[str, ...]:
    """A loop that counts %s{number} up to a constant or a register: its body and 3 + JUMP_SLOTS bundles."""
    return (
        f"@{number} %s{number} = sphi %s0, %s{number}9",
        *body,
        f"%s{number}9 = sadd.s32 1, %s{number} ;; %p{number} = scmp.ge.s32.totalorder %s{number}9, {turns}",
        f"%8 = sbr.rel (!%p{number}) target = $region{number}",
        *SLOTS,
    )


def kernel(*, programs: int = 6, loops: int = 2, other: str = "%p5 = scmp.lt.s32.totalorder %s70, 0") -> str:
    """A kernel with the structure of ours; %s70 is negative for short heads."""
    long = ("%1 = vadd",) * 11
    for number in range(loops):
        long += (*loop(20 + number, *("%1 = vadd",) * (100 * (number + 1)), turns="%s71"), "%1 = vadd")
    program = (
        "%p3 = scmp.ne.s32.totalorder %s60, 0",
        *skip("p3", 43),
        *("%1 = dma",) * 17,  # the first program
        "PF @43 %p4 = scmp.ge.s32.totalorder %s70, 0",
        *skip("p4", 44),
        *("%1 = vadd",) * 40,  # short heads
        f"PF @44 {other}",
        *skip("p5", 45),
        *long,
        "PF @45",
    )
    turn = (
        "%p1 = scmp.ge.s32.totalorder %s10, 1",
        f"%p2 = scmp.lt.s32.totalorder %s10, {programs + 1}",
        "%p9 = pnand %p1, %p2",
        *skip("p9", 41),
        *program,
        "PF @41",
    )
    return listing("%1 = vld", *loop(10, *turn, turns=programs + 2), "%1 = vst")
