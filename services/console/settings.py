"""The console's settings."""

from pydantic import Field, SecretStr

from services.runtime.settings import CommonSettings, Port, Section


class ConsoleSettings(Section):
    """The page that shows the deployment: where it is served, to whom, and how much it remembers."""

    enabled: bool = Field(default=True, description="whether `natterjack up` runs a console")
    host: str = Field(
        default="127.0.0.1",
        min_length=1,
        description="address that the console is served on; another machine's people need console.api_keys",
    )
    port: Port = Field(
        default=8001,
        description="port of the console; 0: any free one, which `natterjack up` also takes when this one is taken",
    )
    api_keys: SecretStr | None = Field(
        default=None,
        description="passwords (of any user name) or bearer tokens that let people in, separated by commas; null: who "
        "asks for this machine by a loopback name",
    )
    max_traces_per_s: int = Field(
        default=20,
        ge=1,
        description="when more requests pass, only every second, fourth, … is traced for the console; failures always",
    )
    max_requests: int = Field(default=1000, ge=1, le=100_000, description="requests whose traces are remembered")


class Settings(CommonSettings):
    """Everything that the console reads."""

    console: ConsoleSettings = ConsoleSettings()
