"""The command line: words in, exit code out, every error one line.

Knows the commands and their options; each imports what it needs when it is called, so that most never load torch.
"""

import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import click

from .errors import JobError, UsageError

_JOB = click.argument("job_path", metavar="JOB", type=click.Path(path_type=Path))


def _debug(function: Callable[..., Any]) -> Callable[..., Any]:
    return click.option(
        "--debug", is_flag=True, expose_value=False, callback=_remember_debug, help="Show the traceback of an error."
    )(function)


def _remember_debug(context: click.Context, _: click.Parameter, value: bool) -> None:
    if value:
        context.find_root().obj["debug"] = True


def _set(function: Callable[..., Any]) -> Callable[..., Any]:
    return click.option(
        "--set",
        "assignments",
        metavar="KEY=VALUE",
        multiple=True,
        help="Replace a value of the job file, like generation.max_tokens=32. May be repeated.",
    )(function)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="batchgen")
@_debug
def cli() -> None:
    """Run a language model over every row of a data set.

    A job file (YAML) names the model, the input, the prompt and the output. Start with `batchgen check JOB`,
    look at a few answers with `batchgen preview JOB`, then `batchgen run JOB`. A run that was stopped or killed
    continues when the same command is given again.
    """


@cli.command()
@_JOB
@_set
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
@_debug
def run(job_path: Path, assignments: tuple[str, ...], **options: Any) -> int:
    """Run a job to its end, or go on where it was stopped.

    \b
    Exit codes: 0 done, 1 failed, 2 bad job file or other job's output, 3 more failed rows than
    run.max_failures, 4 deadline, 75 another run holds the output, 130/143 interrupted/terminated.
    """
    from .command_run import run_command

    return run_command(_load(job_path, assignments), **options)


@cli.command()
@_JOB
@_set
@_debug
def check(job_path: Path, assignments: tuple[str, ...]) -> int:
    """Check a job file without loading the model: keys, types, files, columns, output."""
    from .check import check_job

    for line in check_job(_load(job_path, assignments)):
        click.echo(line)
    return 0


@cli.command()
@_JOB
@_set
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of lines for people.")
@click.option("--explain", is_flag=True, help="Also what auto takes, among which values, with predicted times.")
@_debug
def plan(job_path: Path, assignments: tuple[str, ...], as_json: bool, explain: bool) -> int:
    """Tokenise the input and tell what a run would do: tokens, shared prefixes, time. Loads no weights."""
    from .command_plan import plan_job

    for line in plan_job(_load(job_path, assignments), as_json=as_json, explain=explain):
        click.echo(line)
    return 0


@cli.command()
@_JOB
@click.option("-n", "count", type=click.IntRange(min=1), default=5, show_default=True, help="Number of rows.")
@_set
@_debug
def preview(job_path: Path, count: int, assignments: tuple[str, ...]) -> int:
    """Show the first prompts and their answers. Writes nothing."""
    from .command_preview import preview_job

    for line in preview_job(_load(job_path, assignments), count):
        click.echo(line)
    return 0


@cli.command()
@click.argument("output")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of lines for people.")
@_debug
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
@_debug
def report(output: str, target: str | None) -> int:
    """Write one HTML page about an output: speed, lengths, reuse, failures, cost, settings. Needs no network."""
    from batchgen.pipeline.place import place

    from .command_report import report_output

    click.echo(report_output(place(output, Path()), None if target is None else place(target, Path())))
    return 0


@cli.command()
@_JOB
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
@_set
@_debug
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
@_debug
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


@cli.command("eval")
@click.argument("model", metavar="MODEL")
@click.option(
    "--text", required=True, type=click.Path(path_type=Path), help="A UTF-8 text like the one the model will write."
)
@click.option("--weights", default="native,int8,int4,fp8", show_default=True, help="Weight formats to measure.")
@click.option(
    "--kv", default="fp8,int8,int4", show_default=True, help='KV cache formats, beside native weights; "" for none.'
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16"]),
    default="bfloat16",
    show_default=True,
    help="Number format of the computation.",
)
@click.option(
    "--reference-dtype",
    type=click.Choice(["float32", "bfloat16"]),
    default="float32",
    show_default=True,
    help="The same for the native weights it is compared with.",
)
@click.option(
    "--tokens", type=click.IntRange(min=2), default=8192, show_default=True, help="Tokens of the text to use."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON array instead of a table.")
@_debug
def evaluate(model: str, text: Path, weights: str, kv: str, as_json: bool, **options: Any) -> int:
    """Measure what a number format costs in accuracy, beside native weights in the reference dtype.

    Both see the same text: perplexity, Kullback-Leibler divergence, and how often the most likely token is the same.
    """
    from .command_eval import EvalOptions, describe_evaluation, dump_evaluation
    from .command_eval import evaluate as measure

    weight_names = _names("--weights", weights, ("native", "int8", "int4", "fp8"))
    kv_names = _names("--kv", kv, ("float32", "bfloat16", "fp8", "int8", "int4"))
    if not weight_names + kv_names:
        raise UsageError("--weights: names no format, and neither does --kv")
    chosen = EvalOptions(weights=weight_names, kv=kv_names, **options)
    records = measure(model, text, chosen)
    click.echo(dump_evaluation(records) if as_json else describe_evaluation(records, chosen))
    return 0


def _names(option: str, text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    names = tuple(word.strip() for word in text.split(",") if word.strip())
    for name in names:
        if name not in known:
            raise UsageError(f"{option}: knows {', '.join(known)}, got {name!r}")
    return names


@cli.command()
@click.argument("model", metavar="MODEL")
@click.argument("out", metavar="OUT", type=click.Path(path_type=Path))
@click.option(
    "--weights",
    type=click.Choice(["int4", "int8", "fp8"]),
    default="int4",
    show_default=True,
    help="Number format of the linear layers; embedding and head stay as they are.",
)
@click.option("--group", type=click.IntRange(min=1), help="int4: inputs that share a scale. [default: 128, 64 or 32]")
@click.option("--revision", help="Branch, tag or commit, for a Hub id.")
@_debug
def quantize(model: str, out: Path, weights: str, group: int | None, revision: str | None) -> int:
    """Write the model into the new directory OUT with its linear layers in 4 or 8 bits (compressed-tensors).

    MODEL is a Hub id, a directory or a .gguf file. `batchgen` and transformers load the result.
    """
    from .command_quantize import quantize_model

    if group is not None and weights != "int4":
        raise UsageError(f"--group: only int4 has groups, {weights} has a scale for each output")
    click.echo(quantize_model(model, out, weights, group, revision))
    return 0


@cli.command()
@click.argument("model", metavar="MODEL")
@click.argument("data", metavar="DATA", type=click.Path(path_type=Path))
@click.argument("out", metavar="OUT", type=click.Path(path_type=Path))
@click.option(
    "--heads",
    type=click.IntRange(1, 8),
    default=3,
    show_default=True,
    help="How many tokens ahead of the next one they guess.",
)
@click.option("--epochs", type=click.IntRange(min=1), default=4, show_default=True, help="Passes over the answers.")
@click.option("--limit", type=click.IntRange(min=2), default=1000, show_default=True, help="Most answers to use.")
@click.option("--seed", type=int, default=0, show_default=True, help="Decides order and which answers are held out.")
@click.option("--device", type=click.Choice(["cpu"]), default="cpu", show_default=True, help="Where they are trained.")
@_debug
def heads(model: str, data: Path, out: Path, **options: Any) -> int:
    """Train small heads over the frozen MODEL that guess its next tokens, on answers it has given.

    DATA is an output directory, or a JSONL file of {"prompt": TEXT, "completion": TEXT}. The job file then takes
    `engine.speculation: {kind: medusa, path: OUT}`, which makes steps fewer and changes no answer.
    """
    from .command_heads import HeadsOptions, train_heads

    click.echo(train_heads(model, data, out, HeadsOptions(**options), click.echo))
    return 0


@cli.command()
@click.argument("model", metavar="MODEL")
@click.option("--weights", default="int4,fp8", show_default=True, help="Weight formats to tune for: int4, int8, fp8.")
@click.option("--device", default="cuda", show_default=True, help="cuda or cuda:N.")
@click.option(
    "--minutes", type=click.FloatRange(0.1), default=5.0, show_default=True, help="At most; what is left out is named."
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File to add the choices to. [default: $BATCHGEN_TUNED, else tuned.json in the user's cache]",
)
@_debug
def tune(model: str, weights: str, **options: Any) -> int:
    """Find out which kernels are fastest for MODEL on this GPU, and keep that in a file that later runs read.

    Only shapes are read of MODEL. Without such a file a built-in table is used; a run never tunes by itself.
    """
    from .command_tune import TuneOptions, tune_model

    names = _names("--weights", weights, ("int4", "int8", "fp8"))
    if not names:
        raise UsageError("--weights: names no format")
    click.echo(tune_model(model, TuneOptions(weights=names, **options), click.echo))
    return 0


@cli.command()
def schema() -> int:
    """Print the JSON Schema of the job file, for editors."""
    import json

    from .job import Job

    click.echo(json.dumps(Job.model_json_schema(), indent=2))
    return 0


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
