"""Measured tables: ``timing`` measures, ``latency`` says what is measured, ``report`` prints and writes JSON."""
