"""What is installed, for tests of what older versions lack."""

from importlib import metadata


def before(torch_version: str) -> bool:
    """Whether torch is older than ``torch_version``, as in ``before("2.10")``."""
    return _number(metadata.version("torch")) < _number(torch_version)


def _number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split("+")[0].split(".")[:2]))
