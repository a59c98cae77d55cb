"""What pyproject.toml cannot say: the demo's files lie outside the package, and the index page has no files beside it."""

import re
import tomllib
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
SOURCE = tomllib.loads((HERE / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Source"]


def with_whole_addresses(text: str) -> str:
    """README.md for the page of an index: links to files of the repository have whole addresses, comments are left out."""
    text = re.sub(r"<!--.*?-->\n*", "", text, flags=re.DOTALL)
    text = re.sub(r"!\[([^\]]*)\]\((?!https?:)([^)#]+)\)", rf"![\1]({SOURCE}/raw/main/\2)", text)
    return re.sub(r"(?<!!)\[([^\]]*)\]\((?!https?:|#)([^)]+)\)", rf"[\1]({SOURCE}/blob/main/\2)", text)


setup(
    long_description=with_whole_addresses((HERE / "README.md").read_text(encoding="utf-8")),
    long_description_content_type="text/markdown",
    packages=[*find_packages(include=["packlora*"]), "packlora.examples"],
    package_dir={"packlora.examples": "examples"},
)
