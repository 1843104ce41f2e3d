"""``rakv batch``: many prompts over a folder of documents, by a running service.

Exit codes: 0 all rows answered; 1 finished, but rows have errors; 2 the job cannot be run as given;
3 stopped before the end (no service, no access): run again with ``--resume``; 130 interrupted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
import yaml
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from rakv_cluster.batch.documents import DocumentSet, load_documents
from rakv_cluster.batch.journal import Journal, RowResult
from rakv_cluster.batch.output import check_format, stats_path, write_results
from rakv_cluster.batch.planner import Plan
from rakv_cluster.batch.rows import Job, read_rows
from rakv_cluster.batch.runner import run_rows
from rakv_cluster.client import Answer, AsyncClient, Document, Message, Options, RetryPolicy
from rakv_cluster.client.transport import DEFAULT_URL
from rakv_cluster.clock import Clock, SystemClock
from rakv_cluster.config import load_settings, nearest
from rakv_cluster.errors import ConfigError, RakvError

app = typer.Typer(no_args_is_help=True, help="Many prompts over a folder of documents.")

ROW_ERRORS, STOPPED, INTERRUPTED = 1, 3, 130
_NOT_IN_JOBS = frozenset({"_job", "help", "api_key", "dry_run", "resume"})
_PATHS = frozenset({"docs", "prompts", "out"})
_PATIENT = RetryPolicy(attempts=20, max_s=60.0)


_Chat = Callable[[Sequence[Message], Sequence[Document]], Awaitable[Answer]]


def _read_job(context: typer.Context, path: Path | None) -> Path | None:
    """Let a file's entries stand for options that are not given; paths in it are relative to it."""
    if path is None:
        return None
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"job {path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"job {path} must be a mapping of option names to values")
    known = {str(parameter.name): parameter for parameter in context.command.params}
    given: dict[str, object] = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name not in known or name in _NOT_IN_JOBS:
            raise ConfigError(f"job {path}: unknown option '{key}'{nearest(name, known)}")
        given[name] = str(path.parent / str(value)) if name in _PATHS else value
    context.default_map = given
    return path


@app.command()
def run(
    _job: Annotated[
        Path | None,
        typer.Argument(
            metavar="JOB.yaml",
            callback=_read_job,
            is_eager=True,
            help="A file with these options by name; what is given here besides wins.",
        ),
    ] = None,
    *,
    prompts: Annotated[
        Path, typer.Option(help="A prompt per line, or .jsonl with prompt, id, documents.")
    ],
    out: Annotated[Path, typer.Option(help="Where answers go: .jsonl or .parquet.")],
    docs: Annotated[
        Path | None, typer.Option(help="Folder of text, Markdown, code, HTML, PDF.")
    ] = None,
    url: Annotated[str, typer.Option(help="Where the service answers.")] = DEFAULT_URL,
    in_process: Annotated[
        bool,
        typer.Option(
            "--in-process", help="Load the model here (settings from RAKV_...); no service."
        ),
    ] = False,
    api_key: Annotated[
        str, typer.Option(envvar="RAKV_API_KEY", help="Where the service asks for one.")
    ] = "",
    template: Annotated[
        str, typer.Option(help="The question around $prompt; $document is the document's name.")
    ] = "$prompt",
    system: Annotated[str, typer.Option(help="A system message.")] = "",
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, max=2.0)] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="For temperatures above 0.")] = 0,
    window: Annotated[int, typer.Option(min=1, max=256, help="Requests at once.")] = 8,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where a run stopped.")] = False,
    retry_errors: Annotated[
        bool, typer.Option("--retry-errors", help="With --resume: ask rows with errors again.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan; ask nothing.")] = False,
) -> None:
    """Ask every prompt about every document, or about those it names.

    Prompts go in the order that reuses most; answers are written in that of the input.

    Example: rakv batch run --docs manuals --prompts questions.txt --out answers.jsonl
    """
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    check_format(out)
    documents = load_documents(docs) if docs else DocumentSet({}, {})
    options: Options = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    job = Job(read_rows(prompts, documents.texts, template), documents.texts, system, dict(options))
    planned = job.plan()
    _show_plan(console, job, planned, documents)
    if dry_run:
        return
    target = Target("" if in_process else url, api_key, options, window)
    with _journal(job, out, resume=resume) as journal:
        again = journal.failed if retry_errors else frozenset()
        todo = [index for index in planned.order if index not in journal or index in again]
        _work_or_stop(job, todo, journal, target, console)
        write_results(job, journal, out)
        failed = len(journal.failed)
    console.print(f"{len(job.rows)} rows in {out}, {failed} with errors; {stats_path(out)}")
    if failed:
        console.print("ask those again with --resume --retry-errors")
        raise typer.Exit(ROW_ERRORS)
    _journal_path(out).unlink()


def _work_or_stop(
    job: Job, todo: list[int], journal: Journal, target: Target, console: Console
) -> None:
    """Ask; what ends it early becomes the command's exit code."""
    try:
        _work(job, todo, journal, target, console)
    except KeyboardInterrupt as interrupt:
        console.print("interrupted; go on with --resume")
        raise typer.Exit(INTERRUPTED) from interrupt
    except ConfigError:
        raise  # by that of a job that cannot be run as given
    except RakvError as error:
        console.print(f"[bold red]stopped:[/] {error.message}; go on with --resume")
        raise typer.Exit(STOPPED) from error


@dataclass(frozen=True, slots=True)
class Target:
    """The service and how it is asked; without ``url`` an engine in this process."""

    url: str
    api_key: str
    options: Options
    window: int


def _work(
    job: Job, todo: Sequence[int], journal: Journal, target: Target, console: Console
) -> None:
    clock = SystemClock()
    with _Progress(console, len(job.rows), len(job.rows) - len(todo), clock) as progress:
        asyncio.run(_ask_all(job, todo, journal, target, progress))


async def _ask_all(
    job: Job, todo: Sequence[int], journal: Journal, target: Target, progress: _Progress
) -> None:
    front = [Message("system", job.system)] if job.system else []

    async def run(chat: _Chat, window: int) -> None:
        async def ask(index: int) -> Answer:
            row = job.rows[index]
            documents = [Document(job.documents[name], name) for name in row.documents]
            return await chat([*front, Message("user", row.question)], documents)

        await run_rows(todo, ask, journal, window=window, on_result=progress.add)

    if target.url:
        async with AsyncClient(target.url, api_key=target.api_key, retries=_PATIENT) as client:
            await run(lambda m, d: client.chat(m, documents=d, **target.options), target.window)
        return
    # Imported late: few batches load a model.
    from rakv_cluster.batch.local_engine import local_engine

    settings = load_settings()
    window = min(target.window, settings.max_running + settings.max_waiting)
    async with local_engine(settings, SystemClock()) as engine:
        await run(lambda m, d: engine.chat(m, d, target.options), window)


class _Progress:
    """A bar with rows, rows per second, share of reuse, and time left."""

    def __init__(self, console: Console, total: int, done: int, clock: Clock) -> None:
        figures = TextColumn("{task.fields[figures]}")
        self._bar = Progress(
            TextColumn("rows"), BarColumn(), MofNCompleteColumn(), figures, TimeRemainingColumn(),
            console=console,
        )  # fmt: skip
        self._task = self._bar.add_task("rows", total=total, completed=done, figures="")
        self._clock = clock
        self._started_s = clock.monotonic_s()
        self._rows = self._prompt_tokens = self._cached_tokens = 0

    def __enter__(self) -> _Progress:
        self._bar.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._bar.stop()

    def add(self, result: RowResult) -> None:
        """Count one finished row."""
        self._rows += 1
        self._prompt_tokens += result.prompt_tokens
        self._cached_tokens += result.cached_tokens
        elapsed_s = max(self._clock.monotonic_s() - self._started_s, 1e-9)
        share = self._cached_tokens / max(self._prompt_tokens, 1)
        figures = f"{self._rows / elapsed_s:.2f} rows/s, {share:.0%} of prompts reused"
        self._bar.update(self._task, advance=1, figures=figures)


def _show_plan(console: Console, job: Job, planned: Plan, documents: DocumentSet) -> None:
    total = max(planned.total, 1)
    console.print(
        f"{len(job.rows)} rows over {len(documents.texts)} documents, {planned.total} characters; "
        f"expected reuse: {planned.reused / total:.0%} in the planned order "
        f"(at least {planned.reused_as_given / total:.0%} as given)"
    )
    for name, reason in documents.skipped.items():
        console.print(f"skipped {name}: {reason}")


def _journal(job: Job, out: Path, *, resume: bool) -> Journal:
    path = _journal_path(out)
    if not resume and (path.exists() or out.exists()):
        found = path if path.exists() else out
        raise ConfigError(
            f"{found} exists: go on with --resume, or delete it to start over", field="out"
        )
    if resume and out.exists() and not path.exists():
        raise ConfigError(f"{out} is finished: nothing to resume", field="out")
    return Journal(path, job.digest)


def _journal_path(out: Path) -> Path:
    return out.with_name(f"{out.name}.journal")
