"""Stacks that train, each a recipe that saves and resumes in its documented way."""
