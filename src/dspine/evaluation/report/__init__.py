"""One self-contained HTML page from result files: `dspine report RESULTS... --output FOLDER`.

results reads files through the classes that wrote them, sections turn them into tables and figures, page writes HTML.
"""
