"""A plugin of pytest that writes a row per failed test and a row of counts: -p experiments.common.pytest_rows."""

import pathlib
from collections import Counter

from experiments.common.output import append_row


def pytest_addoption(parser):
    """Adds the option of the file."""
    parser.addoption("--results", help="file of JSON lines for the rows")


def pytest_configure(config):
    """Registers the writer in the process that collects the reports."""
    if config.getoption("--results") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Writer(pathlib.Path(config.getoption("--results"))))


class _Writer:
    """Writes the rows of a run."""

    def __init__(self, path: pathlib.Path):
        self.path, self.counts, self.seconds = path, Counter[str](), 0.0

    def pytest_runtest_logreport(self, report):
        """Counts a test's outcome and writes a row if it failed."""
        self.seconds += report.duration
        if report.when == "call" or report.outcome != "passed":
            self.counts[report.outcome] += 1
        if report.outcome == "failed":
            problem = str(getattr(report.longrepr, "reprcrash", report.longrepr))[-600:]
            append_row(self.path, {"measure": "test", "test": report.nodeid, "problem": problem})

    def pytest_sessionfinish(self, exitstatus):
        """Writes the counts."""
        append_row(self.path, {"measure": "tests", **self.counts, "seconds": self.seconds, "exit": int(exitstatus)})
