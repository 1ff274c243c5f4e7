"""The sanitizer runs can fail: a stand-in for compute-sanitizer reports what each test wants."""

import contextlib
import fnmatch
import io
import json
import os
import re
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))
import sanitize_gpu

PASSED = "[  PASSED  ] 1 test."
CLEAN = "========= ERROR SUMMARY: 0 errors"


def is_running(process):
    try:
        state = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


class SanitizeTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.tests = self.folder / "tests"
        self.tests.touch()
        self.record = self.folder / "record.json"
        self.program("nvidia-smi", "echo 'NVIDIA H200, 570.1'")
        path = mock.patch.dict(os.environ, PATH=f"{self.folder}:{os.environ['PATH']}")
        path.start()
        self.addCleanup(path.stop)

    def program(self, name, body):
        file = self.folder / name
        file.write_text(f"#!/bin/sh\n{body}\n")
        file.chmod(0o755)

    def verdict(self, body, *options):
        """The exit status where compute-sanitizer runs `body`."""
        self.program("compute-sanitizer", body)
        arguments = ["--tests", str(self.tests), "--out", str(self.record), *options]
        with contextlib.redirect_stdout(io.StringIO()) as output:
            status = sanitize_gpu.main(arguments)
        self.output = output.getvalue()
        return status

    def rows(self):
        return json.loads(self.record.read_text())["rows"]

    def test_racecheck_runs_the_portable_engine_only_in_a_build_for_it(self):
        body = f"echo '{PASSED}'; echo '{CLEAN}'"
        self.assertEqual(self.verdict(body, "--engines", "portable"), 0)
        self.assertNotIn("racecheck", {row["tool"] for row in self.rows()})
        self.assertEqual(self.verdict(body, "--tools", "racecheck"), 0)
        self.assertTrue(any(row["tool"] == "racecheck" for row in self.rows()))
        for row in self.rows():
            if row["tool"] == "racecheck":
                self.assertNotIn("/portable", row["tests"])

    def test_refuses_to_run_nothing(self):
        errors = io.StringIO()
        options = ("--engines", "portable", "--tools", "racecheck")
        with contextlib.redirect_stderr(errors), self.assertRaises(SystemExit) as stop:
            self.verdict("exit 0", *options)
        self.assertEqual(stop.exception.code, 2)
        self.assertIn("needs --racecheck-tests", errors.getvalue())

    def test_racecheck_uses_its_own_program(self):
        own = self.folder / "racecheck_tests"
        own.write_text("built for racecheck")
        body = f"""case "$*" in
*racecheck*{own}*) ;;
*racecheck*|*{own}*) exit 1;;
esac
echo '{PASSED}'; echo '{CLEAN}'"""
        self.assertEqual(self.verdict(body, "--racecheck-tests", str(own)), 0)
        self.assertTrue(
            any(row["tool"] == "racecheck" and "/portable" in row["tests"] for row in self.rows())
        )

    def test_clean(self):
        self.assertEqual(self.verdict(f"echo '{PASSED}'; echo '{CLEAN}'"), 0)
        # Seven groups on two engines and three without, by three tools; seven on Hopper and one
        # without an engine by racecheck.
        self.assertEqual(len(self.rows()), 3 * (2 * 7 + 4) + 7 + 2)
        self.assertTrue(all(row["findings"] == 0 and row["passed"] == 1 for row in self.rows()))

    def test_racecheck_has_a_summary_of_its_own(self):
        summary = "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"
        self.assertEqual(self.verdict(f"echo '{PASSED}'; echo '{summary}'"), 0)

    def test_findings(self):
        body = f"echo '{PASSED}'; echo '========= ERROR SUMMARY: 3 errors'; exit 86"
        self.assertEqual(self.verdict(body, "--tools", "memcheck"), 1)
        self.assertEqual(self.rows()[0]["findings"], 3)
        self.assertIn("FINDINGS", self.output)

    def test_groups_name_tests_that_exist(self):
        folder = Path(__file__).resolve().parent / "cuda"
        text = "".join(file.read_text() for file in sorted(folder.glob("*.cc")))
        existing = [
            ".".join(names) for names in re.findall(r"TEST(?:_[FP])?\((\w+), (\w+)\)", text)
        ]
        for group in sanitize_gpu.GROUPS:
            for part in re.split("[:-]", group.tests):
                name = part.removeprefix("Each/").removesuffix("/{engine}")
                self.assertTrue(fnmatch.filter(existing, name), part)

    def test_expert_parallelism_runs_by_every_tool(self):
        self.assertEqual(self.verdict(f"echo '{PASSED}'; echo '{CLEAN}'"), 0)
        tools = {row["tool"] for row in self.rows() if "ExchangeHarness." in row["tests"]}
        self.assertEqual(tools, set(sanitize_gpu.TOOLS))

    def test_one_engine(self):
        body = f"echo '{PASSED}'; echo '{CLEAN}'"
        self.assertEqual(self.verdict(body, "--engines", "portable", "--jobs", "3"), 0)
        harness = {row["tests"] for row in self.rows() if row["tests"].startswith("Each/")}
        self.assertEqual(harness, {"Each/Cuda.PassesTheHarness/portable"})

    def test_only_clean_runs_of_the_same_program_are_kept(self):
        counted = f"echo run >> {self.folder}/count; echo '{PASSED}'; echo '{CLEAN}'"
        dirty_first = f"[ $SONICMOE_FILTER = layout ] && exit 86; {counted}"
        count = self.folder / "count"
        groups = len(sanitize_gpu.GROUPS)
        for body, program, status, run in (
            (dirty_first, "a", 1, groups - 1),
            (counted, "a", 0, 1),  # what was not clean
            (counted, "b", 0, groups),  # rebuilt, the commit is the same
        ):
            count.write_text("")
            self.tests.write_text(program)
            skip_version = f'[ "$1" = --version ] && exit; {body}'
            options = ("--tools", "synccheck", "--engines", "hopper")
            self.assertEqual(self.verdict(skip_version, *options), status)
            self.assertEqual(count.read_text().count("run"), run)
            self.assertEqual(len(self.rows()), groups)

    def test_refuses_no_jobs(self):
        errors = io.StringIO()
        with contextlib.redirect_stderr(errors), self.assertRaises(SystemExit):
            self.verdict("exit 0", "--jobs", "0")
        self.assertIn("jobs is 0, must be at least 1", errors.getvalue())

    def test_findings_without_an_exit_status(self):
        for summary in ("ERROR SUMMARY: 1 error", "RACECHECK SUMMARY: 2 hazards displayed"):
            body = f"echo '{PASSED}'; echo '========= {summary}'"
            self.assertEqual(self.verdict(body, "--tools", "memcheck"), 1)

    def test_an_exit_status_without_findings(self):
        body = f"echo '{PASSED}'; echo '{CLEAN}'; exit 1"
        self.assertEqual(self.verdict(body, "--tools", "memcheck"), 1)

    def test_one_group_with_findings(self):
        body = (
            f"echo '{PASSED}'; "
            'if [ "$SONICMOE_FILTER" = round ]; then echo "ERROR SUMMARY: 1 error"; '
            f"else echo '{CLEAN}'; fi"
        )
        self.assertEqual(self.verdict(body, "--tools", "initcheck", "--engines", "hopper"), 1)
        dirty = [row["cases"] for row in self.rows() if row["findings"] != 0]
        self.assertEqual(dirty, ["round"])

    def test_no_test_passed(self):
        for line in ("[  PASSED  ] 0 tests.", "no tests"):
            body = f"echo '{line}'; echo '{CLEAN}'"
            self.assertEqual(self.verdict(body, "--tools", "memcheck"), 1)

    def test_no_summary(self):
        self.assertEqual(self.verdict(f"echo '{PASSED}'", "--tools", "memcheck"), 1)
        self.assertIsNone(self.rows()[0]["findings"])

    def test_a_hang(self):
        """The program that compute-sanitizer started must end too."""
        child = self.folder / "child"
        body = (
            f"echo '{PASSED}'; echo '{CLEAN}'; "
            f'if [ "$1" != --version ]; then sleep 60 & echo $! > {child}; wait; fi'
        )
        with mock.patch.object(sanitize_gpu, "GROUPS", sanitize_gpu.GROUPS[:1]):
            status = self.verdict(body, "--tools", "synccheck", "--limit", "3")
        self.assertEqual(status, 1)
        self.assertEqual(self.rows()[0]["status"], 124)
        self.assertFalse(is_running(int(child.read_text())))

    def test_refuses_without_its_programs(self):
        self.tests.unlink()
        self.refused("compute-sanitizer is there", "does not exist")
        with mock.patch.object(sanitize_gpu.shutil, "which", return_value=None):
            self.refused("compute-sanitizer is missing", "not on PATH")

    def refused(self, state, sentence):
        errors = io.StringIO()
        with self.subTest(state), contextlib.redirect_stderr(errors):
            with self.assertRaises(SystemExit) as refusal:
                self.verdict("exit 0")
            self.assertEqual(refusal.exception.code, 2)
            self.assertIn(sentence, errors.getvalue())


if __name__ == "__main__":
    unittest.main()
