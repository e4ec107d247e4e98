"""Importers: other libraries' trained networks, one file a library. None of them imports the library it reads."""
