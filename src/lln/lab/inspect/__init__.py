"""How a pretrained model attends to texts: what `lln inspect` does."""
