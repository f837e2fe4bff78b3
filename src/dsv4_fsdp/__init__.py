"""Train DeepSeek-V4 with PyTorch FSDP2 without losing its fp32."""

import typing

from .alignment import Alignment as Alignment
from .alignment import tie_compressors as tie_compressors
from .auditing import audit as audit
from .chunked_loss import with_chunked_loss as with_chunked_loss
from .compiling import CompileReport as CompileReport
from .compiling import compile_blocks as compile_blocks
from .contract import Contract as Contract
from .contract import contract_of as contract_of
from .errors import AttentionError as AttentionError
from .errors import ContractError as ContractError
from .errors import Dsv4FsdpError as Dsv4FsdpError
from .errors import ShardingError as ShardingError
from .errors import UnsupportedTorch as UnsupportedTorch
from .grouped_unit import fully_shard as fully_shard
from .integrations import keep_fp32_islands as keep_fp32_islands
from .live_precision import precision_table as precision_table
from .live_precision import read_back as read_back
from .materialize import materialize as materialize
from .materialize import refuse_uninitialized as refuse_uninitialized
from .parallelize import parallelize as parallelize
from .plan import ShardingPlan as ShardingPlan
from .plan import plan_sharding as plan_sharding
from .probe import probe_gradients as probe_gradients

__version__ = "0.1.0"

if typing.TYPE_CHECKING:
    from .attention import use_windowed_attention as use_windowed_attention


def __getattr__(name: str) -> typing.Any:
    # Windowed attention is the one public name that needs transformers; the rest needs torch only.
    if name == "use_windowed_attention":
        from .attention import use_windowed_attention

        return use_windowed_attention
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), "use_windowed_attention"})
