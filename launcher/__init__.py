"""The `tandem` command: a whole stack on one machine."""
