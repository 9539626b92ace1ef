"""Sources that are lists of files: tables of the user's own, and tars."""
