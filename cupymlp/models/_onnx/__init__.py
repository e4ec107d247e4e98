"""Reading and writing ONNX models, for `cupymlp.models.onnx`.

In this order: ``file`` (a file as a checked model, tensors as arrays), ``graph`` (nodes in order, names), ``algebra`` (what
elementwise nodes compute, and which activation that is), ``layers``, ``constants`` and ``shapes`` (nodes of constants, and of
lengths of axes), ``reader`` (from nodes to layers), ``operators`` and ``unchanged`` (one function an operator), and ``writer``.
"""
