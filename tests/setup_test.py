"""tools/setup.sh in a copy of its own, without a network: packages come from wheels made here.

python tests/setup_test.py
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "python/support"))

from days import is_turn

ROOT = Path(__file__).resolve().parent.parent
ANOTHER_DAY = "SONICMOE_DAY: another day's turn"
PINS = {
    "requirements.txt": "ninja==1.13.2",
    "requirements-dev.txt": "ruff==0.14.5",
    "requirements-no-deps.txt": "torchtitan==0.3.0",
}
TRITON = re.search(r"TRITON_VERSION=(.*)", (ROOT / "tools/setup.sh").read_text())[1]


def metadata(name, version, needs=()):
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    return "".join(f"{line}\n" for line in (*lines, *(f"Requires-Dist: {n}" for n in needs)))


def write_wheel(folder, name, version, needs=()):
    """A wheel whose command prints its version, as those of ninja and cmake."""
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": f"def main():\n    print({version!r})\n",
        f"{info}/METADATA": metadata(name, version, needs),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[console_scripts]\n{name} = {name}:main\n",
    }
    record = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in {**files, f"{info}/RECORD": record}.items():
            wheel.writestr(path, text)


def add_package(site, name, version):
    """What an installed package leaves beside its commands."""
    (site / f"{name}.py").write_text("")
    info = site / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(metadata(name, version))


class SetupTest(unittest.TestCase):
    def setUp(self):
        self.work = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.work)
        self.project = self.work / "project"
        wheels = self.work / "wheels"
        for folder in (self.project / "tools", wheels, self.work / "bin"):
            folder.mkdir(parents=True)
        shutil.copy(ROOT / "tools/setup.sh", self.project / "tools")
        for name, line in PINS.items():
            (self.project / "tools" / name).write_text(f"{line}\n")
        write_wheel(wheels, "ninja", "1.13.2")
        write_wheel(wheels, "ruff", "0.14.5")
        write_wheel(wheels, "torchtitan", "0.3.0", needs=["a-package-that-no-index-has"])
        write_wheel(wheels, "triton", TRITON)
        # A test installs nothing on the machine that it runs on.
        stub = self.work / "bin/apt-get"
        stub.write_text("#!/bin/sh\nexit 1\n")
        stub.chmod(0o755)
        self.environment = {
            **os.environ,
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(wheels),
            "PIP_CONFIG_FILE": os.devnull,
        }
        for name in ("PYTHON", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"):
            self.environment.pop(name, None)

    def other_environment(self):
        """An environment with torch and the pinned ninja, which has lost its commands."""
        other = self.work / "other"
        base = Path(sys.base_prefix) / "bin/python3"
        create = [base if base.exists() else sys.executable, "-m", "venv", "--without-pip", other]
        subprocess.run(create, check=True)
        (site,) = other.glob("lib/python3*/site-packages")
        add_package(site, "torch", "2.13.0")
        add_package(site, "ninja", "1.13.2")
        return other

    def set_up_beside(self, other, *goal, reused=True):
        """Runs setup.sh where this environment's Python comes first."""
        path = f"{self.work / 'bin'}:{other / 'bin'}:{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", "tools/setup.sh", *goal],
            cwd=self.project,
            env={**self.environment, "PATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual("using the installed torch 2.13.0" in done.stdout, reused)
        return self.project / ".venv/bin"

    def test_commands_come_into_the_environment_beside_reused_packages(self):
        other = self.other_environment()
        commands = self.set_up_beside(other)
        for name, version in (pin.split("==") for pin in (*PINS.values(), f"triton=={TRITON}")):
            self.assertTrue((commands / name).exists(), name)
            said = subprocess.run([commands / name], capture_output=True, text=True, check=True)
            self.assertEqual(said.stdout.strip(), version)
        where = "import torch; print(torch.__file__)"
        said = subprocess.run([commands / "python", "-c", where], capture_output=True, text=True)
        self.assertTrue(said.stdout.startswith(str(other)), said)

    @unittest.skipUnless(is_turn(0, of=2), ANOTHER_DAY)
    def test_the_demo_installs_no_packages_of_tests(self):
        other = self.other_environment()
        commands = self.set_up_beside(other, "demo")
        self.assertTrue((commands / "ninja").exists())
        self.assertFalse((commands / "ruff").exists())
        self.set_up_beside(other, reused=False)  # adds to the same environment
        self.assertTrue((commands / "ruff").exists())
        (commands / "ninja").unlink()
        self.set_up_beside(other, reused=False)  # does nothing
        self.assertFalse((commands / "ninja").exists())

    @unittest.skipUnless(is_turn(1, of=2), ANOTHER_DAY)
    def test_the_triton_of_a_torch_for_cuda_stays(self):
        other = self.other_environment()
        (site,) = other.glob("lib/python3*/site-packages")
        add_package(site, "triton", "3.6.0")
        commands = self.set_up_beside(other)
        self.assertTrue((commands / "torchtitan").exists())
        self.assertFalse((commands / "triton").exists())


if __name__ == "__main__":
    unittest.main()
