"""What the site needs of mkdocs besides its settings: the pages of files are found by what they define.

Every page mentions hundreds of names that others define; in the search they would hide the page that is looked for.
"""

from typing import Any

MENTIONS = ("Imports", "Imported by", "Beside it", "Keywords")


def on_page_markdown(markdown: str, *, page: Any, **kwargs: Any) -> str:
    """mkdocs calls this for each page: sections that only mention names are left out of the search."""
    if page.file.src_uri.startswith("files/"):
        for title in MENTIONS:
            markdown = markdown.replace(f"\n## {title}\n", f"\n## {title} {{ data-search-exclude }}\n")
    return markdown
