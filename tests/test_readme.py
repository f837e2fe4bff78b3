"""What README.md says can be run, runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cases_readme import run_readme_example

from pool import run_ranks

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_code_example_runs_on_two_ranks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The Python block, with a tiny checkpoint for `path` and two CPU ranks for the mesh."""
    from tiny_models import tiny_transformers

    tiny_transformers().save_pretrained(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len(code.strip().splitlines()) <= 12
    tables = run_ranks(2, run_readme_example, code, str(tmp_path))
    assert "collectives per step" in tables[0]
    assert "island: class list" in tables[0]


def test_every_file_that_the_readme_names_exists() -> None:
    """Test files, source files and folders alike."""
    names = set(re.findall(r"`([\w/]+\.py|docs/[\w./]+|tests/[\w./]+|constraints\.txt)`", README))
    assert len(names) > 8
    places = [ROOT, ROOT / "src" / "dsv4_fsdp"]
    missing = {name for name in names if not any((place / name).exists() for place in places)}
    assert missing == set()


def test_every_call_that_the_readme_names_exists() -> None:
    """The names in the table of calls are public names of the package."""
    import dsv4_fsdp
    import dsv4_fsdp.checkpoint_headers
    import dsv4_fsdp.fsdp

    for name in (
        "plan_sharding",
        "parallelize",
        "materialize",
        "refuse_uninitialized",
        "tie_compressors",
        "probe_gradients",
    ):
        assert name in README
        assert callable(getattr(dsv4_fsdp, name))
    assert callable(dsv4_fsdp.checkpoint_headers.fp32_names)
    assert callable(dsv4_fsdp.fsdp.fully_shard_deepseek_v4)


def test_make_targets_that_the_readme_names_exist() -> None:
    """`make train` and `make test`."""
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"make (\w+)", README):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target
