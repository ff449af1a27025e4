"""From numbers to Matplotlib figures."""
