"""The HTML report: page, sections and charts."""
