"""What the package shows to the world, and that importing it does nothing else."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from typing import Any

import dsv4_fsdp

PUBLIC = [
    "Alignment",
    "AttentionError",
    "audit",
    "compile_blocks",
    "CompileReport",
    "Contract",
    "ContractError",
    "Dsv4FsdpError",
    "ShardingError",
    "ShardingPlan",
    "UnsupportedTorch",
    "contract_of",
    "fully_shard",
    "keep_fp32_islands",
    "materialize",
    "parallelize",
    "plan_sharding",
    "precision_table",
    "probe_gradients",
    "read_back",
    "refuse_uninitialized",
    "tie_compressors",
    "use_windowed_attention",
    "with_chunked_loss",
]
# What comes only when asked for: it needs transformers.
LAZY = ["use_windowed_attention"]


def test_public_names_are_these() -> None:
    """Adding one is a promise, and removing one breaks somebody."""
    shown = [n for n, v in vars(dsv4_fsdp).items() if not n.startswith("_") and not inspect.ismodule(v)] + LAZY
    assert set(LAZY) <= set(dir(dsv4_fsdp))
    assert sorted(shown, key=str.lower) == sorted(PUBLIC, key=str.lower)


_IMPORT = """
import json, logging, os, sys, warnings
import torch, torch.distributed.fsdp, torch.distributed.tensor  # what the package stands on may do as it likes

def state():
    loggers = {name: logger for name, logger in logging.root.manager.loggerDict.items() if name.startswith("dsv4")}
    return {
        "environ": dict(os.environ),
        "root handlers": [str(handler) for handler in logging.root.handlers],
        "our handlers": [str(h) for logger in loggers.values() for h in getattr(logger, "handlers", [])],
        "our levels": [logger.level for logger in loggers.values() if getattr(logger, "level", 0)],
        "level": logging.root.level,
        "warning filters": len(warnings.filters),
        "default dtype": str(torch.get_default_dtype()),
        "threads": torch.get_num_threads(),
        "process group": torch.distributed.is_initialized(),
        "cuda": torch.cuda.is_initialized(),
        "init_param_group": torch.distributed.fsdp._fully_shard._fully_shard._init_param_group.__module__,
    }

before = state()
import dsv4_fsdp, dsv4_fsdp.fsdp
modules = {name.partition(".")[0] for name in sys.modules}
print(json.dumps({"before": before, "after": state(), "modules": sorted(modules)}))
"""


def _imported() -> dict[str, Any]:
    # Not all of this process's environment: it has imported the package, and might have been changed by that.
    environ = {
        name: os.environ[name] for name in ("HOME", "LD_LIBRARY_PATH", "PATH", "PYTHONPATH") if name in os.environ
    }
    command = [sys.executable, "-W", "error", "-c", _IMPORT]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_importing_the_package_needs_torch_only_and_changes_nothing() -> None:
    """No trainer dependency comes along; no handler, environment variable, filter, dtype or patch is set."""
    seen = _imported()
    extras = {"accelerate", "datasets", "nemo_automodel", "peft", "pydantic", "rich", "safetensors", "transformers"}
    assert not (extras | {"torchao", "typer", "yaml"}) & set(seen["modules"])
    assert seen["after"] == seen["before"]
