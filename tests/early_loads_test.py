"""No kernel outside of the Hopper engine may use ld.global.nc before it has waited for the kernel
before: PTX's memory model does not cover such a load (src/cuda/ptx/dependent.cuh).

usage: early_loads_test.py OBJECT...    whose PTX is OBJECT.ptx (cmake/ptxas_gate.py)
"""

import re
import sys
import unittest
from pathlib import Path

FOLDERS = {"metadata", "routing", "sums", "portable"}  # and whatever else has kernels
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


class EarlyLoads(unittest.TestCase):
    def test_a_load_before_the_wait_is_found(self):
        wait, load = "griddepcontrol.wait;\n", "ld.global.nc.u32 %r1, [%rd1];\n"
        late, early = f".entry late()\n{wait}{load}", f".entry early()\n{load}{wait}"
        plain = f".entry plain()\n{load}"
        never = f".entry never()\ngriddepcontrol.launch_dependents;\n{load}"
        self.assertEqual(early_loads(late + early + plain + never), {"early": 1, "never": 1})

    def test_no_kernel_has_one(self):
        objects = [Path(argument) for argument in sys.argv[1:]]
        self.assertLessEqual(FOLDERS, {part for path in objects for part in path.parts[-3:-1]})
        for path in objects:
            with self.subTest(path.name):
                ptx = Path(f"{path}.ptx").read_text(encoding="utf-8")
                self.assertIn(".entry", ptx)
                self.assertEqual(early_loads(ptx), {})


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
