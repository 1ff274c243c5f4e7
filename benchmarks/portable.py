"""Compares the portable engine (mma.sync, cp.async) with others on a Hopper GPU; writes one record.

    python benchmarks/portable.py --library build/release/libsonicmoe.so --out records
    python benchmarks/portable.py --summary records/portable.json

Times forward and backward of the layer, hot, in one process: the portable engine and the Hopper
engine (two handles of one library: SONICMOE_ENGINE is read when a handle is opened), ScatterMoE and
a loop over experts. Then times every matrix product of the portable engine, and the best mma.sync
products of the same shape from Triton and from cuBLAS. TRITON_OVERRIDE_ARCH makes Triton compile
for sm_80. Every result is compared with torch's before it is timed.

The record is written after each layer. No measurement starts later than --seconds; run again with
the same --out to measure what is missing.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import time
import types
from pathlib import Path

# Read when Triton or CUDA is first used.
os.environ["TRITON_OVERRIDE_ARCH"] = "sm80"
os.environ.setdefault("TRITON_CACHE_DIR", str(Path(tempfile.gettempdir()) / "triton-sm80"))
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # starting 16 takes longer
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import h200
import torch
from h200_bench import capi, kernels, summary
from h200_bench.layer import Data, Ours
from h200_extra import check_allocates_nothing, free
from shapes import Shape

CUDA = torch.device("cuda")
QUICK = {"quick-n256": Shape(2048, 768, 256, 16, 4), "quick-n1024": Shape(2048, 768, 1024, 8, 2)}
LARGE = [name for name in h200.CONFIGS if name not in (*h200.SMALL, "qwen3-235b-T4096")]
CONFIGS = {name: h200.CONFIGS[name] for name in LARGE} | QUICK
PRODUCTS = {"fwd": {"A", "Y"}, "bwd": {"dH", "dX~", "dW"}}  # roles of kernels.role_of
CONTENDERS = ("portable", "hopper", *summary.RIVALS)


def launched(library):
    """{pass: names of the kernels} of one small layer."""
    data = Data(QUICK["quick-n256"], CUDA)
    data.sample(0)
    ours = Ours(library, data)
    ours.forward()
    parts = kernels.traced([(1, ours.forward), (1, ours.backward)])
    return {which: {name for name, _ in part} for which, part in zip(PRODUCTS, parts, strict=True)}


def check_engines(libraries):
    """Exits with a message unless the two handles launch different kernels for the products."""
    names = {engine: launched(library) for engine, library in libraries.items()}
    for which, roles in PRODUCTS.items():
        products = {n for n in names["hopper"][which] if kernels.role_of(which, n) in roles}
        if not products:
            raise SystemExit(f"no kernel has a name of a product: {sorted(names['hopper'][which])}")
        shared = products & names["portable"][which]
        if shared:
            raise SystemExit(f"both engines launch {min(shared)}: SONICMOE_ENGINE was not followed")


def require_sm80(folder):
    """Exits with a message if a kernel in Triton's cache uses wgmma, or if there is none."""
    files = list(Path(folder).rglob("*.ptx"))
    wrong = [path.name for path in files if "wgmma" in path.read_text()]
    if wrong or not files:
        raise SystemExit(f"Triton did not compile for sm_80: {', '.join(wrong) or 'no kernel'}")


def memory_of(library, shape):
    """Bytes kept for backward without X: the size the library asks for, the formula, and the
    promise."""
    problem = capi.Problem(
        form=capi.FORM_IDS,
        dtype=capi.BF16,
        tokens=shape.T,
        hidden=shape.d,
        width=shape.n,
        experts=shape.E,
        top_k=shape.K,
    )
    sizes = library.sizes(problem, capi.FORWARD)
    formula = 4 * shape.rows * shape.n
    promised = formula + 20 * shape.rows + 16 * shape.T + 1024 * shape.E
    kept = sizes.h_bytes + sizes.saved_bytes
    return {"kept_bytes": kept, "formula_bytes": formula, "promised_bytes": promised}


def measure_row(libraries, config, rivals, burst):
    """A row of the record: milliseconds of each contender, hot."""
    shape = CONFIGS[config]
    arguments = types.SimpleNamespace(
        rivals=rivals, states=["hot"], passes=h200.PASSES, burst=burst
    )
    medians, _, left_out = h200.measure(arguments, config, shape, libraries)
    row = {"config": config, **vars(shape)}
    for name in CONTENDERS:
        if (name, "fwd") in medians["hot"]:
            found = h200.figures(name, shape, medians["hot"])
            row[name] = {key: ms for key, ms in found.items() if key.endswith("_ms")}
    if "scattermoe" in row:
        require_sm80(os.environ["TRITON_CACHE_DIR"])
    row["memory"] = memory_of(libraries["portable"], shape)
    return row | ({"left_out": left_out} if left_out else {})


def measure_roles(library, config, burst, rivals):
    from h200_bench import roles

    return {"config": config} | roles.measure(library, CONFIGS[config], burst, rivals)


def check_memory(library):
    """[the error] if the engine allocates device memory of its own, else []."""
    data = Data(QUICK["quick-n1024"], CUDA)
    data.sample(0)
    ours = Ours(library, data)
    try:
        check_allocates_nothing(capi.in_turn(ours.forward, ours.backward))
    except SystemExit as wrong:
        return [str(wrong)]
    return []


class Record:
    """The record and its file; parts that an earlier run measured are kept."""

    def __init__(self, path, header):
        self.path = path
        self.content = header | {"what": "portable", "state": "hot", "rows": [], "roles": []}
        if path is not None and path.exists():
            earlier = json.loads(path.read_text())
            same = all(earlier.get(key) == header[key] for key in ("device", "commit"))
            if not same:
                raise SystemExit(f"{path} is of another device or commit, must be of this one")
            self.content |= {"rows": earlier["rows"], "roles": earlier["roles"]}

    def has(self, part, config):
        return any(row["config"] == config for row in self.content[part])

    def add(self, part, row):
        rows = {found["config"]: found for found in (*self.content[part], row)}
        self.content[part] = [rows[name] for name in CONFIGS if name in rows]
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps(self.content, indent=1) + "\n")


def plan(arguments):
    """(part, config) in this order: layers with rivals, other layers, products."""
    configs = sorted(arguments.configs, key=lambda c: c not in arguments.rival_configs)
    jobs = [("rows", config) for config in configs]
    jobs += [("roles", config) for config in arguments.role_configs]
    return [job for job in jobs if job[0] in arguments.parts]


def run(arguments, libraries, record):
    """Measures all that is missing; returns what failed or was not reached."""
    began, failed = time.perf_counter(), []
    for part, config in plan(arguments):
        start = time.perf_counter()
        if record.has(part, config):
            continue
        if start - began > arguments.seconds:
            failed.append(f"{part} of {config}: not reached")
            continue
        try:
            if part == "rows":
                rivals = list(summary.RIVALS) if config in arguments.rival_configs else []
                row = measure_row(libraries, config, rivals, arguments.burst)
            else:
                row = measure_roles(
                    libraries["portable"], config, arguments.burst, arguments.role_rivals
                )
        except (Exception, SystemExit) as wrong:  # go on with the other layers
            failed.append(f"{part} of {config}: {wrong}")
            print(f"{part} {config} FAILED: {wrong}", flush=True)
        else:
            record.add(part, row)
            print(f"{part} {json.dumps(row)} [{time.perf_counter() - start:.1f} s]", flush=True)
        gc.collect()
        if 2 * torch.cuda.memory_reserved() > torch.cuda.mem_get_info()[1]:
            free()  # only if most memory is in use: mapping it again takes seconds
    return failed


def parse():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ",".join
    parser.add_argument("--summary", metavar="RECORD", help="print the summary of a record")
    parser.add_argument("--library", default="", help="libsonicmoe.so of a CUDA build")
    parser.add_argument("--hopper", default="", help="another library for the Hopper engine")
    parser.add_argument("--configs", default=names(LARGE))
    parser.add_argument("--rival-configs", default=names(summary.RIVAL_CONFIGS))
    parser.add_argument("--role-configs", default=names(summary.RIVAL_CONFIGS))
    parser.add_argument("--role-rivals", default="triton,cublas")
    parser.add_argument("--parts", default="rows,roles")
    parser.add_argument("--quick", action="store_true", help="two small layers, all parts")
    parser.add_argument("--burst", type=float, default=120.0, help="milliseconds of a hot burst")
    parser.add_argument("--seconds", type=float, default=280.0, help="start nothing later")
    parser.add_argument("--out", default="", help="folder for portable.json")
    arguments = parser.parse_args()
    if arguments.quick:
        for name in ("configs", "rival_configs", "role_configs"):
            setattr(arguments, name, names(QUICK))
    for name in ("configs", "rival_configs", "role_configs", "role_rivals", "parts"):
        setattr(arguments, name, [v for v in getattr(arguments, name).split(",") if v])
    if not arguments.summary:
        check_machine(parser, arguments)
    return arguments


def check_machine(parser, arguments):
    """Exits with a message if nothing can be measured."""
    for config in (*arguments.configs, *arguments.rival_configs, *arguments.role_configs):
        if config not in CONFIGS:
            parser.error(f'configs has "{config}", must be of: {", ".join(CONFIGS)}')
    arguments.hopper = arguments.hopper or arguments.library
    h200.check_machine(parser, [arguments.library, arguments.hopper], [])


def print_summary(content):
    print("\n".join(summary.lines(content)), flush=True)


def main():
    arguments = parse()
    if arguments.summary:
        print_summary(json.loads(Path(arguments.summary).read_text()))
        return 0
    import triton

    header = h200.header() | {"triton": triton.__version__, "triton_arch": "sm80"}
    header["burst_ms"] = arguments.burst
    record = Record(Path(arguments.out) / "portable.json" if arguments.out else None, header)
    libraries = {
        "portable": capi.Library(arguments.library, CUDA, "portable"),
        "hopper": capi.Library(arguments.hopper, CUDA),
    }
    check_engines(libraries)
    failed = check_memory(libraries["portable"]) + run(arguments, libraries, record)
    print_summary(record.content)
    print("\n".join(failed), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
