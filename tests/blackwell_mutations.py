"""Changes one thing in a kernel of the engine blackwell after another, and asks its probe whether
it notices: bits of descriptors, halves of B, rows, and which CTA a barrier is in.

usage: blackwell_mutations.py SONICMOE_EMULATED_TESTS [PART_OF_A_NAME] [--share K/N]

`--share K/N` asks every Nth change only, from the Kth on; K may be the word today, so that each is
asked every N days.
Prints a line for each change, and exits 1 if one is not noticed. "result": the product differs or
does not end, as it would on a GPU. "emulator": the emulator refuses what the kernel does.
"""

import argparse
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path

from blackwell_faults import lines_of

TEST = "BlackwellProbe.ComputesAProduct"

PAIR = "9blackwell12pair_productINS1_"
STORE = PAIR + "12RowProductOfINS1_5StoreI6__half"
STORE_EXPERT = PAIR + "14DepthProductOfINS1_11StoreExpertI13__nv_bfloat16"
CODES_STORE = PAIR + "14CodesProductOfINS1_5StoreI13__nv_bfloat16"
CODES_ACTIVATE = PAIR + "14CodesProductOfINS1_13CodesActivateE"
CODES_ACTIVATE_GRAD = PAIR + "14CodesProductOfINS1_17CodesActivateGradE"
ACTIVATE = PAIR + "12RowProductOfINS1_8ActivateI"
ACTIVATE_GRAD = PAIR + "12RowProductOfINS1_12ActivateGradI"
APART, PAIRS = "13__nv_bfloat16", "6__half"  # the probe has gate and up apart in bf16

REGISTER = r"%(?:rd|rs|r)\d+"


def with_scratch(line, operand, opcode, value, size):
    """The line, with `opcode register, value` in the place of its register number `operand`."""
    at = list(re.finditer(REGISTER, line))[operand]
    changed = f"{line[: at.start()]}scratch{line[at.end() :]}"
    return f"{{ .reg .b{size} scratch; {opcode} scratch, {at.group()}, {value}; {changed} }}"


def changed(operand, opcode, value, size=32):
    return lambda line: with_scratch(line, operand, opcode, value, size)


def flipped(operand, bits, size):
    return changed(operand, f"xor.b{size}", bits, size)


def replaced(old, new):
    return lambda line: line.replace(old, new)


def with_address(opcode, bytes_):
    """Changes the address in global memory, the first or only register of 64 bits."""

    def change(line):
        registers = [m.group() for m in re.finditer(REGISTER, line)]
        place = next(i for i, register in enumerate(registers) if register.startswith("%rd"))
        return with_scratch(line, place, opcode, bytes_, 64)

    return change


def further(bytes_):
    return with_address("add.u64", bytes_)


def neighbour(bytes_):
    """Exchanges neighbours of so many bytes, which are all in the array."""
    return with_address("xor.b64", bytes_)


MMA, COMMIT, COPY = (rf"\s*tcgen05\.{what}" for what in ("mma", "commit", "cp"))
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


# Of the instruction descriptor of codes.
CODES_INSTRUCTION = {
    "byte of A's scales": 1 << 29,
    "byte of B's scales": 1 << 4,
    "A in e5m2": 1 << 7,
    "B in e5m2": 1 << 10,
    "A in the other order": 1 << 15,
    "M 128 instead of 256": 3 << 27,
    "scales in another format": 1 << 23,
}


def changed_codes():
    for what, bits in CODES_INSTRUCTION.items():
        yield f"instruction descriptor: {what}", MMA, None, flipped(3, bits, 32)
    for place, name in ((4, "A"), (5, "B")):
        for distance in (1, 4):
            yield (
                f"scales of {name} {distance} columns further",
                MMA,
                None,
                changed(place, "add.u32", distance),
            )
    # Registers of tcgen05.cp: target, descriptor. 1: the next row of a chunk; 32: the next chunk.
    for copy, name in enumerate(("A", "the left half of B", "the right half of B")):
        yield f"scales of {name} 4 columns further", COPY, copy, changed(0, "add.u32", 4)
        for what, bits in (("row", 1), ("chunk", 32), ("stride", 1 << 32)):
            yield (
                f"scales of {name}: another {what}",
                COPY,
                copy,
                flipped(1, bits, 64),
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


LOADED_D, STORED = r"\s*tcgen05\.ld", r"\s*st\.global\.v4"
NEXT_COLUMNS = 16  # bytes: a lane stores eight columns
# Bytes of a row of A in the probe. A row of H has twice as many.
ROW = 136 * 2
BUFFER = 2048  # bytes of a staging buffer
MAP = 128  # bytes of a tensor map


def changed_halves():
    """With gate and up apart a CTA loads columns of both matrices."""
    for box, name, opcode in ((0, "gate", "add.u64"), (1, "up", "sub.u64")):
        yield (
            f"box of {name}: from the other matrix",
            BOX,
            slice(box, box + 1),
            changed(1, opcode, MAP, 64),
        )


def changed_epilogue_of_a():
    """With gate and up apart the kernel loads D of gate and of up, and stores four times each H of
    gate, H of up, and A."""
    yield "gate and up exchanged in D", LOADED_D, slice(0, 2), changed(0, "xor.b32", 64)
    for part, name in enumerate(("gate", "up")):
        bias = slice(part, part + 1)
        yield f"bias of {name}: the next column", r"\s*ld\.global\.nc\.b16", bias, neighbour(2)
    for first, name, row in ((0, "H of gate", 2 * ROW), (4, "H of up", 2 * ROW), (8, "A", ROW)):
        four = slice(first, first + 4)
        yield f"{name} in the next columns", STORED, four, further(NEXT_COLUMNS)
        yield f"{name} in the next row", STORED, four, further(row)
        yield f"{name}: columns exchanged", r"\s*st\.shared\.v4", four, changed(0, "xor.b32", 16)


def changed_epilogue_of_pairs():
    """The next load of D and stores: H, four times, and A, twice."""
    yield "D: the other 32 pairs", LOADED_D, slice(2, 3), changed(0, "xor.b32", 64)
    for part, name in enumerate(("gate", "up")):
        bias = slice(2 + part, 3 + part)
        yield f"bias of {name}: the next column", r"\s*ld\.global\.nc\.b16", bias, neighbour(2)
    for stores, name, row in ((slice(12, 16), "H", 2 * ROW), (slice(16, 18), "A", ROW)):
        yield f"{name} in the next columns", STORED, stores, further(NEXT_COLUMNS)
        yield f"{name} in the next row", STORED, stores, further(row)


def changed_epilogue_of_dh():
    """The kernel reads H to two staging buffers, four times each, and stores dH from there."""
    yield "row weight of the next row", r"\s*ld\.global\.nc\.f32", None, neighbour(4)
    yield "dS in the next part", r"\s*st\.global\.f32", None, further(4)
    yield "D: eight columns further", LOADED_D, None, changed(0, "xor.b32", 8)
    for first, name in ((0, "first buffer"), (4, "second buffer")):
        four = slice(first, first + 4)
        yield (
            f"H, {name}: the next columns",
            r"\s*ld\.global\.v4\.u32",
            four,
            neighbour(NEXT_COLUMNS),
        )
        yield f"dH, {name}: in the next columns", STORED, four, further(NEXT_COLUMNS)
        yield f"dH, {name}: in the next row", STORED, four, further(2 * ROW)
    yield "A' in the next columns", STORED, slice(8, 12), further(NEXT_COLUMNS)
    yield "A' in the next row", STORED, slice(8, 12), further(ROW)
    for load, name, opcode in ((0, "gate", "add.u32"), (1, "up", "sub.u32")):
        yield (
            f"{name} from the buffer of the other",
            r"\s*ld\.shared\.v4",
            slice(load, load + 1),
            changed(4, opcode, BUFFER),
        )


# Of the epilogues of codes in the probe: n, and bytes between the scales of two blocks.
WIDTH = 192
NEXT_BLOCK = 4 * 232
LAST = -1  # the register of a tensor memory address, in loads of words too
SCALE = r"\s*st\.global\.u32"


def changed_codes_of_row(name, stores, scale, row):
    """Codes of a row and their scales, which the kernel stores at these places."""
    yield f"{name} in the next columns", STORED, stores, further(NEXT_COLUMNS)
    yield f"{name} in the next row", STORED, stores, further(row)
    for what, bytes_ in (("row", 4), ("block", NEXT_BLOCK)):
        yield f"scale of {name} in the next {what}", SCALE, scale, further(bytes_)


def changed_epilogue_of_gated_codes():
    """The second half of the kernel. It loads D, H as words for its codes, gate, up, and A."""
    for load, name, distance in (
        (4, "D: 32 columns further", 32),
        (5, "codes of the next 32 columns of H", 32),
        (6, "gate from up", 128),
        (7, "up from gate", 128),
        (8, "codes of the next 32 columns of A", 32),
    ):
        yield name, LOADED_D, slice(load, load + 1), changed(LAST, "xor.b32", distance)
    yield "bias: the next column", r"\s*ld\.global\.nc\.b16", slice(1, 2), neighbour(2)
    yield from changed_codes_of_row("H", slice(12, 14), slice(2, 3), 2 * WIDTH)
    yield from changed_codes_of_row("A", slice(14, 16), slice(3, 4), WIDTH)
    yield "boxes: of the other matrix", BOX, None, changed(1, "add.u64", MAP, 64)


def changed_epilogue_of_codes():
    """The first half of the kernel, without a gate. It stores H in bf16."""
    for load, name in ((0, "D"), (2, "H"), (3, "A")):
        yield (
            f"{name}: 32 columns further",
            LOADED_D,
            slice(load, load + 1),
            changed(LAST, "xor.b32", 32),
        )
    yield "bias: the next column", r"\s*ld\.global\.nc\.b16", slice(0, 1), neighbour(2)
    yield "H in the next columns", STORED, slice(0, 4), further(NEXT_COLUMNS)
    yield "H in the next row", STORED, slice(0, 4), further(2 * WIDTH)
    yield from changed_codes_of_row("A", slice(6, 8), slice(1, 2), WIDTH)


def changed_epilogue_of_dh_codes():
    """The kernel stores dH as elements from two staging buffers, A', then the codes of dH."""
    yield "row weight of the next row", r"\s*ld\.global\.nc\.f32", None, neighbour(4)
    yield "dS in the next part", r"\s*st\.global\.f32", None, further(4)
    yield "D: eight columns further", LOADED_D, slice(0, 1), changed(LAST, "xor.b32", 8)
    for load, half in ((1, "first"), (2, "second")):
        words = slice(load, load + 1)
        for what, distance in (("gate and up exchanged", 4), ("eight columns further", 8)):
            yield (
                f"words of dH, {half} half: {what}",
                LOADED_D,
                words,
                changed(LAST, "xor.b32", distance),
            )
    rows = ((0, "dH of gate", 4 * WIDTH), (4, "dH of up", 4 * WIDTH), (8, "A'", 2 * WIDTH))
    for first, name, row in rows:
        four = slice(first, first + 4)
        yield f"{name} in the next columns", STORED, four, further(NEXT_COLUMNS)
        yield f"{name} in the next row", STORED, four, further(row)
    yield from changed_codes_of_row("dH", slice(12, 14), slice(0, 1), 2 * 256)


def changed_codes_of_h():
    for part, name in enumerate(("gate", "up")):
        which = slice(part, part + 1)
        yield f"codes of {name}: the next columns", r"\s*ld\.v2\.u32", which, neighbour(8)
        yield f"scale of {name}: of the next row", r"\s*ld\.global\.f32", which, neighbour(4)


def changed_elements_of_h():
    for part, name in enumerate(("gate", "up")):
        which = slice(part, part + 1)
        yield f"{name}: the next columns", r"\s*ld\.v4\.u32", which, neighbour(NEXT_COLUMNS)


def outcome(program, product, changes):
    """How a product of the probe notices the changes; empty if it does not."""
    settings = {
        "SONICMOE_EMULATED_CAPABILITY": "10.0",
        "SONICMOE_EMULATED_PATIENCE": "20",
        "SONICMOE_EMULATED_INSTEAD": "\n".join(changes),
        "SONICMOE_PRODUCT": product,
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
    note = re.search(r"^note: (.+)$", run.stdout, re.M)
    fault = re.search(r"^emulator: device 0: .*?Params(?:\)|E): (.+)$", run.stderr, re.M)
    if note is not None:
        return "result: " + note.group(1)
    return "emulator: " + (fault.group(1)[:110] if fault else run.stderr[-300:].strip())


def engine_changes(sums_rows):
    return [*changed_products(sums_rows), *changed_loads(sums_rows), *changed_barriers()]


# Kernels with the product of the probe that each computes. Those of one template share what comes
# before the epilogue.
KERNELS = {
    "store": (STORE, "experts of", engine_changes(False)),
    "codes_store": (
        CODES_STORE,
        "codes of",
        [*changed_codes(), *changed_loads(False), *changed_barriers()],
    ),
    "codes_activate": (
        CODES_ACTIVATE,
        "A from codes, with a gate",
        list(changed_epilogue_of_gated_codes()),
    ),
    "codes_activate_plain": (
        CODES_ACTIVATE,
        "A from codes, without a gate",
        list(changed_epilogue_of_codes()),
    ),
    "codes_activate_grad": (
        CODES_ACTIVATE_GRAD,
        "dH from codes, of H in codes",
        [*changed_epilogue_of_dh_codes(), *changed_codes_of_h()],
    ),
    "codes_activate_grad_bf16": (
        CODES_ACTIVATE_GRAD,
        "dH from codes, of H in bf16",
        list(changed_elements_of_h()),
    ),
    "store_expert": (STORE_EXPERT, "a weight gradient", engine_changes(True)),
    "activate": (
        ACTIVATE + APART,
        "A, gate and up apart",
        [*changed_epilogue_of_a(), *changed_halves(), *engine_changes(False)],
    ),
    "activate_pairs": (
        ACTIVATE + PAIRS,
        "A, gate and up alternating",
        list(changed_epilogue_of_pairs()),
    ),
    "activate_grad": (
        ACTIVATE_GRAD + APART,
        "dH, gate and up apart",
        [*changed_epilogue_of_dh(), *engine_changes(False)],
    ),
    "activate_grad_pairs": (
        ACTIVATE_GRAD + PAIRS,
        "dH, gate and up alternating",
        list(changed_epilogue_of_dh()),
    ),
}


def mutations(data, only):
    """Kind of kernel, name of the change, product of the probe, and the changed lines."""
    for kind, (kernel, product, changes) in KERNELS.items():
        lines = lines_of(data, kernel)
        for name, pattern, which, change in changes:
            if only not in f"{kind} {name}":
                continue
            found = [(number, line) for number, line in lines if re.match(pattern, line)]
            if which is not None:
                found = found[which] if isinstance(which, slice) else [found[which]]
            assert found, name
            yield (
                kind,
                name,
                product,
                [f"{kernel}:{number}:{change(line).strip()}" for number, line in found],
            )


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("only", nargs="?", default="")
    parser.add_argument("--share", default="1/1")
    return parser.parse_args()


def share_of(asked, share):
    """Every Nth of `asked` from the Kth on, for the share "K/N"."""
    found = re.fullmatch(r"(today|[1-9]\d*)/([1-9]\d*)", share)
    if found is None or (found[1] != "today" and int(found[1]) > int(found[2])):
        sys.exit(f"--share is {share}, must be K/N with K from 1 to N, or today/N")
    step = int(found[2])
    first = date.today().toordinal() % step if found[1] == "today" else int(found[1]) - 1
    print(f"changes {first + 1}, {first + 1 + step}, ... of {len(asked)}", flush=True)
    return asked[first::step]


def main():
    given = arguments()
    program = given.program
    unnoticed = 0
    asked = share_of(list(mutations(Path(program).read_bytes(), given.only)), given.share)
    # A product that does not end sleeps for 5 seconds.
    with ThreadPoolExecutor(2 * (os.cpu_count() or 1)) as pool:
        outcomes = pool.map(lambda a: outcome(program, a[2], a[3]), asked)
        for (kind, name, *_), noticed in zip(asked, outcomes, strict=True):
            print(f"{kind:20} {name}: {noticed or 'NOT NOTICED'}", flush=True)
            unnoticed += not noticed
    print(f"{len(asked) - unnoticed} of {len(asked)} changes were noticed")
    return 1 if unnoticed or not asked else 0


if __name__ == "__main__":
    sys.exit(main())
