"""The tokenizer's settings."""

from pathlib import Path

from pydantic import Field

from services.runtime.settings import CommonSettings, Section


class TokenizerSettings(Section):
    """How many tokenizers there are, and how much each takes on."""

    replicas: int = Field(default=1, ge=1, le=64, description="instances that the supervisor starts")
    max_concurrent: int = Field(
        default=64, ge=1, description="requests that one instance validates and encodes at a time"
    )
    max_output_wait_ms: float = Field(
        default=30.0,
        ge=0,
        le=1000,
        description="milliseconds that new tokens, but for the first and the last of an output, may wait for more to "
        "go with them while many outputs are written; 0: never",
    )
    chat_template_file: Path | None = Field(
        default=None, description="Jinja chat template used instead of the model's own; null: the model's own"
    )
    structured_output: bool = Field(
        default=True, description="whether output may be bound to JSON, a schema, a regex, choices or a grammar"
    )


class Settings(CommonSettings):
    """Everything that the tokenizer reads."""

    tokenizer: TokenizerSettings = TokenizerSettings()
