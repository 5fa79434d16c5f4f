"""A small LLM inference engine with a pure functional core."""
