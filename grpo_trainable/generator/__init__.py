"""The generator: engine, task and scorer. Prompts in, scored groups out."""
