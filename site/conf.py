"""Sphinx's settings: `make site`. The sources are what site/pages.py writes into build/pages."""

project = "Distributed deep learning, by measurement"
html_title = project
language = "en"
root_doc = "index"

extensions = ["myst_parser"]
myst_heading_anchors = 4  # links name headings as on GitHub
highlight_language = "none"  # pictures of characters are no code
smartquotes = False  # --flags stay --flags
suppress_warnings = ["myst.header"]  # a document may begin with a table of contents of its own

html_theme = "furo"
html_static_path = ["static", "../build/pages/made"]  # the planner's formulas, too
html_css_files = ["site.css"]
html_js_files = [("predict.js", {"defer": "defer"})]
html_favicon = "static/favicon.svg"
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "a11y-high-contrast-dark"

# Everything works from a folder, opened as a file: nothing is fetched.
html_show_search_summary = False
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False
html_use_index = False
