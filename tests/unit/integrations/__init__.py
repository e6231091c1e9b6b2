"""Executors: movers, formats, directory and keeper parts, one file per idea."""
