"""The cache manager's settings."""

from pydantic import Field

from services.runtime.settings import CommonSettings, Seconds, Section


class CacheManagerSettings(Section):
    """Which of several cache managers keeps the books."""

    lease_s: Seconds = Field(default=3.0, description="life of the hold on the books when it is not renewed")


class Settings(CommonSettings):
    """Everything that the cache manager reads."""

    cache_manager: CacheManagerSettings = CacheManagerSettings()
