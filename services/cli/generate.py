"""`natterjack generate`: one prompt, its continuation on stdout."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from services.cli.options import AsJson, ConfigFile, MaxTokens, Overrides, Seed, Temperature, load_pipeline

if TYPE_CHECKING:
    from schemas.generation import GenerateRequest
    from services.cli.path import PathToModel


def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue.", show_default=False)],
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 0.0,
    seed: Seed = None,
    as_json: AsJson = False,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Continue a prompt, streaming the text to the terminal.

    Uses the running deployment; where there is none, one is started for the call and stopped again.
    """
    loaded = load_pipeline(config, overrides)
    from schemas.generation import GenerateRequest
    from services.cli.foreground import run
    from services.cli.path import PathToModel

    request = GenerateRequest(
        model=loaded.settings.model.name,
        prompt=prompt,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
    )
    path = PathToModel(loaded.settings, config, tuple(overrides or ()))
    accept_timeout_s = loaded.settings.gateway.accept_timeout_s
    raise typer.Exit(run(_generate(path, request, accept_timeout_s, as_json), path.kill))


async def _generate(path: "PathToModel", request: "GenerateRequest", accept_timeout_s: float, as_json: bool) -> int:
    import orjson

    from schemas.errors import ErrorReply, NatterjackError
    from services.cli.answer import ask, write_now

    try:
        async with path.open() as bus:
            answer = await ask(bus, request, accept_timeout_s, (lambda text: None) if as_json else write_now)
            write_now((orjson.dumps(answer.as_json()).decode() if as_json else "") + "\n")
            if not as_json:
                sys.stderr.write(answer.remark())
    except NatterjackError as error:
        if as_json:
            write_now(ErrorReply(error=error.body()).model_dump_json() + "\n")
        raise
    return 0
