"""Helpers that every module may use: errors, settings, files, metric rows, text."""
