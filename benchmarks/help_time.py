"""`batchmill --help` and `import batchmill`: the time of the whole command, against a Python that starts and ends."""

from __future__ import annotations

import statistics
import sys

import harness

LIMIT_S, IMPORT_LIMIT_S = 0.3, 0.06


def time_command(*command: object) -> float:
    """Milliseconds of a command."""
    with harness.work_folder() as folder:
        return 1000 * harness.run_whole([str(word) for word in command], log=folder / "log").wall_s


def main() -> None:
    """Run both in turn and print the medians."""
    arguments = harness.parse_arguments(__doc__, pairs=20)
    sides = {
        "batchmill --help": lambda: time_command(harness.BATCHMILL, "--help"),
        "import batchmill": lambda: time_command(sys.executable, "-c", "import batchmill"),
        "python -c pass": lambda: time_command(sys.executable, "-c", "pass"),
    }
    figures = harness.alternate(arguments.pairs, sides)
    for name, values in figures.items():
        harness.print_side(name, values, "ms")
    harness.print_limit("batchmill --help", statistics.median(figures["batchmill --help"]) / 1000, LIMIT_S, "s")
    more = statistics.median(figures["import batchmill"]) - statistics.median(figures["python -c pass"])
    harness.print_limit("import batchmill, beyond Python", more / 1000, IMPORT_LIMIT_S, "s")


if __name__ == "__main__":
    main()
