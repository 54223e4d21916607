"""The options of `natterjack bench`, by what they are about."""

from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import typer

LOAD, DATA, REPORT = "The load", "The data set", "The report"

Url: TypeAlias = Annotated[
    str | None,
    typer.Option("--url", help="Server to measure, any that speaks OpenAI's HTTP; none: the configured deployment."),
]
Engine: TypeAlias = Annotated[
    Literal["echo", "native", "reference"] | None,
    typer.Option("--engine", help="Start a deployment with this engine for the run."),
]
TransportName: TypeAlias = Annotated[Literal["http", "nats"], typer.Option("--transport", help="The door to measure.")]
EndpointName: TypeAlias = Annotated[
    Literal["completions", "chat"], typer.Option("--endpoint", help="Over HTTP: which endpoint text prompts go to.")
]
ModelName: TypeAlias = Annotated[
    str | None, typer.Option("--model", help="Model to ask for; none: the configured one, or the server's first.")
]
Headers: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--header", metavar="NAME:VALUE", help="HTTP header to send, such as Authorization; repeatable."),
]

NumPrompts: TypeAlias = Annotated[int, typer.Option("--num-prompts", "-n", min=1, rich_help_panel=LOAD)]
RequestRate: TypeAlias = Annotated[
    float, typer.Option("--request-rate", help="Requests per second; inf sends all at once.", rich_help_panel=LOAD)
]
Burstiness: TypeAlias = Annotated[
    float,
    typer.Option(
        "--burstiness", help="Shape of the gamma distributed gaps: 1 Poisson, below it bursts.", rich_help_panel=LOAD
    ),
]
MaxConcurrency: TypeAlias = Annotated[
    int, typer.Option("--max-concurrency", min=0, help="Requests at once at most; 0: no limit.", rich_help_panel=LOAD)
]
NumWarmups: TypeAlias = Annotated[
    int, typer.Option("--num-warmups", min=0, help="Requests before the measured ones.", rich_help_panel=LOAD)
]
IgnoreEos: TypeAlias = Annotated[
    bool,
    typer.Option("--ignore-eos/--heed-eos", help="Whether answers go on to their full length.", rich_help_panel=LOAD),
]
LoadSeed: TypeAlias = Annotated[
    int, typer.Option("--seed", help="The same seed makes the same prompts and times.", rich_help_panel=LOAD)
]
TimeoutS: TypeAlias = Annotated[
    float,
    typer.Option(
        "--timeout", metavar="SECONDS", min=0.1, help="Longest request; then it failed.", rich_help_panel=LOAD
    ),
]
Nice: TypeAlias = Annotated[
    int,
    typer.Option(
        "--nice", min=0, max=19, help="Lower this client's priority on a shared machine.", rich_help_panel=LOAD
    ),
]

DatasetName: TypeAlias = Annotated[
    Literal["words", "random", "shared-prefix", "file"],
    typer.Option(
        "--dataset",
        help="English prompts, random token ids, ids behind shared prefixes, or a file.",
        rich_help_panel=DATA,
    ),
]
DatasetFile: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--dataset-file", metavar="FILE", help="JSON lines with 'prompt' or 'messages'.", rich_help_panel=DATA
    ),
]
InputLen: TypeAlias = Annotated[
    int, typer.Option("--input-len", min=1, help="Tokens of a prompt (words: words).", rich_help_panel=DATA)
]
OutputLen: TypeAlias = Annotated[
    int, typer.Option("--output-len", min=1, help="Tokens of an answer at most.", rich_help_panel=DATA)
]
RangeRatio: TypeAlias = Annotated[
    float, typer.Option("--range-ratio", help="Draw lengths from length·(1 ± this), 0 to 1.", rich_help_panel=DATA)
]
PrefixLen: TypeAlias = Annotated[
    int, typer.Option("--prefix-len", min=0, help="shared-prefix: tokens of a prefix.", rich_help_panel=DATA)
]
NumPrefixes: TypeAlias = Annotated[
    int, typer.Option("--num-prefixes", min=1, help="shared-prefix: prefixes that take turns.", rich_help_panel=DATA)
]
VocabSize: TypeAlias = Annotated[
    int, typer.Option("--vocab-size", min=33, help="Random token ids are below this.", rich_help_panel=DATA)
]

Goodput: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--goodput", metavar="NAME:MS", help="Objective: ttft, tpot or e2el; repeatable.", rich_help_panel=REPORT
    ),
]
JsonFile: TypeAlias = Annotated[
    str | None,
    typer.Option("--json", metavar="FILE", help="Write the report as JSON; - is stdout.", rich_help_panel=REPORT),
]
Detailed: TypeAlias = Annotated[
    bool, typer.Option("--detailed", help="JSON: also lists with an entry per request.", rich_help_panel=REPORT)
]
Label: TypeAlias = Annotated[str, typer.Option("--label", help="A word about the run.", rich_help_panel=REPORT)]
