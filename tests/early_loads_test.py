"""No kernel outside of the Hopper engine may use ld.global.nc before it has waited for the kernel
before: PTX's memory model does not cover such a load (src/cuda/ptx/dependent.cuh).

usage: early_loads_test.py NVCC SOURCE_DIRECTORY
"""

import re
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

FOLDERS = {"metadata", "routing", "sums"}  # and whatever else has kernels
ENTRY = re.compile(r"\.entry (\w+)\(")


def early_loads(ptx):
    """Kernels with a load through the read-only path ahead of their first wait, and how many."""
    parts = ENTRY.split(ptx)
    found = {}
    for name, body in zip(parts[1::2], parts[2::2], strict=True):
        if "griddepcontrol" not in body:  # launched in stream order
            continue
        early = body.split("griddepcontrol.wait")[0]
        if loads := early.count("ld.global.nc"):
            found[name] = loads
    return found


def compile_to_ptx(source):
    root = Path(sys.argv[2])
    command = [sys.argv[1], "-std=c++20", "--expt-relaxed-constexpr", "-arch=compute_90a", "-ptx"]
    folders = [f"-I{root / 'include'}", f"-I{root / 'src'}"]
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "kernels.ptx"
        done = subprocess.run(
            [*command, *folders, str(source), "-o", str(target)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return target.read_text()


class EarlyLoads(unittest.TestCase):
    def test_a_load_before_the_wait_is_found(self):
        wait, load = "griddepcontrol.wait;\n", "ld.global.nc.u32 %r1, [%rd1];\n"
        late, early = f".entry late()\n{wait}{load}", f".entry early()\n{load}{wait}"
        plain = f".entry plain()\n{load}"
        never = f".entry never()\ngriddepcontrol.launch_dependents;\n{load}"
        self.assertEqual(early_loads(late + early + plain + never), {"early": 1, "never": 1})

    def test_no_kernel_has_one(self):
        sources = sorted((Path(sys.argv[2]) / "src" / "cuda").glob("*/*.cu"))
        self.assertLessEqual(FOLDERS, {source.parent.name for source in sources})
        for source in sources:
            with self.subTest(source.name):
                ptx = compile_to_ptx(source)
                self.assertIn(".entry", ptx)
                self.assertEqual(early_loads(ptx), {})


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
