"""The models of the reference trainer."""
