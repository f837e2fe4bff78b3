"""The trainer behind ``dsv4-fsdp train``. Start reading at :mod:`dsv4_fsdp.train.loop`."""
