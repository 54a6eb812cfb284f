"""The commands about a model rather than a job: eval, quantize, heads, tune.

Knows their options; each imports what it needs when it is called.
"""

from pathlib import Path
from typing import Any

import click

from .cli_options import debug, names
from .errors import UsageError


@click.command("eval")
@click.argument("model", metavar="MODEL")
@click.option(
    "--text", required=True, type=click.Path(path_type=Path), help="A UTF-8 text like the one the model will write."
)
@click.option(
    "--job",
    type=click.Path(path_type=Path, dir_okay=False),
    help="A job file: how often the greedy answers to its first rows take the same token is measured too.",
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
@debug
def evaluate(model: str, text: Path, weights: str, kv: str, as_json: bool, **options: Any) -> int:
    """Measure what a number format costs in accuracy, beside native weights in the reference dtype.

    Both see the same text: perplexity, Kullback-Leibler divergence, and how often the most likely token is the same.
    With a job also how often it is the same in the answers that the native weights give to the job's first rows.
    """
    from .command_eval import EvalOptions, describe_evaluation, dump_evaluation
    from .command_eval import evaluate as measure

    weight_names = names("--weights", weights, ("native", "int8", "int4", "fp8"))
    kv_names = names("--kv", kv, ("float32", "bfloat16", "fp8", "int8", "int4"))
    if not weight_names + kv_names:
        raise UsageError("--weights: names no format, and neither does --kv")
    chosen = EvalOptions(weights=weight_names, kv=kv_names, **options)
    records = measure(model, text, chosen)
    click.echo(dump_evaluation(records) if as_json else describe_evaluation(records, chosen))
    return 0


@click.command()
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
@debug
def quantize(model: str, out: Path, weights: str, group: int | None, revision: str | None) -> int:
    """Write the model into the new directory OUT with its linear layers in 4 or 8 bits (compressed-tensors).

    MODEL is a Hub id, a directory or a .gguf file. `batchgen` and transformers load the result.
    """
    from .command_quantize import quantize_model

    if group is not None and weights != "int4":
        raise UsageError(f"--group: only int4 has groups, {weights} has a scale for each output")
    click.echo(quantize_model(model, out, weights, group, revision))
    return 0


@click.command()
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
@debug
def heads(model: str, data: Path, out: Path, **options: Any) -> int:
    """Train small heads over the frozen MODEL that guess its next tokens, on answers it has given.

    DATA is an output directory, or a JSONL file of {"prompt": TEXT, "completion": TEXT}. The job file then takes
    `engine.speculation: {kind: medusa, path: OUT}`, which makes steps fewer and changes no answer.
    """
    from .command_heads import HeadsOptions, train_heads

    click.echo(train_heads(model, data, out, HeadsOptions(**options), click.echo))
    return 0


@click.command()
@click.argument("model", metavar="MODEL")
@click.option("--weights", default="int4,fp8", show_default=True, help="Weight formats to tune for: int4, int8, fp8.")
@click.option(
    "--kv", default="bfloat16,fp8", show_default=True, help='KV cache formats to tune for; "" for no attention.'
)
@click.option("--device", default="cuda", show_default=True, help="cuda or cuda:N.")
@click.option(
    "--minutes", type=click.FloatRange(0.1), default=5.0, show_default=True, help="At most; what is left out is named."
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File to add the choices to. [default: $BATCHGEN_TUNED, else tuned.json in the user's cache]",
)
@debug
def tune(model: str, weights: str, kv: str, **options: Any) -> int:
    """Find out which kernels are fastest for MODEL on this GPU, and keep that in a file that later runs read.

    Only shapes are read of MODEL. Without such a file a built-in table is used; a run never tunes by itself.
    """
    from .command_tune import TuneOptions, tune_model

    formats = names("--weights", weights, ("int4", "int8", "fp8"))
    if not formats:
        raise UsageError("--weights: names no format")
    caches = names("--kv", kv, ("bfloat16", "fp8", "int8", "int4"))
    click.echo(tune_model(model, TuneOptions(weights=formats, kv=caches, **options), click.echo))
    return 0


COMMANDS = (evaluate, quantize, heads, tune)
