"""The page that `lln report` writes: charts and the one sentence each of them supports."""
