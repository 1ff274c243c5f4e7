"""Which architectures a build compiles kernels for without a choice (cmake/architectures.cmake).

usage: architectures_test.py CMAKE SOURCE_DIRECTORY
"""

import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

EVERY = "80;90;100;120"


def architectures(nvidia_smi):
    """The list on a machine whose nvidia-smi is this shell script; None: it has none."""
    cmake, root = sys.argv[1], Path(sys.argv[2])
    with tempfile.TemporaryDirectory() as folder:
        if nvidia_smi is not None:
            program = Path(folder) / "nvidia-smi"
            program.write_text(f"#!/bin/sh\n{nvidia_smi}\n")
            program.chmod(0o755)
        script = Path(folder) / "print.cmake"
        script.write_text(
            "cmake_minimum_required(VERSION 3.24)\n"
            f'include("{root}/cmake/architectures.cmake")\n'
            "sonicmoe_architectures_here(found)\n"
            'message("${found}")\n'
        )
        done = subprocess.run(
            [cmake, "-P", str(script)],
            env=os.environ | {"PATH": folder},
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stderr.strip()


class Architectures(unittest.TestCase):
    def test_those_of_the_gpus(self):
        for capabilities, expected in (
            ("9.0", "90"),
            ("8.9", "80"),
            ("12.0\\n8.6\\n12.0", "80;120"),
            ("10.3", "100"),
        ):
            with self.subTest(capabilities):
                self.assertEqual(architectures(f"printf '{capabilities}\\n'"), expected)

    def test_every_one_without_a_gpu_that_they_serve(self):
        for nvidia_smi in (None, "echo no devices; exit 9", "exit 0", "echo 11.0", "echo 7.5"):
            with self.subTest(nvidia_smi):
                self.assertEqual(architectures(nvidia_smi), EVERY)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
