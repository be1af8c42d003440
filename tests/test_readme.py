"""The README's code is run as it stands."""

from pathlib import Path

import pytest


def test_there_is_code_and_no_block_is_empty(readme_blocks: list[str]) -> None:
    assert readme_blocks
    assert all(block.strip() for block in readme_blocks)


def test_code_runs(readme_blocks: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile("\n".join(readme_blocks), "README.md", "exec"), {"__name__": "readme"})
