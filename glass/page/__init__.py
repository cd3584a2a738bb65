"""HTML pages of runs and sweeps, each one file that opens offline."""
