"""Which architectures a build compiles kernels for by default (cmake/architectures.cmake), and
whether it has the CUDA backend (cmake/cuda.cmake).

usage: architectures_test.py CMAKE SOURCE_DIRECTORY
"""

import os
import shutil
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

    def test_all_for_a_gpu_that_none_serves(self):
        for nvidia_smi in ("echo 11.0", "echo 7.5"):
            with self.subTest(nvidia_smi):
                self.assertEqual(architectures(nvidia_smi), EVERY)

    def test_none_without_a_gpu(self):
        for nvidia_smi in (None, "echo no devices; exit 9", "exit 0"):
            with self.subTest(nvidia_smi):
                self.assertEqual(architectures(nvidia_smi), "")


def backend(*options):
    """What a configuration says of the CUDA backend on a machine without a GPU."""
    cmake, root = sys.argv[1:3]
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "nvidia-smi"
        program.write_text("#!/bin/sh\nexit 9\n")
        program.chmod(0o755)
        parts = ("TESTS", "CLI", "TORCH")
        command = [cmake, "-S", root, "-B", f"{folder}/build", *options]
        command += [f"-DSONICMOE_BUILD_{part}=OFF" for part in parts]
        environment = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        (line,) = (line for line in done.stdout.splitlines() if "CUDA backend: " in line)
        return line.split("CUDA backend: ")[1]


class CudaBackend(unittest.TestCase):
    def test_is_not_built_for_nobody(self):
        said = backend()
        self.assertEqual(
            said, "not built, nvidia-smi shows no GPU (SONICMOE_CUDA=ON builds all kernels)"
        )
        self.assertEqual(backend("-DSONICMOE_CUDA=OFF"), "not built, SONICMOE_CUDA is OFF")

    def test_is_built_on_request(self):
        if shutil.which(os.environ.get("CUDACXX", "nvcc")) is None:
            self.skipTest("no nvcc")
        for option in ("-DSONICMOE_CUDA=ON", "-DSONICMOE_CUDA_ARCHITECTURES=all"):
            with self.subTest(option):
                self.assertRegex(backend(option), "^built, nvcc .* sm_80 sm_90 sm_100 sm_120 ")


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
