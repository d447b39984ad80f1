"""Hook of the documentation site: the report of `qg report`, results/index.html, is results/report.html there.

README.md of a folder becomes its index.html, so both want the same place. `exclude_docs` leaves the report out, and
this hook adds it under another name; links to it follow.
"""

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the report."""
    report = File("results/index.html", config.docs_dir, config.site_dir, config.use_directory_urls)
    report.dest_uri = report.url = "results/report.html"
    report.inclusion = InclusionLevel.INCLUDED
    files.append(report)
    return files
