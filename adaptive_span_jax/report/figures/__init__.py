"""One file per figure of the report. Start with `drawing.py`: a figure has a picture, a description and its data."""
