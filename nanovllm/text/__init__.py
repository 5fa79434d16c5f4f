"""Text on either side of the model: tokenizers, chat templates, detokenizing, stop strings."""
