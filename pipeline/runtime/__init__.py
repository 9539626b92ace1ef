"""The stage runner, its clocks, metrics and traces."""
