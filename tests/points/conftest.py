"""The zygote of the kill tests, for points that show only with several ranks."""

from tests.kill.conftest import zygote

__all__ = ["zygote"]
