"""`natterjack chat`: a conversation in the terminal."""

from typing import TYPE_CHECKING, Annotated

import typer

from services.cli.options import ConfigFile, MaxTokens, Overrides, Seed, Temperature, load_pipeline

if TYPE_CHECKING:
    from services.cli.conversation import Conversation
    from services.cli.path import PathToModel


def chat(
    system: Annotated[
        str | None, typer.Option("--system", help="Instructions before the conversation.", show_default=False)
    ] = None,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 0.2,
    seed: Seed = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Talk to the model; an empty line is skipped, Ctrl-D ends the conversation.

    Uses the running deployment; where there is none, one is started for the call and stopped again.
    """
    loaded = load_pipeline(config, overrides)
    from services.cli.conversation import Conversation
    from services.cli.foreground import run
    from services.cli.path import PathToModel

    conversation = Conversation(
        loaded.settings.model.name,
        system=system,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        accept_timeout_s=loaded.settings.gateway.accept_timeout_s,
    )
    path = PathToModel(loaded.settings, config, tuple(overrides or ()))
    raise typer.Exit(run(_chat(path, conversation), path.kill))


async def _chat(path: "PathToModel", conversation: "Conversation") -> int:
    async with path.open() as bus:
        await conversation.hold(bus)
    return 0
