"""The generator (engine, task and scorer), which turns prompts into scored groups."""
