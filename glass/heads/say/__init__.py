"""State and draw what was measured of attention heads."""
