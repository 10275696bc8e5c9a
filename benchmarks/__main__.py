"""``python -m benchmarks``: measure, print one table, and write JSON and plots where asked."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks import harness, plots
from benchmarks.databases import Databases, PostgreSQL, Sqlite
from benchmarks.harness import Bench, Scenario
from benchmarks.peers.scenario import PEERS
from benchmarks.scenarios import SCENARIOS


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--list", action="store_true", help="name the scenarios and stop")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these scenarios only")
    parser.add_argument("--database", choices=("sqlite", "postgresql", "both"), default="both")
    parser.add_argument("--postgres-url", metavar="URL", help="a server to use; by default one of our own, fsync on")
    parser.add_argument("--quick", action="store_true", help="smaller sizes and fewer rounds: a look, not a result")
    parser.add_argument("--peers", action="store_true", help="also the peers (dependency group `bench`)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="draw PNGs")
    parser.add_argument("--from-json", type=Path, metavar="FILE", help="measure nothing: print and draw what was saved")
    return parser


def _chosen(only: Sequence[str] | None, *, peers: bool) -> list[Scenario]:
    known = {scenario.name: scenario for scenario in (*SCENARIOS, PEERS)}
    if only is None:
        return [*SCENARIOS, *([PEERS] if peers else [])]
    unknown = set(only) - known.keys()
    if unknown:
        raise SystemExit(f"no such scenario: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    return [known[name] for name in only]


@contextmanager
def _databases(name: str, postgres_url: str | None) -> Iterator[Databases]:
    with Sqlite() if name == "sqlite" else PostgreSQL(postgres_url) as databases:
        yield databases


def main(arguments: Sequence[str] | None = None) -> None:
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(given)
    if options.list:
        for scenario in (*SCENARIOS, PEERS):
            print(f"{scenario.name:14}{scenario.about} ({', '.join(scenario.databases)})")
        return
    if options.from_json is not None:
        _show_saved(options.from_json, options.plots)
        return
    logging.getLogger("outbox").setLevel(logging.ERROR)
    bench = Bench(quick=options.quick)
    try:
        _measure(bench, options)
    finally:
        harness.show(bench)
        if options.json is not None:
            harness.save(bench, options.json, given)
        if options.plots is not None:
            plots.draw(bench.lines, options.plots)


def _measure(bench: Bench, options: argparse.Namespace) -> None:
    scenarios = _chosen(options.only, peers=options.peers)
    names = ("sqlite", "postgresql") if options.database == "both" else (options.database,)
    for name in names:
        with _databases(name, options.postgres_url) as databases:
            for scenario in scenarios:
                if name in scenario.databases:
                    with bench.running(scenario.name, databases):
                        scenario.run(bench, databases)


def _show_saved(path: Path, directory: Path | None) -> None:
    report, lines = harness.load(path)
    print(harness.markdown(lines))
    print(f"{report['command']}; {report['machine']}")
    for each in report["not_measured"]:
        print(f"not measured: {each}")
    if directory is not None:
        plots.draw(lines, directory)


if __name__ == "__main__":
    main()
