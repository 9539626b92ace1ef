"""Whether a training that was killed goes on with the rows that it would have had."""
