"""One file per figure of the report. Start with `drawing.py`: a figure is a picture, words and numbers together."""
