"""Tables and plot of docs/plan-ranks.md, from the output of `sonicmoe plan --ranks --json`.

python benchmarks/plan_ranks.py COMMAND            rewrites the tables and the plot
python benchmarks/plan_ranks.py COMMAND --check    compares the tables; exit 1 on a difference
"""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path

from plots import save_plots

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/plan-ranks.md"
GIB = 2**30

# T,d,n,E,K with T tokens on each rank.
SHAPES = {
    "dsv3.2": "8192,7168,2048,256,8",
    "qwen3-235b": "8192,4096,1536,128,8",
    "qwen3-30b": "16384,2048,768,128,8",
    "7B-n256": "24576,1536,256,128,8",
    "30B-n256": "16384,4096,256,256,16",
    "qwen3-next": "8192,2048,512,512,10",
}
NODE = ["--ranks", "2,4,8"]
PLOTTED = ("dsv3.2", "qwen3-235b", "qwen3-next")
# Arguments and colour of each line.
FABRICS = {
    "nodes of 8, 400 Gbit/s": (["--network", "400"], "#8095a8"),
    "nodes of 8, 800 Gbit/s": (["--network", "800"], "#c9bfa8"),
    "NVLink joins 64, then 400 Gbit/s": (
        ["--network", "400", "--ranks-per-node", "64"],
        "#c4451c",
    ),
}


def plans(command, shape, *arguments):
    done = subprocess.run(
        [command, "plan", "--shape", SHAPES[shape], *arguments, "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)["ranks"]


def many_ranks(shape):
    """2, 4, ... up to the number of experts."""
    experts = int(SHAPES[shape].split(",")[3])
    return [2**i for i in range(1, 10) if 2**i <= experts]


def both(plan, key):
    return (plan["forward"][key] + plan["backward"][key]) / 1e3


def node_rows(command):
    for name, shape in SHAPES.items():
        for p in plans(command, name, *NODE):
            total = p["memory_bytes"]["total"]
            yield [
                name,
                shape,
                str(p["ranks"]),
                f"{p['sent_rows']:.2f}",
                f"{both(p, 'products_us'):.2f}",
                f"{both(p, 'transfers_us'):.2f}",
                f"{p['over_alone']['exposed']:.2f}",
                f"{p['over_alone']['hidden']:.2f}",
                "/".join(f"{total[size] / GIB:.1f}" for size in ("exact", "arena", "worst")),
            ]


def fabric_rows(command):
    for name in PLOTTED:
        wanted = [w for w in many_ranks(name) if w >= 16]
        lists = {
            fabric: plans(command, name, "--ranks", ",".join(map(str, wanted)), *arguments)
            for fabric, (arguments, _) in FABRICS.items()
        }
        for i, ranks in enumerate(wanted):
            first = lists[next(iter(FABRICS))][i]
            times = [lists[fabric][i]["over_alone"] for fabric in FABRICS]
            yield [
                name,
                str(ranks),
                f"{first['distinct_ranks']:.2f}",
                f"{first['distinct_nodes']:.2f}",
                *(f"{t['exposed']:.2f}/{t['hidden']:.2f}" for t in times),
            ]


NODE_HEAD = [
    "layer",
    "T,d,n,E,K",
    "ranks",
    "rows sent a token",
    "products, ms",
    "transfers, ms",
    "exposed",
    "hidden",
    "GiB: exact/arena/worst",
]
FABRIC_HEAD = ["layer", "ranks", "ranks reached", "nodes of 8 reached", *FABRICS]
TABLES = {"node": (NODE_HEAD, node_rows), "fabric": (FABRIC_HEAD, fabric_rows)}


def table(head, rows):
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def filled(page, command):
    """The page with the tables that the command computes."""
    for name, (head, rows) in TABLES.items():
        begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->"
        before, rest = page.split(begin)
        after = rest.split(end)[1]
        page = f"{before}{begin}{table(head, rows(command))}\n{end}{after}"
    return page


def plot(plt, command):
    figure, panels = plt.subplots(1, len(PLOTTED), figsize=(12, 4.4), layout="constrained")
    for axes, name in zip(panels, PLOTTED, strict=True):
        ranks = many_ranks(name)
        for fabric, (arguments, colour) in FABRICS.items():
            rows = plans(command, name, "--ranks", ",".join(map(str, ranks)), *arguments)
            exposed = [p["over_alone"]["exposed"] for p in rows]
            hidden = [p["over_alone"]["hidden"] for p in rows]
            axes.plot(ranks, exposed, "o-", color=colour, label=f"{fabric}: nothing hidden")
            axes.plot(ranks, hidden, "s:", color=colour, label="all hidden", markersize=4)
            axes.fill_between(ranks, hidden, exposed, color=colour, alpha=0.12)
        axes.set(xscale="log", yscale="log", xlabel="ranks", title=f"{name}: {SHAPES[name]}")
        axes.set_xticks(ranks, [str(w) for w in ranks], fontsize=8)
        axes.set_yticks([1, 2, 3, 5, 10], ["1", "2", "3", "5", "10"])
        axes.minorticks_off()
        axes.set_ylim(0.95, 14)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("time over one GPU, both passes")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3, fontsize=8, frameon=False)
    return figure


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", help="the command sonicmoe")
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    options = parser.parse_args()
    page = PAGE.read_text()
    current = filled(page, options.command)
    if options.check:
        if page != current:
            raise SystemExit(f"{PAGE.relative_to(ROOT)} differs from the output of the command")
        return
    PAGE.write_text(current)
    save_plots({"plan-ranks": lambda plt: plot(plt, options.command)})


if __name__ == "__main__":
    main()
