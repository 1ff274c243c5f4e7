"""Runs an nvcc command and fails on register spills and serialised wgmma.

usage: ptxas_gate.py COMMAND... ptxas reports both only as information (serialised wgmma as
advisories C7500 to C7599), but they cost up to half the speed. Writes FILE.cost next to the object
file, with its number of kernels of each architecture and CPU seconds, for tools/check_kernels.py.
"""

import json
import re
import resource
import subprocess
import sys
from collections import Counter
from pathlib import Path

ADVISORY = re.compile(r"\bC75\d\d\b")
SPILL = re.compile(r"(\d+) bytes spill stores")
FUNCTION = re.compile(r"Function properties for (\S+)")
KERNEL = re.compile(r"Compiling entry function '\S+' for '(\w+)'")


def verdict(lines: list[str]) -> list[str]:
    """The faults in the output of ptxas."""
    faults = []
    function = architecture = "?"
    for line in lines:
        if found := KERNEL.search(line):
            architecture = found.group(1)
        if found := FUNCTION.search(line):
            function = found.group(1)
        if ADVISORY.search(line):
            faults.append(line)
        if (found := SPILL.search(line)) and int(found.group(1)) > 0:
            faults.append(f"{line.strip()} in {function} for {architecture}")
    return faults


def kernels_of(lines: list[str]) -> Counter[str]:
    """The number of kernels of each architecture in the output of ptxas."""
    return Counter(found.group(1) for line in lines if (found := KERNEL.search(line)))


def write_cost(command: list[str], lines: list[str]) -> None:
    if "-o" not in command[:-1]:
        return
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    cost = {"kernels": kernels_of(lines), "cpu_seconds": round(spent.ru_utime + spent.ru_stime, 2)}
    target = command[command.index("-o") + 1]
    Path(target + ".cost").write_text(json.dumps(cost) + "\n", encoding="utf-8")


def main() -> int:
    run = subprocess.run(sys.argv[1:], stderr=subprocess.PIPE, text=True, check=False)
    lines = run.stderr.splitlines()
    info = ("ptxas info", "    0 bytes stack frame")
    for line in lines:
        if run.returncode != 0 or not line.startswith(info):
            print(line, file=sys.stderr)
    if run.returncode != 0:
        return run.returncode
    write_cost(sys.argv[1:], lines)
    faults = verdict(lines)
    for fault in faults:
        print(f"ptxas gate: {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
