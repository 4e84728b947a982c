"""From a softmax checkpoint to an LLN checkpoint: what `lln convert` does."""
