"""The data stage: prompts in, token stores out.

    data/settings.json                        what this folder is made with
    data/attempts/                            sampled user turns, if the target writes its own prompts
    data/prompts.jsonl, held_out.jsonl ...    see gather.py
    data/report/                              what is in it, for people
    data/train/                               TokenStore of training answers, with features if the recipe stores them
    data/held_out/                            TokenStore of greedy answers

Every file is whole or not there, each prompt has its own random stream, and the unit of work is a chunk. So a process killed at
any moment is followed by one that ends with the same chats and the same ledger.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from data_prep.answer import Answered, Chunk, answer, expected_bytes, in_chunks
from data_prep.config import PrepareConfig, require_window
from data_prep.dialogue import Question, Rules, Speech, first_turn
from data_prep.engines import OpenAIServer
from data_prep.featurize import Stored, featurize
from data_prep.gather import Gathered, gather
from data_prep.ledger import Ledger, reasons
from data_prep.prompt import compact
from data_prep.quality import QualityConfig
from data_prep.report import write_report
from data_prep.selfprompt import help_sampling
from data_prep.server import ServerEngine
from data_prep.sources import Ask, Prompt, SelfPrompts, Work
from data_prep.stamp import require_same, settings
from data_prep.team import ALONE, Team
from drafttrain.data.shards import ShardRecord, has_features
from drafttrain.data.store import Manifest, TokenStore
from drafttrain.decoding.engine import Engine as DecodingEngine
from drafttrain.decoding.sampling import Sampling
from drafttrain.errors import UserError
from drafttrain.files import RunLock, explain_full_disk, human_bytes, remove_leftovers, require_space
from drafttrain.target.target import Target
from drafttrain.types import Request, Rollout
from drafttrain.vocab import Cost, choose, coverage

HELD_OUT = "split off as held out"


def prepare(
    config: PrepareConfig,
    target: Target,
    folder: Path,
    *,
    taps: tuple[int, ...] | None,
    draft_vocab: int | float | Cost | None,
    feature_dtype: str = "bfloat16",
    final: str = "taught",
    tap_count: int | None = None,
    ask: Ask | None = None,
    team: Team = ALONE,
    say: Callable[[str], None] = print,
    begins: Callable[[], None] = lambda: None,
) -> TokenStore:
    """Makes or finishes `folder` (a run's data/) and returns the training store.

    `taps` are the layers whose features are kept beside the tokens (in `feature_dtype`), None for none; `final` says whose final states
    (kept_rows.py). `draft_vocab` (what drafts cost stands for the best size) and `tap_count` (of the drafter where `taps` is None; None: not known) are only used to
    say what a draft vocabulary of that size covers, and how large that many taps would be on disk. `ask` is who speaks for the target; the
    in-process engine unless given. `team`: which of how many processes this is. `begins` is called before answers or features are made that the folder lacks,
    when nothing is left that could be refused.
    UserError: settings that differ from those of an unfinished or finished folder, no usable prompt, no space, another process.
    """
    folder = Path(folder)
    require_window(config, target.max_positions)
    stored = None if taps is None else Stored(taps, feature_dtype, final)
    if stored is not None:
        stored.check(target)
    ask = ask or engine(target, config, say)
    work = Work(target, ask, folder, config.chunk, say, team)
    wanted = settings(config, target)
    # Who answers may not hand out features: then the target reads the finished shards once more.
    kept = None if isinstance(ask, ServerEngine) else stored
    if not team.leads:
        return _help(config, work, wanted, stored, kept)
    with RunLock(folder), explain_full_disk(folder, "what is finished so far is kept."):
        remove_leftovers(folder)
        require_same(folder, wanted)
        team.announce(folder)
        complete = all((folder / name / "manifest.json").exists() for name in ("train", "held_out"))
        answered = Answered([]) if complete else _answer_all(config, work, _gathered(config, work), kept, begins)
        if stored is not None:
            featurize(folder / "train", target, stored, team, say, begins)
        training, held_out = TokenStore.open(folder / "train"), TokenStore.open(folder / "held_out")
        if complete and (folder / "report" / "README.md").exists():
            say(f"{folder}/ is complete: {len(training):,} training chats, {len(held_out):,} held-out chats.")
            return training
        if isinstance(ask, ServerEngine):
            ask.report()
        _report(folder, training, held_out, answered, draft_vocab, target.end_ids, say)
        count = tap_count if taps is None else len(taps)
        say(f"report: {write_report(folder, training, held_out, target.end_ids, draft_vocab, count, final)}")
    return training


def _gathered(config: PrepareConfig, work: Work) -> Gathered:
    gathered = gather(config, work)
    work.say(f"{len(gathered.training):,} prompts to answer for training, {len(gathered.held_out):,} held out")
    return gathered


def _help(config: PrepareConfig, work: Work, wanted: dict[str, Any], stored: Stored | None, kept: Stored | None) -> TokenStore:
    """What a process that does not lead does: its part of the prompts that the target writes, and its shards."""
    folder, team = work.folder, work.team
    team.await_leader(folder)
    require_same(folder, wanted, leads=False)
    with explain_full_disk(folder, "what is finished so far is kept."):
        if not (folder / "train" / "manifest.json").exists():
            _help_sampling(config, work)
            _answer_all(config, work, gather(config, work), kept)
    team.wait_until((folder / "train" / "manifest.json").exists)
    if stored is not None:
        return featurize(folder / "train", work.target, stored, team, work.say)
    return TokenStore.open(folder / "train")


def _help_sampling(config: PrepareConfig, work: Work) -> None:
    """Returns when the leader has decided the prompts."""
    decided = (work.folder / "prompts.json").exists
    sources = [source.attempts(work) for source in config.prompts if isinstance(source, SelfPrompts)]
    help_sampling(work.team, sources, over=decided)


def engine(target: Target, config: PrepareConfig, say: Callable[[str], None] = print) -> Ask:
    """Who speaks: servers if the recipe names some, else the in-process decoding engine."""
    if isinstance(config.engine, OpenAIServer):
        return ServerEngine(config.engine, target, config.seed, say)

    return LocalSpeaker(target, config)


class LocalSpeaker:
    """This process's own decoding engine as an `Ask`, of which one is kept: its buffers and graphs serve chunk after chunk, and two might not fit."""

    def __init__(self, target: Target, config: PrepareConfig):
        self.target, self.config = target, config
        self._made_for: tuple[Sampling, tuple[int, ...] | None] | None = None
        self._engine: DecodingEngine | None = None

    def __call__(
        self, requests: Sequence[Request], temperature: float, top_p: float, taps: tuple[int, ...] | None
    ) -> Iterator[Rollout]:
        wanted = Sampling(temperature=temperature, top_p=top_p, seed=self.config.seed), taps
        if self._engine is None or wanted != self._made_for:
            self._engine = None  # freed before the next one takes its memory
            self._engine = DecodingEngine(
                self.target, sampling=wanted[0], slots=self.config.slots, taps=taps or (), keep_features=taps is not None
            )
            self._made_for = wanted
        return self._engine.generate(requests)

    def under_way(self) -> int:
        """Tokens said so far of answers that are not finished."""
        return 0 if self._engine is None else sum(len(row.emitted) for row in self._engine.rows if row is not None)


def _answer_all(
    config: PrepareConfig, work: Work, gathered: Gathered, kept: Stored | None, begins: Callable[[], None] = lambda: None
) -> Answered:
    """Both stores, with their manifests if this process leads; returns what the training store took."""
    folder, hidden, team = work.folder, work.target.hidden, work.team
    training, greedy = _training_chunks(config, work, gathered.training, kept), Speech(0.0, 1.0, None)
    # Held-out prompts measure as validation asks: their first turn alone, whole answers, whatever they are like.
    first = [replace(prompt, messages=first_turn(prompt)) for prompt in gathered.held_out]
    held_out = in_chunks(_questions(work, first), config.chunk, greedy)
    rules = Rules(config.max_prompt, config.max_tokens, config.thoughts == "supervised", config.turns == "last", config.quality)
    held_rules = Rules(config.max_prompt, config.held_out_max_tokens, True, False, QualityConfig())
    needed = expected_bytes(training, folder / "train", rules, hidden)
    needed += expected_bytes(held_out, folder / "held_out", held_rules, hidden)
    asked = sum(len(chunk.questions) for chunk in training)
    require_space(folder, needed, f"{'tokens' if kept is None else 'features'} of {asked:,} chats")
    begins()

    held_done = answer(work, held_out, folder / "held_out", held_rules, team)
    done = answer(work, training, folder / "train", rules, team)
    if not team.leads:
        return done
    ledger = Ledger()
    _add_shards(ledger, held_done.records)
    if several := sum(len(prompt.turns) > 1 for prompt in gathered.held_out):
        ledger.notes["held-out chats of several turns: only their first question is asked, as validation does"] = several
    said = {"temperature": 0.0, "top_p": 1.0, "turns": "first"}
    _finish(work, folder / "held_out", held_done.records, ledger, None, said, gathered)

    ledger = gathered.ledger
    ledger.read -= len(gathered.training)  # the shards count them, once for every answer
    ledger.dropped.update({HELD_OUT: len(gathered.held_out)})
    _add_shards(ledger, done.records)
    sampling = {name: getattr(config, name) for name in ("samples", "greedy", "temperature", "top_p", "thoughts", "turns")}
    _finish(work, folder / "train", done.records, ledger, kept, sampling, gathered)
    return done


def _training_chunks(config: PrepareConfig, work: Work, prompts: Sequence[Prompt], kept: Stored | None) -> list[Chunk]:
    """Every answer that is asked for: `samples` of each prompt, and a greedy one if wanted. UserError if two would share a name."""
    sampled, greedy = Speech(config.temperature, config.top_p, kept), Speech(0.0, 1.0, kept)
    questions = _questions(work, prompts)
    chunks = []
    for number in range(1, config.samples + 1):
        named = questions if number == 1 else [replace(question, key=f"{question.key}#{number}") for question in questions]
        chunks += in_chunks(named, config.chunk, sampled)
    if config.greedy:
        named = [replace(question, key=f"{question.key}#greedy") for question in questions]
        chunks += in_chunks(named, config.chunk, greedy)
    names = Counter(question.key for chunk in chunks for question in chunk.questions)
    twice = [name for name, count in names.items() if count > 1]
    if twice:
        raise UserError(
            f"A prompt's id is {twice[0]!r}, which is also the name of another prompt's further answer; rename ids that end in '#...'."
        )
    return chunks


def _questions(work: Work, prompts: Sequence[Prompt]) -> list[Question]:
    """With first turns rendered; those of an earlier start are rendered again."""
    target = work.target
    return [
        Question(p.key, p, compact(target.render(first_turn(p), p.tools), target.vocab) if p.ids is None else p.ids)
        for p in prompts
    ]


def _add_shards(ledger: Ledger, records: list[ShardRecord]) -> None:
    """Counts the rows of finished shards."""
    for record in records:
        ledger.read += record.rows["in"]
        ledger.dropped.update(record.rows["dropped"])
        ledger.notes.update(record.rows["notes"])


def _finish(
    work: Work,
    folder: Path,
    records: list[ShardRecord],
    ledger: Ledger,
    stored: Stored | None,
    sampling: dict[str, Any],
    gathered: Gathered,
) -> None:
    """Writes the manifest. UserError if there is no chat in the store."""
    kept = sum(len(record.keys) for record in records)
    if stored is not None and not all(
        has_features(record, index, stored.dtype, stored.taps, stored.final) for index, record in enumerate(records)
    ):
        stored = None  # a restart with other layers: `featurize` makes all shards alike
    if not kept:
        raise UserError(
            f"{folder}/ has no chat with a supervised token ({reasons(ledger.dropped)}): the target answers nothing to these "
            "prompts. Check target.template_arguments and that the target is an instruct model."
        )
    Manifest(
        identity=work.target.identity,
        taps=None if stored is None else list(stored.taps),
        feature_dtype=None if stored is None else stored.dtype,
        rows=ledger.facts(kept),
        shards=len(records),
        tokens=sum(record.tokens for record in records),
        supervised_tokens=sum(record.supervised_tokens for record in records),
        facts={**sampling, "sources": gathered.sources, "notes": dict(ledger.notes)},
    ).write(folder)


def _report(
    folder: Path,
    training: TokenStore,
    held_out: TokenStore,
    done: Answered,
    draft_vocab: int | float | Cost | None,
    ends: Sequence[int],
    say: Callable[[str], None],
) -> None:
    """What was written, for people."""
    rows = training.manifest.rows
    say(f"{folder}/ is complete: {rows['in']:,} rows in, {rows['kept']:,} kept for training; {reasons(rows['dropped'])}")
    for note, count in held_out.manifest.facts["notes"].items():
        say(f"{folder / 'held_out'}/: {count:,} {note}")
    for store in (training, held_out):
        facts = store.manifest
        size = human_bytes(sum(file.stat().st_size for file in store.folder.iterdir()))
        kept = f"features of layers {facts.taps}" if facts.taps else "final states"
        layers = "" if facts.taps is None else f", {kept} in {facts.feature_dtype}"
        say(
            f"{store.folder}/: {len(store):,} chats, {facts.tokens:,} tokens, {facts.supervised_tokens:,} of them answers"
            f"{layers}, {size}"
        )
    if done.tokens:
        say(f"training answers: {done.tokens:,} tokens in {done.seconds:,.0f} s, {done.tokens / done.seconds:,.0f} tokens/s")
    if isinstance(draft_vocab, int | float):
        supervised_V, other_V = training.counts()
        seen = int((supervised_V > 0).sum())
        vocabulary = choose(supervised_V, draft_vocab, other_V, always=ends)
        share = coverage(vocabulary, held_out.counts()[0])
        say(
            f"draft vocabulary of {len(vocabulary.ids):,} ids ({seen:,} distinct ones in training answers) covers "
            f"{share:.2%} of held-out answer tokens"
        )
