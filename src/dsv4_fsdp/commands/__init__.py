"""The subcommands of ``dsv4-fsdp`` that have a module of their own."""
