"""Several processes behind one port: `--workers N`. Decision 037 says what they share."""
