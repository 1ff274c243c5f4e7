#!/usr/bin/env python3
"""Asks a test whether it notices that a kernel lacks one of its waits, fences or arrivals.

    python emulator/removals.py build/release/sonicmoe_emulated_tests KERNEL 'GTEST_FILTER'

Takes the first kernel whose mangled name contains KERNEL. Removes one synchronising instruction of
its PTX at a time and runs the tests with each of a few seeds. Prints a line for each removal, and
exits 1 if one was not noticed: "not run" if the tests do not reach the instruction, else "MISSED".
First the tests must pass as they are. An instruction that nobody misses may be superfluous, or of a
kind that the emulator cannot judge: docs/emulator.md.
"""

import argparse
import os
import re
import subprocess
import sys

# A wait for an mbarrier that is removed succeeds at once.
SYNCHRONISES = re.compile(
    r"^\s*(@!?%\w+\s+)?((?:fence\.proxy|bar\.(?!warp)|barrier|wgmma\.wait_group"
    r"|mbarrier\.(?:arrive|try_wait|test_wait)|tcgen05\.(?:fence|wait|commit|dealloc|relinquish)"
    r"|cp\.async\.(?:wait|mbarrier|bulk\.wait)|griddepcontrol\.wait)[\w.:]*)"
)


def kernel_lines(binary, part):
    """Name of the kernel, and (line in its module's PTX, predicate, opcode) of synchronisations."""
    with open(binary, "rb") as file:
        data = file.read()
    for blob in re.finditer(rb"\.version [^\0]*", data):
        text = blob.group(0).decode("utf-8", "replace")
        # The emulator counts lines from the beginning of the text, which has comments before this.
        before = data[data.rfind(b"\0", 0, blob.start()) + 1 : blob.start()].count(b"\n")
        entry = re.search(rf"\.entry (\S*{re.escape(part)}\S*)\(", text)
        if entry is None:
            continue
        after = text.find(".entry", entry.end())
        end = after if after != -1 else len(text)
        first = text.count("\n", 0, entry.start()) + before + 1
        found = []
        for number, line in enumerate(text[entry.start() : end].split("\n"), first):
            match = SYNCHRONISES.match(line)
            if match:
                found.append((number, match.group(1) or "", match.group(2)))
        return entry.group(1), found
    sys.exit(f"no kernel's name contains {part}")


def passes(options, environment):
    """Whether all tests pass, and at least one runs."""
    command = [options.binary, f"--gtest_filter={options.filter}"]
    try:
        run = subprocess.run(
            command, env=os.environ | environment, capture_output=True, timeout=options.timeout
        )
    except subprocess.TimeoutExpired:
        return False
    return run.returncode == 0 and re.search(rb"\[  PASSED  \] [1-9]", run.stdout) is not None


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("binary")
    parser.add_argument("kernel")
    parser.add_argument("filter")
    parser.add_argument("--only", default="", help="opcodes that begin with this")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=120)
    options = parser.parse_args()
    seeds = [{"SONICMOE_EMULATED_SEED": str(seed)} for seed in range(1, options.seeds + 1)]
    if not all(passes(options, seed) for seed in seeds):
        sys.exit(f"{options.filter} fails or runs no test, without any removal")
    name, lines = kernel_lines(options.binary, options.kernel)
    lines = [line for line in lines if line[2].startswith(options.only)]
    print(f"{name}: {len(lines)} removals")
    count = dict.fromkeys(("noticed", "MISSED", "not run"), 0)
    for number, predicate, opcode in lines:
        spot = f"{name}:{number}"
        removed = {"SONICMOE_EMULATED_WITHOUT": spot, "SONICMOE_EMULATED_PATIENCE": "2"}
        trap = {"SONICMOE_EMULATED_INSTEAD": f"{spot}:{predicate}trap;"}
        if not all(passes(options, removed | seed) for seed in seeds):
            outcome = "noticed"
        else:
            outcome = "not run" if passes(options, trap | seeds[0]) else "MISSED"
        count[outcome] += 1
        print(f"{outcome:8} line {number:6} {opcode}", flush=True)
    print(f"{count['noticed']} of {len(lines)} removals were noticed, {count['not run']} not run")
    return count["noticed"] < len(lines)


if __name__ == "__main__":
    sys.exit(main())
