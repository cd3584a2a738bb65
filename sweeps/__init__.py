"""Many runs: the jobs of a sweep, and what their folders show."""
