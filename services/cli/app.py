"""The tree of commands. Each group has its own file, and imports heavy things when it runs."""

import typer

from services.cli.bench import bench
from services.cli.chat import chat
from services.cli.compare import compare
from services.cli.config import config
from services.cli.dead_letters import dead_letters
from services.cli.explain import explain
from services.cli.generate import generate
from services.cli.models import models
from services.cli.operations import control, drain, pause, resume
from services.cli.record import record
from services.cli.replay import replay
from services.cli.serve import serve
from services.cli.shadow import shadow
from services.cli.status import status
from services.cli.top import top
from services.cli.trace import trace
from services.cli.up import up

app = typer.Typer(
    name="natterjack",
    help="Serve language models as a pipeline of small services over NATS.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(generate)
app.command()(chat)
app.command()(up)
app.command()(status)
app.command()(serve)
app.command()(record)
app.command()(replay)
app.command()(compare)
app.command()(shadow)
app.command()(bench)
app.command()(explain)
app.command()(trace)
app.command()(top)
app.command()(drain)
app.command()(pause)
app.command()(resume)
app.command()(control)
app.add_typer(models, name="models")
app.add_typer(config, name="config")
app.add_typer(dead_letters, name="dead-letters")
