"""Lightning callbacks: what a run shows and leaves."""
