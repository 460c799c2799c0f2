"""Check that tests notice small wrong changes to the source: mutants.

    scripts/mutants.py [--list] [--no-clean | --clean] [NAME ...]

scripts/mutants_table.py has the mutants, each with the tests that should fail. The repository is
copied once to a temporary folder. There the named tests first run on the unchanged source, where
all must pass; then, mutant by mutant, on a source with that one change. A mutant is *killed* if a
test fails, and *survives* if all pass, which is a hole in the tests.

Exit code: 0 all mutants are killed; 1 one survives, tests fail on the unchanged source, or the
table does not fit the source; 2 wrong arguments.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from mutants_table import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parent.parent
_PR_SET_CHILD_SUBREAPER = 36
CLEAN_S = 1800.0  # bound of the run on the unchanged source
_FAILED = re.compile(r"^(?:FAILED|ERROR) (tests\w*/.+?)(?: - .*)?$", re.MULTILINE)
# Cached bytecode is told apart by whole seconds and size, so each change has a second of its own.
_SECONDS = count(int(time.time()))


@dataclass(frozen=True)
class Outcome:
    """How a run of tests ended.

    Attributes:
        code: pytest's exit code; None: stopped after the bound.
        first: the first test that failed; "" if none did.
        output: standard output and error.
    """

    code: int | None
    first: str
    output: str
    seconds: float
    cpu_seconds: float


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    known = {mutant.name: mutant for mutant in MUTANTS}
    unknown = [name for name in given.names if name not in known]
    if unknown:
        print(f"unknown mutants: {', '.join(unknown)}; --list prints the names", file=sys.stderr)
        return 2
    chosen = [known[name] for name in given.names] or list(MUTANTS)
    if given.list:
        for mutant in chosen:
            print(f"{mutant.name:32} {mutant.why}")
        return 0
    problems = [problem for mutant in chosen if (problem := misfit(mutant))]
    if problems:
        print(*problems, sep="\n")
        return 1
    # Processes whose parent has ended become children of this one, so that their CPU time counts.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # also ends what runs, and cleans up
    with tempfile.TemporaryDirectory(prefix="gradwire-mutants-") as folder:
        copy = Copy(Path(folder))
        if not given.no_clean and not passes_unchanged(copy, chosen):
            return 1
        return 0 if given.clean else run_all(copy, chosen)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutants to run; by default all")
    parser.add_argument("--list", action="store_true", help="print the mutants, run nothing")
    clean = parser.add_mutually_exclusive_group()
    clean.add_argument("--clean", action="store_true", help="run the unchanged source alone")
    clean.add_argument("--no-clean", action="store_true", help="skip the unchanged source")
    return parser


def misfit(mutant: Mutant) -> str:
    """Why a mutant does not fit the source or the tests; "" if it does."""
    source = ROOT / "src" / mutant.file
    if not source.is_file():
        return f"{mutant.name}: there is no {source}"
    found = source.read_text().count(mutant.before)
    if found != 1:
        return f"{mutant.name}: the text to replace occurs {found} times in {mutant.file}, not once"
    if mutant.before == mutant.after:
        return f"{mutant.name}: changes nothing"
    missing = [test for test in mutant.tests if not _exists(test)]
    return f"{mutant.name}: there is no {', '.join(missing)}" if missing else ""


def _exists(test: str) -> bool:
    file, _, function = test.partition("::")
    return (ROOT / file).is_file() and f"def {function}" in (ROOT / file).read_text()


class Copy:
    """A copy of the working tree, where tests run.

    Args:
        folder: empty; also gets the cache of kernels.
    """

    def __init__(self, folder: Path) -> None:
        self.root = folder / "copy"
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
        for name in filter(None, listed.stdout.split("\0")):
            if (ROOT / name).is_file():
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.root / name)
        kept = {key: v for key, v in os.environ.items() if not key.startswith(("GRADWIRE_", "PYT"))}
        # precedes the editable install of ROOT
        self.environment = kept | {"PYTHONPATH": str(self.root / "src")}
        self.environment["GRADWIRE_CACHE"] = str(folder / "kernels")
        self._check_import()

    def _check_import(self) -> None:
        """Check that the copy is imported, not the installed package."""
        command = [sys.executable, "-c", "import gradwire; print(gradwire.__file__)"]
        done = subprocess.run(
            command, cwd=self.root, env=self.environment, check=True, capture_output=True, text=True
        )
        found = Path(done.stdout.strip())
        assert found.is_relative_to(self.root), f"tests would import {found}"

    @contextmanager
    def changed(self, mutant: Mutant) -> Iterator[None]:
        """Within, the source has the mutant's change."""
        path = self.root / "src" / mutant.file
        original = path.read_text()
        self._write(path, original.replace(mutant.before, mutant.after))
        try:
            yield
        finally:
            self._write(path, original)

    def _write(self, path: Path, text: str) -> None:
        path.write_text(text)
        changed = next(_SECONDS)
        os.utime(path, (changed, changed))

    def run(self, tests: Sequence[str], bound: float, workers: int, stops: bool) -> Outcome:
        """Run tests; `stops`: at the first that fails."""
        command = [sys.executable, "-m", "pytest", "-q", "-rfE", "-p", "no:cacheprovider"]
        command += ["-x"] if stops else []
        command += ["-n", str(workers), "--dist", "loadgroup"] if workers > 1 else []
        command += tests
        begun, used = time.monotonic(), _cpu_seconds()
        with tempfile.TemporaryFile("w+") as output:
            process = subprocess.Popen(
                command, cwd=self.root, env=self.environment, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            code: int | None = None
            try:
                code = process.wait(bound)
            except subprocess.TimeoutExpired:
                pass
            finally:  # also after Ctrl-C, which its own session does not get
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                with suppress(ChildProcessError):  # those that it left behind
                    while True:
                        os.waitpid(-process.pid, 0)
            output.seek(0)
            text = output.read()
        failed = _FAILED.search(text)
        first = failed[1] if failed else ""
        return Outcome(code, first, text, time.monotonic() - begun, _cpu_seconds() - used)


def passes_unchanged(copy: Copy, mutants: Sequence[Mutant]) -> bool:
    """Whether the tests of these mutants pass on the unchanged source; prints the outcome."""
    named = dict.fromkeys(test for mutant in mutants for test in mutant.tests)
    whole = {test for test in named if "::" not in test}
    tests = [test for test in named if test in whole or test.partition("::")[0] not in whole]
    outcome = copy.run(tests, CLEAN_S, workers=2, stops=False)
    passed = outcome.code == 0
    verdict = "passes" if passed else "FAILS"
    print(f"{'unchanged source':32} {verdict} {_spent(outcome)}", flush=True)
    if not passed:
        print(outcome.output[-6000:])
    return passed


def run_all(copy: Copy, mutants: Sequence[Mutant]) -> int:
    """Run the mutants one after the other; prints a line per mutant; returns the exit code."""
    begun, used, bad = time.monotonic(), _cpu_seconds(), []
    for mutant in mutants:
        with copy.changed(mutant):
            outcome = copy.run(mutant.tests, mutant.bound_s, mutant.workers, stops=True)
        verdict = _verdict(mutant, outcome)
        print(f"{mutant.name:32} {verdict} {_spent(outcome)}", flush=True)
        if not verdict.startswith("killed"):
            bad.append(mutant.name)
        if verdict.startswith("BROKEN"):
            print(outcome.output[-3000:], flush=True)
    seconds, cpu = time.monotonic() - begun, _cpu_seconds() - used
    print(
        f"\n{len(mutants)} mutants, {len(mutants) - len(bad)} killed, "
        f"{seconds:.0f} s, {cpu:.0f} s of CPU"
    )
    if bad:
        print(f"not killed: {', '.join(bad)}")
    return 1 if bad else 0


def _verdict(mutant: Mutant, outcome: Outcome) -> str:
    if outcome.code is None:
        return "killed by a hang" if mutant.hangs else f"SURVIVED: hangs after {outcome.first!r}"
    if outcome.code == 0:
        return "SURVIVED"
    # Not an outcome of tests: they were not found, not collected, or not begun.
    if not outcome.first or "::" not in outcome.first:
        return f"BROKEN: pytest ended with {outcome.code}"
    return f"killed by {outcome.first}"


def _spent(outcome: Outcome) -> str:
    return f"({outcome.seconds:.1f} s, {outcome.cpu_seconds:.1f} s of CPU)"


def _cpu_seconds() -> float:
    """Seconds of CPU of all child processes that have ended."""
    times = os.times()
    return times.children_user + times.children_system


if __name__ == "__main__":
    sys.exit(main())
