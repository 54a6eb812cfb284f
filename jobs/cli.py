"""The command line: words in, exit code out, every error one line.

Knows the commands and their options; each imports what it needs when it is called, so that most never load torch.
"""

import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import click

from .cli_models import COMMANDS
from .cli_options import JOB, debug, settable
from .errors import JobError, UsageError


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="batchgen")
@debug
def cli() -> None:
    """Run a language model over every row of a data set.

    A job file (YAML) names the model, the input, the prompt and the output. Start with `batchgen check JOB`,
    look at a few answers with `batchgen preview JOB`, then `batchgen run JOB`. A run that was stopped or killed
    continues when the same command is given again.
    """


@cli.command()
@JOB
@settable
@click.option("--limit", type=click.IntRange(min=1), help="Take only the first N rows of the input.")
@click.option(
    "--deadline", metavar="TIME", help="Stop cleanly at a time (06:00) or after a while (90s, 30m, 2h); exit 4."
)
@click.option("--fresh", is_flag=True, help="Throw the earlier output away and start over.")
@click.option("--yes", is_flag=True, help="Do not ask before --fresh throws something away.")
@click.option(
    "--retry", metavar="OUTCOMES", help="Ask again the rows that ended so: errors, length or both, with a comma."
)
@click.option("--on", metavar="CLUSTER", help="Run on the workers of a cluster: ray (this machine), ray:ADDRESS.")
@click.option("--workers", type=click.IntRange(min=1), help="With --on: how many; default: one per GPU or machine.")
@click.option("--quiet", is_flag=True, help="No progress, only errors.")
@click.option("--log-format", type=click.Choice(["text", "json"]), default="text", help="Form of the lines on stderr.")
@debug
def run(job_path: Path, assignments: tuple[str, ...], **options: Any) -> int:
    """Run a job to its end, or go on where it was stopped.

    \b
    Exit codes: 0 done, 1 failed, 2 bad job file or other job's output, 3 more failed rows than
    run.max_failures, 4 deadline, 75 another run holds the output, 130/143 interrupted/terminated.
    """
    from .command_run import RunArguments, run_command

    return run_command(_load(job_path, assignments), RunArguments(**options))


@cli.command()
@JOB
@settable
@debug
def check(job_path: Path, assignments: tuple[str, ...]) -> int:
    """Check a job file without loading the model: keys, types, files, columns, output."""
    from .check import check_job

    for line in check_job(_load(job_path, assignments)):
        click.echo(line)
    return 0


@cli.command()
@JOB
@settable
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of lines for people.")
@click.option("--explain", is_flag=True, help="Also what auto takes, among which values, with predicted times.")
@debug
def plan(job_path: Path, assignments: tuple[str, ...], as_json: bool, explain: bool) -> int:
    """Tokenise the input and tell what a run would do: tokens, shared prefixes, time. Loads no weights."""
    from .command_plan import plan_job

    for line in plan_job(_load(job_path, assignments), as_json=as_json, explain=explain):
        click.echo(line)
    return 0


@cli.command()
@JOB
@click.option("-n", "count", type=click.IntRange(min=1), default=5, show_default=True, help="Number of rows.")
@settable
@debug
def preview(job_path: Path, count: int, assignments: tuple[str, ...]) -> int:
    """Show the first prompts and their answers. Writes nothing."""
    from .command_preview import preview_job

    for line in preview_job(_load(job_path, assignments), count):
        click.echo(line)
    return 0


@cli.command()
@click.argument("output")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of lines for people.")
@debug
def status(output: str, as_json: bool) -> int:
    """Tell how far the job of an output directory is, and whether a run is alive."""
    from batchgen.pipeline.place import place

    from .status import describe_status, read_status

    found = read_status(place(output, Path()))
    click.echo(found.to_json() if as_json else "\n".join(describe_status(found)))
    return 0


@cli.command()
@click.argument("output")
@click.option("--to", "target", help="Where the page goes; default: the sidecar directory.")
@debug
def report(output: str, target: str | None) -> int:
    """Write one HTML page about an output: speed, lengths, reuse, failures, cost, settings. Needs no network."""
    from batchgen.pipeline.place import place

    from .command_report import report_output

    click.echo(report_output(place(output, Path()), None if target is None else place(target, Path())))
    return 0


@cli.command()
@JOB
@click.option("--at", required=True, metavar="HH:MM", help="Local time at which the job starts every night.")
@click.option("--deadline", metavar="TIME", help="When a night ends: a time (06:00) or a while (4h).")
@click.option(
    "--format",
    "form",
    type=click.Choice(["systemd", "cron"]),
    default="systemd",
    show_default=True,
    help="What to print.",
)
@click.option("--install", is_flag=True, help="Write the units into your systemd user directory.")
@settable
@debug
def schedule(job_path: Path, assignments: tuple[str, ...], **options: Any) -> int:
    """Print a systemd timer with its service, or a crontab line, that runs a job every night.

    A night continues where the last one was stopped, and answers rows that have come since.
    """
    from .command_schedule import schedule_job

    for line in schedule_job(_load(job_path, assignments), assignments=assignments, **options):
        click.echo(line)
    return 0


@cli.command()
@click.argument("output")
@click.argument("repo", metavar="ORG/NAME")
@click.option("--private", is_flag=True, help="Make the repository private; refuses one that exists and is public.")
@click.option("--split", default="train", show_default=True, help="Name of the split that these rows become.")
@click.option("--config", default="default", show_default=True, help="Name of the configuration they belong to.")
@click.option("--revision", metavar="BRANCH", help="Branch to push to, made where it does not exist; default: main.")
@click.option("--dry-run", is_flag=True, help="Show the files and the card, send nothing.")
@debug
def push(output: str, repo: str, **options: Any) -> int:
    """Send a finished output to the Hub: Parquet or JSONL files and a data set card, in one commit.

    The token comes from HF_TOKEN or `hf auth login`. What the Hub has already is not sent again, so the same command
    continues after a failure.
    """
    from batchgen.pipeline.place import place

    from .command_push import PushOptions, push_output

    path = place(output, Path())
    if not isinstance(path, Path):
        raise UsageError(f"{output}: lies in a store; copy it to this machine and push the copy")
    for line in push_output(path, repo, PushOptions(**options)):
        click.echo(line)
    return 0


@cli.command()
def schema() -> int:
    """Print the JSON Schema of the job file, for editors."""
    import json

    from .job import Job

    click.echo(json.dumps(Job.model_json_schema(), indent=2))
    return 0


for _command in COMMANDS:
    cli.add_command(_command)


def _load(path: Path, assignments: Sequence[str]) -> Any:
    from .document import parse_assignments
    from .job import Job

    return Job.load(path, parse_assignments(assignments))


def invoke(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; errors become one line on stderr."""
    state: dict[str, Any] = {}
    try:
        result = cli.main(args=arguments, prog_name="batchgen", standalone_mode=False, obj=state)
        return int(result or 0)
    except (click.Abort, KeyboardInterrupt):
        return _fail("interrupted", 130, state)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return 2
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx else "batchgen"
        return _fail(f"{command}: {error.format_message()} (see {command} --help)", 2, state)
    except click.ClickException as error:
        return _fail(error.format_message(), 2, state)
    except JobError as error:
        return _fail(str(error), error.exit_code, state)
    except Exception as error:
        from .failure import explain_failure

        return _fail(*explain_failure(error), state)


def _fail(message: str, exit_code: int, state: dict[str, Any]) -> int:
    if state.get("debug"):
        traceback.print_exc()
    click.echo(" ".join(message.split()), err=True)
    return exit_code


def main() -> NoReturn:
    """Entry of the `batchgen` console script."""
    sys.exit(invoke())


__all__ = ["UsageError", "cli", "invoke", "main"]
