"""The laboratory: everything that measures, trains, reproduces, draws and prints. Nothing outside imports it."""
