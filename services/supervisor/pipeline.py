"""The whole pipeline file as one settings model: every role's section, validated before anything starts."""

from pydantic import model_validator

from services.cache_manager.settings import CacheManagerSettings
from services.console.access import LOOPBACK_NAMES
from services.console.settings import ConsoleSettings
from services.executor.settings import ExecutorSettings, check_engine_has_model
from services.gateway.settings import GatewaySettings
from services.runtime.settings import CommonSettings
from services.scheduler.settings import SchedulerSettings
from services.supervisor.settings import SupervisorSettings
from services.tokenizer.settings import TokenizerSettings


class PipelineSettings(CommonSettings):
    """Every section of the pipeline file."""

    gateway: GatewaySettings = GatewaySettings()
    tokenizer: TokenizerSettings = TokenizerSettings()
    scheduler: SchedulerSettings = SchedulerSettings()
    cache_manager: CacheManagerSettings = CacheManagerSettings()
    executor: ExecutorSettings = ExecutorSettings()
    console: ConsoleSettings = ConsoleSettings()
    supervisor: SupervisorSettings = SupervisorSettings()

    @model_validator(mode="after")
    def _check_model(self) -> "PipelineSettings":
        check_engine_has_model(self.model, self.executor)
        return self

    @model_validator(mode="after")
    def _check_console(self) -> "PipelineSettings":
        """A door with a lock needs no window without one."""
        has_keys = self.gateway.api_keys is not None or self.gateway.api_keys_file is not None
        console = self.console
        if console.enabled and has_keys and console.api_keys is None and console.host not in LOOPBACK_NAMES:
            raise ValueError(
                f"the gateway needs API keys, but the console on {console.host} would show everybody its requests: "
                "set console.api_keys, keep console.host at 127.0.0.1, or set console.enabled=false"
            )
        return self
