"""One chart per file: values in, inline SVG or HTML out, no script needed to read it.

Every chart carries its numbers as text, follows the page's colours through CSS classes, and has a
`<title>` for readers who cannot see it.  A table with the same data stands beside it in the page.
"""
