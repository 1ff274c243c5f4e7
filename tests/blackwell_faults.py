"""The probe of the engine blackwell notices faults of its kernels: a product that differs, and one
that never ends, which must be stopped.

usage: blackwell_faults.py SONICMOE_EMULATED_TESTS
"""

import os
import re
import subprocess
import sys
import unittest
from pathlib import Path

STORE = "9blackwell12pair_productINS1_12RowProductOfINS1_5StoreI13__nv_bfloat16"
CODES = "9blackwell12pair_productINS1_14CodesProductOfINS1_"
CODES_ACTIVATE, CODES_ACTIVATE_GRAD = CODES + "13CodesActivateE", CODES + "17CodesActivateGradE"
TEST = "BlackwellProbe.DecidesWhichEngineServes"


def lines_of(data, kernel):
    """The lines of a kernel in the PTX of a program, with their numbers as the emulator counts."""
    entry = f".entry _ZN8sonicmoe4cuda{kernel}".encode()
    at = data.index(entry)
    module = data.rindex(b"\0", 0, at) + 1
    end = min(i for i in (data.find(b"\0", at), data.find(b".entry", at + 1)) if i != -1)
    first = data.count(b"\n", module, at) + 1
    return list(enumerate(data[at:end].decode().split("\n"), first))


class Faults(unittest.TestCase):
    program = None

    def outcome(self, expected, **environment):
        settings = {"SONICMOE_EMULATED_CAPABILITY": "10.0", **environment}
        if expected is not None:
            settings["SONICMOE_EXPECTED_NOTE"] = expected
        run = subprocess.run(
            [self.program, f"--gtest_filter={TEST}"],
            env=os.environ | settings,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        self.assertIn("[  PASSED  ] 1 test", run.stdout, run.stdout + run.stderr)
        return re.search("^note: (.*)$", run.stdout, re.M).group(1)

    def spot(self, opcode, which, kernel=STORE):
        lines = lines_of(Path(self.program).read_bytes(), kernel)
        numbers = [n for n, line in lines if re.match(rf"\s*{re.escape(opcode)}", line)]
        return f"{kernel}:{numbers[which]}"

    def test_without_a_fault_the_engine_serves(self):
        for capability in ("10.0", "10.3"):
            self.assertEqual(self.outcome(None, SONICMOE_EMULATED_CAPABILITY=capability), "")

    def test_a_product_that_differs(self):
        note = self.outcome("wrong", SONICMOE_EMULATED_WITHOUT=self.spot("tcgen05.mma", -1))
        self.assertRegex(
            note,
            r"^the engine blackwell does not serve device 0: its product of 256 rows in order was "
            r"wrong in \d+ of \d+ elements, so the engine portable serves it\.$",
        )

    def test_a_product_that_never_ends(self):
        note = self.outcome(
            "did not end", SONICMOE_EMULATED_WITHOUT=self.spot("cp.async.bulk.tensor.2d", 0)
        )
        self.assertIn("its product of 256 rows in order did not end within 5 seconds", note)

    # The whole engine is refused, in 16 bits too.
    def test_a_product_of_codes_that_differs(self):
        without = self.spot("tcgen05.mma", -1, CODES_ACTIVATE)
        note = self.outcome("wrong", SONICMOE_EMULATED_WITHOUT=without)
        self.assertIn("its product of A from codes, with a gate was wrong in", note)

    def test_a_product_of_codes_that_never_ends(self):
        without = self.spot("cp.async.bulk.tensor.2d", 0, CODES_ACTIVATE_GRAD)
        note = self.outcome("did not end", SONICMOE_EMULATED_WITHOUT=without)
        product = "its product of dH from codes, of H in codes"
        self.assertIn(f"{product} did not end within 5 seconds", note)


if __name__ == "__main__":
    Faults.program = sys.argv.pop(1)
    unittest.main()
