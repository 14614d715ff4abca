"""Which kind of out-of-memory it was: from a log, from a capture, from one error message."""
