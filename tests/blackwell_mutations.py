"""Changes one thing in a kernel of the engine blackwell after another, and asks its probe whether
it notices: bits of descriptors, halves of B, rows, and which CTA a barrier is in.

usage: blackwell_mutations.py SONICMOE_EMULATED_TESTS

Prints a line for each change, and exits 1 if one is not noticed. "result": the product differs or
does not end, as it would on a GPU. "emulator": the emulator refuses what the kernel does.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

from blackwell_faults import TEST, lines_of

PAIR = "9blackwell12pair_productINS1_"
STORE = PAIR + "12RowProductOfINS1_5StoreI6__half"
STORE_EXPERT = PAIR + "14DepthProductOfINS1_11StoreExpertI13__nv_bfloat16"


def with_scratch(line, operand, opcode, value, size):
    """The line, with `opcode register, value` in the place of its register number `operand`."""
    at = list(re.finditer(r"%(?:rd|rs|r)\d+", line))[operand]
    changed = f"{line[: at.start()]}scratch{line[at.end() :]}"
    return f"{{ .reg .b{size} scratch; {opcode} scratch, {at.group()}, {value}; {changed} }}"


def changed(operand, opcode, value, size=32):
    return lambda line: with_scratch(line, operand, opcode, value, size)


def flipped(operand, bits, size):
    return changed(operand, f"xor.b{size}", bits, size)


def replaced(old, new):
    return lambda line: line.replace(old, new)


MMA, COMMIT = r"\s*tcgen05\.mma", r"\s*tcgen05\.commit"
GATHER, BOX = r"\s*cp\.async\.bulk\.tensor\.2d", r"\s*cp\.async\.bulk\.tensor\.3d"
# What is changed, the instructions, which of them (None: all), and how.
DESCRIPTOR = {  # exchanged bits of a matrix descriptor
    "start address, 16 bytes further": 1,
    "start address, 1024 bytes further": 64,
    "stride offset 2048 instead of 1024": 192 << 32,
    "base offset 1": 1 << 49,
    "version 0": 1 << 46,
    "no swizzle": 2 << 61,
    "swizzle of 64 bytes": 6 << 61,
    "swizzle of 32 bytes": 4 << 61,
}
LEADING = {"leading offset 4096 instead of 8192": 768 << 16}  # MN-major operands only
INSTRUCTION = {  # of the instruction descriptor
    "D in fp16": 1 << 4,
    "A in the other type": 1 << 7,
    "B in the other type": 1 << 10,
    "A negated": 1 << 13,
    "B negated": 1 << 14,
    "A in the other order": 1 << 15,
    "B in the other order": 1 << 16,
    "N 272 instead of 256": 1 << 18,
    "N 128 instead of 256, 256 instead of 128": 3 << 21,
    "M 128 instead of 256, 256 instead of 128": 3 << 27,
}


def changed_products(is_grad):
    operands = {"A": 1, "B": 2}
    for name, place in operands.items():
        known = DESCRIPTOR | LEADING if is_grad else DESCRIPTOR
        for what, bits in known.items():
            yield f"descriptor of {name}: {what}", MMA, None, flipped(place, bits, 64)
    for what, bits in INSTRUCTION.items():
        yield f"instruction descriptor: {what}", MMA, None, flipped(3, bits, 32)
    yield "D one column further", MMA, None, changed(0, "add.u32", 1)
    for which, name in enumerate(("empty", "d_full")):
        for mask in (1, 2):
            yield (
                f"commit to {name} in one CTA, mask {mask}",
                COMMIT,
                which,
                changed(1, "and.b16", mask, 16),
            )


def changed_loads(is_grad):
    # Registers of gather4: target, map, x, four rows, mbarrier.
    for row in range(4):
        yield (
            f"gather4: row {row} is -1",
            GATHER,
            None,
            changed(3 + row, "min.s32", -1),
        )
        # A row past the end of an expert is never stored by a row product. In the last k tile of a
        # depth product it would be added.
        if is_grad:
            yield (
                f"gather4: row {row} is never -1",
                GATHER,
                None,
                changed(3 + row, "max.s32", 0),
            )
    yield (
        "gather4: 64 columns further",
        GATHER,
        None,
        changed(2, "add.u32", 64),
    )
    yield (
        "gather4: four rows further in shared memory",
        GATHER,
        None,
        changed(0, "xor.b32", 512),
    )
    # Registers of a box: target, map, three coordinates, mbarrier.
    for place, name in ((2, "first"), (3, "second")):
        for distance in (64, 128):
            yield (
                f"box: {name} coordinate exchanged by {distance}",
                BOX,
                None,
                changed(place, "xor.b32", distance),
            )
    yield (
        "box: the other half of B's stage",
        BOX,
        None,
        changed(0, "xor.b32", 8192),
    )


def changed_barriers():
    yield "full: bytes arrive in the odd CTA", r"\s*mapa.*, 0;", None, replaced(", 0;", ", 1;")
    yield (
        "d_empty: arrivals in the odd CTA",
        r"\s*mapa.* remote",
        None,
        changed(1, "xor.b32", 1),
    )
    yield (
        "full: half of the bytes",
        r"\s*mbarrier\.arrive\.expect_tx\.shared::cta",
        None,
        changed(1, "shr.u32", 1),
    )
    for which, name in ((0, "full"), (1, "empty"), (12, "d_full"), (13, "d_empty")):
        yield (
            f"{name}: an arrival more is expected",
            r"\s*mbarrier\.init",
            which,
            changed(1, "add.u32", 1),
        )
    yield (
        "d_empty: one CTA's arrivals are enough",
        r"\s*mbarrier\.init",
        13,
        changed(1, "shr.u32", 1),
    )
    yield (
        "lanes of another warp",
        r"\s*tcgen05\.ld",
        None,
        changed(0, "xor.b32", 1 << 21),
    )
    yield (
        "columns of D by 32",
        r"\s*tcgen05\.ld",
        None,
        changed(0, "xor.b32", 32),
    )


def outcome(program, changes):
    """How the probe notices the changes; empty if it does not."""
    settings = {
        "SONICMOE_EMULATED_CAPABILITY": "10.0",
        "SONICMOE_EMULATED_PATIENCE": "20",
        "SONICMOE_EMULATED_INSTEAD": "\n".join(changes),
    }
    run = subprocess.run(
        [program, f"--gtest_filter={TEST}"],
        env=os.environ | settings,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if run.returncode == 0:
        return ""
    note = re.search(r"^note: .*device 0: (.+), so", run.stdout, re.M)
    fault = re.search(r"^emulator: device 0: .*?Params(?:\)|E): (?:\S+: )?(.+)$", run.stderr, re.M)
    if note is not None:
        return "result: " + note.group(1)
    return "emulator: " + (fault.group(1)[:110] if fault else run.stderr[-300:].strip())


def main():
    program = sys.argv[1]
    only = sys.argv[2] if len(sys.argv) > 2 else ""
    data = Path(program).read_bytes()
    unnoticed = []
    for kernel in (STORE, STORE_EXPERT):
        lines = lines_of(data, kernel)
        is_grad = kernel == STORE_EXPERT
        changes = [*changed_products(is_grad), *changed_loads(is_grad), *changed_barriers()]
        for name, pattern, which, change in changes:
            if only not in name:
                continue
            found = [(number, line) for number, line in lines if re.match(pattern, line)]
            if which is not None:
                found = [found[which]]
            assert found, name
            instead = [f"{kernel}:{number}:{change(line).strip()}" for number, line in found]
            noticed = outcome(program, instead)
            kind = "store" if kernel == STORE else "store_expert"
            print(f"{kind:12} {name}: {noticed or 'NOT NOTICED'}", flush=True)
            if not noticed:
                unnoticed.append((kind, name))
    return 1 if unnoticed else 0


if __name__ == "__main__":
    sys.exit(main())
