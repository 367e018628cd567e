"""Benchmark ways of drafting against plain decoding on one engine, by the Spec-Bench protocol (Xia et al. 2024, arXiv 2401.07851).

    questions ──> prompts of all turns (plain decoding answers the turns between, once)
    each temperature: warm-up ──> `repeats` timed runs, one question at a time by each method    rate, speed-up, tau, losslessness
    first temperature:             stages of a round ──> where the time goes                     c, and what it explains
                                   batches ──> throughput          1, 2, ... drafts ──> the best draft length

Writes `folder`: README.md, *.png, bench.jsonl (a line for each question, method and run, so that anybody can recount) and bench.json
(last: its presence says that the report is complete).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean
from time import perf_counter

from drafttrain import plots
from drafttrain.decoding.engine import Engine
from drafttrain.decoding.methods import Chain
from drafttrain.decoding.sampling import Sampling
from drafttrain.drafters.base import DrafterNet
from drafttrain.errors import UserError
from drafttrain.files import many, write_atomic, write_json_atomic, write_jsonl_atomic
from drafttrain.target.target import Target
from drafttrain.types import Request
from drafttrain.validation import bench_report, hardware
from drafttrain.validation.bench_config import PLAIN, BenchConfig
from drafttrain.validation.bench_figures import figures_of
from drafttrain.validation.bench_lossless import compare, faults
from drafttrain.validation.bench_passes import Contender, Row, drafts_of, throughput, time_questions, time_stages, warm_up
from drafttrain.validation.bench_questions import Asked, Question, Skipped, ask, choose, probe_of
from drafttrain.validation.bench_summary import Staged, breakdown, length_facts, method_facts, throughput_facts
from drafttrain.validation.passes import Difference, tied

QUESTIONS, LENGTHS = "questions", "draft length"
"""Parts of the benchmark that rows belong to."""


class Benchmark:
    """One benchmark as it goes: what it is about, and what was measured so far."""

    def __init__(
        self,
        target: Target,
        net: DrafterNet,
        questions: Sequence[Question],
        config: BenchConfig,
        calibration: Sequence[Request] = (),
    ):
        self.target, self.net, self.config = target, net, config
        self.questions = choose(questions, config.count)
        self.samplings = [Sampling(temperature) for temperature in config.temperatures]
        prepared = [method.prepare(target, net, calibration) for method in config.methods]
        self.contenders = [Contender(PLAIN, target, net)]
        self.contenders += [Contender(m.label, target, net, p) for m, p in zip(config.methods, prepared, strict=True)]
        self.engines: dict[str, Engine] = {}
        """Of one prompt at a time, at the temperature that is being measured, warm; by label."""
        self.began = perf_counter()
        self.rows: list[Row] = []
        self.skipped: list[Skipped] = []
        self.differences: list[tuple[float, Difference]] = []
        self._refuse_early()

    def _refuse_early(self) -> None:
        """UserError for a method that cannot be had, before anything is measured."""
        for contender in self.contenders:
            fit = [sampling for sampling in self.samplings if contender.can(sampling)]
            if not fit:
                raise UserError(
                    f"bench.methods has {contender.label}, which draws its drafts and needs a temperature above 0, but bench.temperatures "
                    f"is {self.config.temperatures}: add one above 0, or leave the method out."
                )
            contender.engine(fit[0])
        for contender in self._lengths().values():
            contender.engine(self.samplings[0])

    def run(self) -> dict:
        """Measure everything; what bench.json holds of it."""
        asked = self._ask(self.samplings[0])
        probe = probe_of(asked, self.config.probe)
        staged: list[Staged] = []
        tables = [self._temperature(self.samplings[0], asked, probe, staged)]
        found = {
            "breakdown": breakdown(staged, self.rows, [each.key for each in probe])
            | {"temperature": self.samplings[0].temperature},
            "throughput": throughput_facts(self._throughput(probe)),
            "draft_length": self._draft_length(probe),
        }
        tables += [self._temperature(sampling, self._ask(sampling), [], []) for sampling in self.samplings[1:]]
        return {
            "lossless": not self.differences,
            "questions": len(asked),
            "categories": dict(Counter(each.category for each in asked)),
            "skipped": [asdict(each) for each in dict.fromkeys(self.skipped)],
            "temperatures": tables,
            **found,
            "differences": [{"temperature": temperature} | asdict(d) for temperature, d in self.differences],
        }

    def _ask(self, sampling: Sampling) -> list[Asked]:
        asked, skipped = ask(self.target, self.questions, sampling, self.config.max_tokens)
        self.skipped += skipped
        return asked

    def _able(self, sampling: Sampling) -> list[Contender]:
        return [contender for contender in self.contenders if contender.can(sampling)]

    def _time(
        self, contenders: Sequence[Contender], sampling: Sampling, asked: list[Asked], part: str
    ) -> tuple[dict[str, Engine], dict[str, list[Row]]]:
        """All timed runs: the engines, warm, and the rows by method."""
        engines = {contender.label: self._warm(contender, sampling, asked) for contender in contenders}
        by_method: dict[str, list[Row]] = {label: [] for label in engines}
        for run in range(1, self.config.repeats + 1):
            rows = time_questions(engines, asked, run, part)
            self.rows += rows
            for row in rows:
                by_method[row.method].append(row)
            self._say(bench_report.run_line(rows, self.config.repeats))
        return engines, by_method

    def _warm(self, contender: Contender, sampling: Sampling, asked: list[Asked]) -> Engine:
        """Its engine, warm for these questions, or for some that hold them."""
        if contender.label not in self.engines:
            engine = self.engines[contender.label] = contender.engine(sampling)
            warm_up(engine, asked, self.config.warm_up)
            self._say(f"warm: {contender.label}, temperature {sampling.temperature:g}")
        return self.engines[contender.label]

    def _say(self, line: str) -> None:
        """Where the benchmark stands, behind the seconds since it began."""
        print(f"{perf_counter() - self.began:7.1f} s  {line}", flush=True)

    def _temperature(self, sampling: Sampling, asked: list[Asked], probe: list[Asked], staged: list[Staged]) -> dict:
        """Time plain decoding and every method. Notes the stages of the `probe` questions, if there are any, in `staged`."""
        able = self._able(sampling)
        self.engines.clear()
        engines, rows = self._time(able, sampling, asked, QUESTIONS)
        tables = {}
        for contender in able:
            label, exact, engine = contender.label, contender.exact(sampling), engines[contender.label]
            parted = compare(self.target, rows[PLAIN], rows[label], sampling) if exact else []
            self.differences += [(sampling.temperature, difference) for difference in parted]
            facts = method_facts(rows[label], rows[PLAIN], drafts_of(engine))
            facts |= {"exact": exact, "different": len(parted), "ties": sum(tied(d.gap) for d in parted)}
            tables[label] = facts | {"graphs_refused": engine.graphs_refused}
            self._say(bench_report.method_line(sampling.temperature, label, facts, len(asked)))
        stages = time_stages(engines, probe) if probe else {}
        staged += [Staged(label, drafts_of(engines[label]), found) for label, found in stages.items()]
        return {"temperature": sampling.temperature, "questions": len(asked), "methods": tables}

    def _throughput(self, probe: list[Asked]) -> dict[int, dict[str, list[float]]]:
        """Tokens a second of every run, by batch and method. The largest batch comes first, so that buffers last."""
        sampling, batches = self.samplings[0], sorted(self.config.batches, reverse=True)
        found: dict[int, dict[str, list[float]]] = {batch: {} for batch in reversed(batches)}
        for contender in self._able(sampling) if batches else []:
            engine = contender.engine(sampling, batches[0])
            for batch in batches:
                found[batch][contender.label] = throughput(engine, probe, batch, self.config.repeats)
            rates = ", ".join(f"{batch}: {mean(runs[contender.label]):,.1f}" for batch, runs in found.items())
            self._say(f"tokens/s by batch, {contender.label}: {rates}")
        return found

    def _lengths(self) -> dict[int, Contender]:
        """The first chain with 1, 2, ... drafts, as far as the drafter goes; {} where there is none, or none is asked for."""
        chains = [c.method for c in self._able(self.samplings[0]) if isinstance(c.method, Chain)]
        longest = self.config.longest or 0
        lengths = range(1, min(longest, self.net.deepest or longest) + 1)
        found = {k: replace(chains[0], drafts=k) for k in lengths} if chains else {}
        return {k: Contender(chain.label, self.target, self.net, chain) for k, chain in found.items()}

    def _draft_length(self, probe: list[Asked]) -> dict | None:
        """Every draft length, and plain decoding again beside them."""
        lengths = self._lengths()
        if not lengths:
            return None
        _, rows = self._time([self.contenders[0], *lengths.values()], self.samplings[0], probe, LENGTHS)
        facts = length_facts({drafts: rows[chain.label] for drafts, chain in lengths.items()}, rows[PLAIN])
        speeds = ", ".join(f"{point['drafts']}: {point['speedup']:.2f}" for point in facts["points"])
        self._say(f"speed-up by number of drafts: {speeds}; fastest: {facts['best']}")
        return facts


def bench(
    target: Target,
    net: DrafterNet,
    questions: Sequence[Question],
    config: BenchConfig,
    folder: str | Path,
    *,
    calibration: Sequence[Request] = (),
    skipped: Sequence[Skipped] = (),
    facts: Mapping | None = None,
) -> dict:
    """Measure and write the report.

    Args:
        calibration: prompts, none of them among the questions, for methods that measure something first.
        skipped: what the caller left out already, for the report.
        facts: what the caller knows, copied into bench.json: `name` (of the run), `command`, `draft`, `export_hash`, ...

    Returns:
        What bench.json holds.

    Raises:
        UserError: a method that cannot be had with this drafter, or no question that can be asked; and, after the report is written,
            if in fp32 an answer differs from plain decoding where no two tokens tie.
        RuntimeError: if the engine's records contradict themselves.
    """
    benchmark = Benchmark(target, net, questions, config, calibration)
    benchmark.skipped += skipped
    result = benchmark.run() | {
        "config": asdict(config) | {"methods": [{"class": type(m).__name__} | asdict(m) for m in config.methods]},
        "target": asdict(target.identity) | {"dtype": str(target.dtype).removeprefix("torch.")},
        "hardware": hardware.describe_hardware(target.device),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    result = {"name": None, "commit": hardware.commit(), "versions": hardware.versions()} | dict(facts or {}) | result
    _write(Path(folder), result, benchmark.rows)
    wrong = faults(target, [difference for _, difference in benchmark.differences])
    if wrong:
        raise UserError(
            f"Output differs from plain decoding, but must be equal; {many(len(wrong), 'difference')} that no rounding explains, the first: "
            f"{wrong[0]}. {Path(folder) / 'README.md'} lists them; report a fault."
        )
    return result


def _write(folder: Path, result: dict, rows: Sequence[Row]) -> None:
    """Write the report; bench.json goes first if an old one is there, and comes last."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "bench.json").unlink(missing_ok=True)
    for old in folder.glob("*.png"):
        old.unlink()
    figures = {}
    for name, (caption, figure) in figures_of(result).items():
        write_atomic(folder / name, plots.png(figure))
        figures[name] = caption
    write_jsonl_atomic(folder / "bench.jsonl", (row.facts() for row in rows))
    write_atomic(folder / "README.md", bench_report.render(result, figures))
    write_json_atomic(folder / "bench.json", result)
    print(f"report: {folder / 'README.md'}", flush=True)
