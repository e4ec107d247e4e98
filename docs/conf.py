"""Sphinx: ``python3 -m sphinx -W -n docs FOLDER`` with the packages of the extra ``docs``. .ci/run builds it so."""

import re

import cupymlp

project = "cupymlp"
author = "the cupymlp authors"
copyright = "2026, the cupymlp authors"  # noqa: A001 (Sphinx's name for it)
release = version = cupymlp.__version__

extensions = ["sphinx.ext.autodoc", "numpydoc", "myst_parser"]
exclude_patterns = ["_build"]
default_role = "py:obj"
html_theme = "pydata_sphinx_theme"
html_title = f"cupymlp {release}"
html_show_sourcelink = False
html_theme_options = {"show_toc_level": 2, "navigation_with_keys": False}

myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence", "deflist"]

# Types stay in the signatures, by the names that the source has for them.
autodoc_typehints = "signature"
autodoc_type_aliases = {
    name: name for name in ("ActivationArgument", "ActivationSpec", "DTypeLike", "Device", "NDArray", "Self")
}
autodoc_member_order = "bysource"
numpydoc_show_class_members = False
numpydoc_xref_param_type = False

nitpicky = True
nitpick_ignore_regex = [
    ("py:class", r"(?!cupymlp\.).*"),  # other libraries' types, whose documents are not at hand when these are built
]


def _names_of_aliases(_app, _what, _name, _object, _options, signature, returns):
    """Sphinx writes TypeAliasForwardRef('DTypeLike') for the names above."""
    return tuple(text and re.sub(r"TypeAliasForwardRef\('(\w+)'\)", r"\1", text) for text in (signature, returns))


def setup(app):
    """Called by Sphinx."""
    app.connect("autodoc-process-signature", _names_of_aliases)
