"""Attention for Transformers' DeepSeek-V4 that scales: ``attn_implementation="dsv4_windowed"``.

::

    dsv4_fsdp.use_windowed_attention(model)          # a model that is there already, sharded or not

    import dsv4_fsdp.attention                       # or from the start
    AutoModelForCausalLM.from_pretrained(path, attn_implementation="dsv4_windowed")

Transformers runs this model with eager attention only, whose scores are ``[batch, heads, seq, seq + entries]`` although
a query sees at most ``sliding_window`` local keys and some compressed entries. Here time and memory grow with what is
seen (:mod:`.windowed`); the indexer's scores come in blocks (:mod:`.compressors`).

- Equal to eager in forward and gradient but for rounding: 1e-5 in fp32, and in bf16 no farther from fp64 than eager is.
- A block that activation checkpointing runs again does not choose again: :mod:`dsv4_fsdp.recomputation`.
- Right padding, batches, activation checkpointing, FSDP2 units, generation with Transformers' cache: as with eager.
- Packed documents (``position_ids`` that restart, no cache): windows, compressed entries and the indexer's choice stay
  inside their document, which eager's compressed entries do not. Where the indexer's scores tie exactly, ``torch.topk``
  decides, and may decide otherwise for a document alone.
- Not supported, and refused: 4-D masks, attention dropout, ``output_attentions``, packed documents with a cache. Second
  derivatives raise an error.

Importing this package registers the implementation and changes four classes of transformers so that they look for it
(:mod:`.register`). Nothing of it was run on a GPU.
"""

from .register import IMPLEMENTATION, use_windowed_attention

__all__ = ["IMPLEMENTATION", "use_windowed_attention"]
