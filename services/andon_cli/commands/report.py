"""`andon report`: a run, or two beside each other, as one page for people who were not there."""

from __future__ import annotations

from pathlib import Path

from andon.host.errors import CommandError, ExitCode
from andon.host.private_files import write_whole
from andon.host.strict_json import strict_json
from andon_cli.commands.run_facts import find_folder
from andon_cli.questions import ReportConfig, ReportSettings
from andon_cli.reporting.facts import ReportFacts
from andon_cli.reporting.html_page import html_page
from andon_cli.reporting.markdown import markdown
from andon_cli.reporting.sections import beside, page_of
from andon_coordinator.transport.damage import journal_errors
from andon_server.runs import JOURNAL

__all__ = ["REPORT", "report_run", "write_report"]

REPORT = "report.html"
"""What `andon run` writes to a run's folder."""
_ERRORS = "backslashreplace"
"""What a worker said may have halves of characters."""


def report_run(config: ReportConfig) -> int:
    """Tells a run. Returns the exit code.

    Raises:
        UsageError: there is no such run.
        JournalError: its journal can't be read.
        CommandError: the output can't be written.
    """
    named = [config.run] if not config.other else [config.run, config.other]
    text = _told([find_folder(run) for run in named], config.settings)
    output = config.settings.output
    if output is None:
        print(text, end="" if text.endswith("\n") else "\n")
        return ExitCode.COMPLETE
    try:
        write_whole(output, text, errors=_ERRORS)
    except OSError as error:
        raise CommandError(f"{output} can't be written: {error.strerror}") from error
    return ExitCode.COMPLETE


def write_report(folder: Path) -> Path:
    """Writes the page of a run as HTML to its folder; returns its path.

    Raises:
        JournalError: the journal can't be read.
        OSError: the page can't be written.
    """
    target = folder / REPORT
    write_whole(target, _told([folder], ReportSettings(format="html")), errors=_ERRORS)
    return target


def _told(folders: list[Path], settings: ReportSettings) -> str:
    runs = []
    for folder in folders:
        with journal_errors(folder / JOURNAL):
            runs.append(ReportFacts.read(folder).at_price(settings.price))
    if settings.format == "json":
        fields = [each.fields() for each in runs]
        return strict_json(fields[0] if len(fields) == 1 else fields)
    # What was read is put into words here: only there some damage shows.
    with journal_errors(folders[-1] / JOURNAL):
        page = page_of(runs[0]) if len(runs) == 1 else beside(runs[0], runs[1])
        return html_page(page) if settings.format == "html" else markdown(page)
