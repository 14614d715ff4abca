"""The Measurement as JSON text; needs no rich."""

from __future__ import annotations

import json

from oomproof.measure.measurement import Measurement


def to_json_text(measurement: Measurement) -> str:
    """Return the Measurement as JSON with keys in the schema's order, indented by 2, ending in a newline.

    The text is ASCII, so that any terminal, log or pipe takes it, file names that are no Unicode included.
    """
    return json.dumps(measurement.to_json(), indent=2, allow_nan=False) + "\n"
