"""The name by which :mod:`dsv4_fsdp.data.stdlib_text` was known before data had a package of its own."""

from dsv4_fsdp.data.stdlib_text import BOS, EOS, VOCAB_SIZE, StdlibText, stdlib_files

__all__ = ["BOS", "EOS", "VOCAB_SIZE", "StdlibText", "stdlib_files"]
