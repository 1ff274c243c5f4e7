"""Runs an nvcc command and fails on register spills and serialised wgmma.

usage: ptxas_gate.py [--ptx ARCHITECTURE,...] COMMAND...

ptxas reports both only as information (serialised wgmma as advisories C7500 to C7599), but they
cost up to half the speed. Writes OBJECT.cost next to the object file, with its number of kernels of
each architecture and CPU seconds, for tools/check_kernels.py. With --ptx it also writes OBJECT.ptx,
for the emulator: the PTX of the named architectures (80, 90 or 90a, say), a zero byte between two.
"""

import json
import os
import re
import resource
import subprocess
import sys
import tempfile
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


def target_of(command: list[str]) -> str | None:
    return command[command.index("-o") + 1] if "-o" in command[:-1] else None


def write_cost(command: list[str], lines: list[str]) -> None:
    target = target_of(command)
    if target is None:
        return
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    cost = {"kernels": kernels_of(lines), "cpu_seconds": round(spent.ru_utime + spent.ru_stime, 2)}
    Path(target + ".cost").write_text(json.dumps(cost) + "\n", encoding="utf-8")


def ptx_command(command: list[str], architecture: str, target: str) -> list[str]:
    """The command that makes the PTX alone."""
    words, result = iter(command), []
    for word in words:
        if word in ("-o", "-MT", "-MF"):
            next(words)
        elif word != "-MD" and not word.startswith(("-gencode", "-Xptxas")):
            result.append("-ptx" if word == "-c" else word)
    return [*result, f"-arch=compute_{architecture}", "-o", target]


def run(command: list[str]) -> subprocess.CompletedProcess:
    return subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)


def run_with_ptx(command: list[str], architectures: list[str]) -> subprocess.CompletedProcess:
    """Runs the command, which compiles an object, and writes OBJECT.ptx."""
    target = Path(target_of(command))
    is_cached = "CCACHE_DISABLE" not in os.environ and any(
        Path(word).name == "ccache" for word in command
    )
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        stem = f"{folder}/{target.name.split('.')[0]}"
        texts = [Path(f"{stem}.compute_{name}.ptx") for name in architectures]
        if is_cached:  # ccache stores one result of a command
            for name, text in zip(architectures, texts, strict=True):
                made = run(ptx_command(command, name, str(text)))
                if made.returncode != 0:
                    return made
        made = run(command if is_cached else [*command, "--keep", "--keep-dir", folder])
        if made.returncode == 0:
            one = Path(f"{stem}.ptx")  # the name if nvcc compiles for one architecture
            texts = [one] if one.exists() else texts
            Path(f"{target}.ptx").write_bytes(b"\0".join(text.read_bytes() for text in texts))
    return made


def main() -> int:
    command = sys.argv[1:]
    if command[0] == "--ptx":
        architectures, command = command[1].split(","), command[2:]
        done = run_with_ptx(command, architectures)
    else:
        done = run(command)
    lines = done.stderr.splitlines()
    info = ("ptxas info", "    0 bytes stack frame")
    for line in lines:
        if done.returncode != 0 or not line.startswith(info):
            print(line, file=sys.stderr)
    if done.returncode != 0:
        return done.returncode
    write_cost(command, lines)
    faults = verdict(lines)
    for fault in faults:
        print(f"ptxas gate: {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
