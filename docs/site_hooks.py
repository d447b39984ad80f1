"""Hooks of the documentation site.

results/ has a README.md, which becomes results/index.html, and the report, which is results/index.html already. In the
site the report is results/report.html.
"""

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Move the report away from the page of results; links to it follow."""
    report = files.get_file_from_path("results/index.html")
    if report is not None:
        report.dest_uri = report.url = "results/report.html"
    return files
