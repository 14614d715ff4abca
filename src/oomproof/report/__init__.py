"""Showing a Measurement: on a terminal (``terminal``) and as JSON (``json_output``)."""
