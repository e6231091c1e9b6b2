"""The site of the documentation: Sphinx, MyST and furo (`make docs`, extra `docs`).

Pages also link to files and folders of the repository, which are no pages of the site.
`tests/test_docs.py` checks that every link and anchor leads somewhere.
"""

import autockpt

project = "autockpt"
version = release = autockpt.__version__
extensions = ["myst_parser"]
root_doc = "index"
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"autockpt {version}"
myst_heading_anchors = 4
suppress_warnings = ["myst.xref_missing"]
"""Sphinx does not know folders of the repository; test_docs.py does."""
