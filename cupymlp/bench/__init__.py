"""Measurements.

``command`` reads the arguments. The latency table: ``timing`` measures, ``latency`` says what is measured, ``report`` prints
and writes JSON. The sweep: ``cases`` says what is measured, ``sweep`` verifies and goes through it, ``machines`` puts the
entries of a case together from ``buffers``, ``floors`` and ``peers`` (``torch_peer``, ``jax_peer``), ``interleave`` measures
them by ``samplers``, ``sweep_report`` prints, ``plot`` draws, ``progress`` tells how far it is.
"""
