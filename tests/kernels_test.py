"""The kernel budget can fail, and reads what a build leaves."""

import json
import os
import sys
import tempfile
import unittest
import unittest.mock
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))
import check_kernels

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "cmake"))
import ptxas_gate


class BudgetTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.build = Path(folder.name)

    def verdict(self, *costs, folder="cuda/hopper/instances"):
        (self.build / folder).mkdir(parents=True)
        for i, (kernels, seconds) in enumerate(costs):
            if isinstance(kernels, int):
                kernels = {"sm_90a": kernels} if kernels else {}
            cost = {"kernels": kernels, "cpu_seconds": seconds}
            path = self.build / folder / f"{i}.cu.o"
            Path(f"{path}.cost").write_text(json.dumps(cost))
            # Any ELF file will do: it holds no kernels.
            path.symlink_to(os.path.realpath(sys.executable))
        return check_kernels.main([str(self.build)])

    def test_within_the_budget(self):
        self.assertEqual(self.verdict((0, 5.0), (100, 100.0), (65, 200.0)), 0)

    def test_too_many_kernels_of_an_engine(self):
        most = check_kernels.BUDGETS["hopper"].kernels
        self.assertEqual(self.verdict((100, 0.0), (most - 99, 0.0)), 1)

    def test_every_architecture_may_have_them(self):
        most = check_kernels.BUDGETS["portable"].kernels
        many = {"sm_80": most, "sm_120": most}
        folder = "objects.dir/src/cuda/portable"
        self.assertEqual(self.verdict((many, 0.0), folder=folder), 0)
        more = {"sm_80": 0, "sm_120": 1}
        self.assertEqual(self.verdict((more, 0.0), folder=f"{folder}/instances"), 1)

    def test_kernels_beside_the_engines_count(self):
        most = check_kernels.BUDGETS[check_kernels.REST].kernels
        self.assertEqual(self.verdict((most, 0.0), folder="src/cuda/routing"), 0)
        self.assertEqual(self.verdict((1, 0.0), folder="src/cuda/sums"), 1)

    def test_an_engine_needs_a_budget(self):
        self.assertEqual(self.verdict((1, 0.0), folder="cuda/abacus/instances"), 1)

    def test_too_long_to_compile(self):
        half = 30.0 * check_kernels.CPU_MINUTES
        self.assertEqual(self.verdict((1, half), (1, half)), 0)
        self.assertEqual(self.verdict((1, 1.0), folder="cuda/portable"), 1)

    def test_too_large(self):
        tiny = {"hopper": check_kernels.Budget(1, -1)}
        with unittest.mock.patch.object(check_kernels, "BUDGETS", tiny):
            self.assertEqual(self.verdict((1, 0.5)), 1)

    def test_a_file_of_an_older_build_is_named(self):
        folder = self.build / "cuda/hopper"
        folder.mkdir(parents=True)
        (folder / "old.cu.o.cost").write_text(json.dumps({"kernels": 14, "cpu_seconds": 1.0}))
        with self.assertRaisesRegex(SystemExit, r"old\.cu\.o\.cost .* older version"):
            check_kernels.main([str(self.build)])

    def test_nothing_was_compiled(self):
        with self.assertRaises(SystemExit):
            self.verdict()

    def test_sections(self):
        program = Path(os.path.realpath(sys.executable))
        self.assertGreater(check_kernels.section_bytes(program, ".text"), 0)
        self.assertEqual(check_kernels.section_bytes(program, ".nv_fatbin"), 0)


class GateTest(unittest.TestCase):
    LINES = (
        "ptxas info    : Compiling entry function '_Zone' for 'sm_80'",
        "ptxas info    : Function properties for _Zone",
        "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads",
        "ptxas info    : Compiling entry function '_Zone' for 'sm_120'",
        "ptxas info    : Function properties for _Zone",
        "    8 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads",
    )

    def test_kernels_are_counted_by_architecture(self):
        self.assertEqual(ptxas_gate.kernels_of(self.LINES), {"sm_80": 1, "sm_120": 1})

    def test_a_spill_names_its_architecture(self):
        (fault,) = ptxas_gate.verdict(self.LINES)
        self.assertIn("4 bytes spill stores", fault)
        self.assertIn("_Zone for sm_120", fault)

    def test_ptx_comes_beside_the_object(self):
        """A stand-in for nvcc keeps its PTX under the names that nvcc gives it."""
        keep = 'for folder; do :; done; for name in $NAMES; do echo $name >"$folder/a.$name"; done'
        cases = {
            "ptx": (["90a"], "ptx\n"),
            "compute_90.ptx compute_80.ptx": (["90"], "compute_90.ptx\n"),
            "compute_120.ptx compute_80.ptx": (
                ["80", "120"],
                "compute_80.ptx\n\0compute_120.ptx\n",
            ),
        }
        for names, (architectures, expected) in cases.items():
            with self.subTest(names), tempfile.TemporaryDirectory() as folder:
                nvcc = ["sh", "-c", keep.replace("$NAMES", names), "nvcc", "-o", f"{folder}/a.cu.o"]
                self.assertEqual(ptxas_gate.run_with_ptx(nvcc, architectures).returncode, 0)
                self.assertEqual([p.name for p in Path(folder).iterdir()], ["a.cu.o.ptx"])
                self.assertEqual(Path(folder, "a.cu.o.ptx").read_text(), expected)

    def test_ptx_comes_beside_the_object_with_ccache(self):
        """A stand-in for ccache writes its arguments to the file that they name behind -o."""
        with tempfile.TemporaryDirectory() as folder:
            ccache = Path(folder, "ccache")
            ccache.write_text('#!/bin/sh\nfor last; do :; done; echo "$@" >"$last"\n')
            ccache.chmod(0o755)
            command = [str(ccache), "nvcc", "-c", "a.cu", "-o", f"{folder}/a.cu.o"]
            with unittest.mock.patch.dict(os.environ):
                os.environ.pop("CCACHE_DISABLE", None)
                self.assertEqual(ptxas_gate.run_with_ptx(command, ["80", "120"]).returncode, 0)
            texts = Path(folder, "a.cu.o.ptx").read_text().split("\0")
            made_for = [word for text in texts for word in text.split() if word.startswith("-arch")]
            self.assertEqual(made_for, ["-arch=compute_80", "-arch=compute_120"])
            self.assertTrue(Path(folder, "a.cu.o").exists())

    def test_a_disabled_ccache_runs_the_compiler_once(self):
        with tempfile.TemporaryDirectory() as folder:
            ccache = Path(folder, "ccache")
            ccache.write_text('#!/bin/sh\nfor folder; do :; done; echo "$@" >"$folder/a.ptx"\n')
            ccache.chmod(0o755)
            command = [str(ccache), "nvcc", "-c", "a.cu", "-o", f"{folder}/a.cu.o"]
            with unittest.mock.patch.dict(os.environ, CCACHE_DISABLE="1"):
                self.assertEqual(ptxas_gate.run_with_ptx(command, ["90a"]).returncode, 0)
            self.assertIn("a.cu.o --keep", Path(folder, "a.cu.o.ptx").read_text())

    def test_with_ccache_ptx_is_made_alone(self):
        options = "-O3 -gencode=arch=compute_80,code=sm_80 -Xptxas=-v -MD -MT a.o -MF a.d"
        command = f"ccache nvcc {options} -c a.cu -o a.o".split()
        made = ptxas_gate.ptx_command(command, "90", "a.o.ptx")
        self.assertEqual(" ".join(made), "ccache nvcc -O3 -ptx a.cu -arch=compute_90 -o a.o.ptx")


if __name__ == "__main__":
    unittest.main()
