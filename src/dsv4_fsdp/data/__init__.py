"""What a model is trained on: settings, preparation into a cache, and batches by step.

    settings ──> prepare ──> Batches ──> Batch
                 (files, chat, pretrain, sft, packing, token_cache)

The modules, each importing only those above it: ``settings`` (checked values, no torch), ``files`` (what is read),
``token_cache`` (what is kept), ``order`` (who takes which row when), ``batches`` (tensors), ``chat`` (messages to
tokens), ``packing`` (which documents share a row), ``pretrain`` and ``sft`` (files to rows), ``stdlib_text`` (data that
needs no files), ``prepare`` (all of it).

Nothing is imported here, so that settings can be checked without waiting for torch.
"""
