"""``python -m tests.faults``: let faults loose and print what came of them."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from pathlib import Path

from tests.faults.faults import FAULTS
from tests.faults.laboratory import Result
from tests.faults.run import places, run, select
from tests.faults.table import markdown, plain


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # and so everything is cleaned up
    arguments = _arguments()
    names = ["sqlite", "postgresql"] if arguments.database == "both" else [arguments.database]
    deadline = time.monotonic() + arguments.seconds
    results: list[Result] = []
    skipped = 0
    with places(names) as found:
        for fault in select(arguments.fault):
            for name in (name for name in names if name in fault.databases):
                left = deadline - time.monotonic()
                if left <= 0:
                    skipped += 1
                    continue
                home = arguments.keep and Path(arguments.keep) / f"{fault.name}-{name}"
                result = run(
                    fault,
                    found[name],
                    events=arguments.events,
                    seed=arguments.seed,
                    seconds=left,
                    directory=home or None,
                )
                results.append(result)
                _say(plain([result], head=len(results) == 1))
    if arguments.markdown:
        Path(arguments.markdown).write_text(markdown(results), encoding="utf-8")
    if skipped:
        _say(f"{skipped} not run: the {arguments.seconds:g} s were over")
    return 1 if skipped or any(result.problems for result in results) else 0


def _say(words: str) -> None:
    sys.stdout.write(f"{words}\n")
    sys.stdout.flush()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--database", choices=("sqlite", "postgresql", "both"), default="both")
    parser.add_argument("--events", type=int, default=0, help="how many events, as a measure")
    parser.add_argument("--seconds", type=float, default=1800.0, help="begin no further fault after so long")
    parser.add_argument("--seed", type=int, default=1, help="of everything that is random")
    parser.add_argument(
        "--fault", action="append", default=[], choices=sorted(FAULTS), help="only this; may be repeated"
    )
    parser.add_argument("--markdown", metavar="FILE", help="also write the table there")
    parser.add_argument("--keep", metavar="DIRECTORY", help="leave databases and logs there")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
