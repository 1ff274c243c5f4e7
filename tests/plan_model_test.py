"""The model of a layer's time that sonicmoe plan prints, against the records of one H200.

python tests/plan_model_test.py PATH_OF_SONICMOE
"""

import json
import subprocess
import sys
import unittest
from pathlib import Path

COMMAND = ""
RECORDS = Path(__file__).parent.parent / "benchmarks/results/h200"


def plan(*arguments):
    command = [COMMAND, "plan", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def model(*arguments):
    return {m["engine"]: m for m in json.loads(plan(*arguments, "--json"))["model"]}


class Model(unittest.TestCase):
    def test_it_is_within_12_percent_of_the_records(self):
        compared = 0
        for name, engines in (
            ("hot.json", {"hopper": "ours_cpp"}),
            ("portable.json", {"hopper": "hopper", "portable": "portable"}),
        ):
            for row in json.loads((RECORDS / name).read_text())["rows"]:
                if row["T"] < 16384:
                    continue
                shape = ",".join(str(row[size]) for size in ("T", "d", "n", "E", "K"))
                layer = model("--shape", shape, "--device", "h200")
                for engine, column in engines.items():
                    for short, us in (("fwd", "forward_us"), ("bwd", "backward_us")):
                        measured = 1e3 * row[column][f"{short}_ms"]
                        off = measured / layer[engine][us] - 1
                        self.assertLess(abs(off), 0.12, (row["config"], engine, short))
                        compared += 1
        self.assertGreaterEqual(compared, 100)

    def test_it_is_a_model_and_says_so(self):
        b200 = model("--config", "olmoe", "--device", "b200")
        self.assertEqual(list(b200), ["portable", "blackwell"])
        portable, blackwell = b200["portable"], b200["blackwell"]
        self.assertLess(blackwell["forward_us"], portable["forward_us"] / 2)
        self.assertLess(blackwell["backward_us"], portable["backward_us"] / 2)
        text = plan("--config", "olmoe", "--device", "b200")
        self.assertIn("not a measurement; no such card has run this library", text)
        self.assertIn("only if it is asked for by name", text)
        self.assertIn(
            "fitted to the records of one H200", plan("--config", "olmoe", "--device", "h200")
        )
        self.assertEqual(model("--config", "olmoe", "--device", "a100"), {})

    def test_fp8_is_a_model_of_one_engine(self):
        fp8 = ("--config", "qwen3-30b", "--precision", "fp8", "--device")
        self.assertEqual(model(*fp8, "h200"), {})
        coded = model(*fp8, "b200")
        self.assertEqual(list(coded), ["blackwell"])
        self.assertIn("not a measurement; no such card has run this library", plan(*fp8, "b200"))
        coded = coded["blackwell"]
        bf16 = model("--config", "qwen3-30b", "--device", "b200")["blackwell"]
        for us in ("forward_us", "backward_us"):
            # Of the products only A, Y, dH and dX~ are faster, at most by their rates' ratio.
            self.assertLess(coded[us], bf16[us])
            self.assertGreater(coded[us], bf16[us] * 1350 / 1950)

    def test_the_engine_by_its_name(self):
        arguments = ("--config", "olmoe", "--device", "b200", "--engine", "blackwell", "--json")
        engine = json.loads(plan(*arguments))["engine"]
        self.assertEqual((engine["instructions"], engine["evidence"]), ("tcgen05", "estimated"))
        self.assertIn("no GPU has run it", engine["note"])


if __name__ == "__main__":
    COMMAND = sys.argv.pop(1)
    unittest.main()
