"""One room per benchmark command: run, report, page."""
