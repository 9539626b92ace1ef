"""Files, pages and plots of reports."""
