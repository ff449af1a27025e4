"""Studies of many runs: comparisons, tables, figures, reports."""
