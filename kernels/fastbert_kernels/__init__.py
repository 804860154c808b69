"""Triton kernels of fastbert: one module an operation, importing torch and triton only.

Importing the package or one of its modules defines functions and does nothing else.
"""
