"""The gateway's settings."""

from pathlib import Path

from pydantic import Field, SecretStr

from services.runtime.settings import CommonSettings, Port, Seconds, Section


class GatewaySettings(Section):
    """Where HTTP is served, and its limits."""

    host: str = Field(
        default="127.0.0.1", min_length=1, description="address that HTTP is served on; 0.0.0.0: every one"
    )
    port: Port = Field(default=8000, description="port that HTTP is served on; 0: any free one")
    max_body_bytes: int = Field(default=4 << 20, ge=1024, description="largest request body; a larger one gets 413")
    keepalive_s: Seconds = Field(
        default=15.0, description="silence in a stream after which a comment is sent to keep it open"
    )
    api_keys: SecretStr | None = Field(
        default=None, description="keys that clients must send, separated by commas; null: see api_keys_file"
    )
    api_keys_file: Path | None = Field(
        default=None,
        description="file with one key per line, read again whenever it changes; null, and api_keys null: no keys",
    )
    cors_origins: tuple[str, ...] = Field(
        default=(), description='origins of web pages that may call us, such as https://example.org; "*": every one'
    )
    accept_timeout_s: Seconds = Field(default=10.0, description="how long a tokenizer may take to accept a request")


class Settings(CommonSettings):
    """Everything that the gateway reads."""

    gateway: GatewaySettings = GatewaySettings()
