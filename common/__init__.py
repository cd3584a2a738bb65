"""Helpers that know nothing about GlassGPT: errors, settings, files, text."""
