"""What all rooms of the laboratory share: files of results, tables, charts, progress, seeds, times, and errors."""
