"""Recorded traffic: the capture file, what it says of each request, and how two recordings compare.

Owns the file format, the wiretap that fills it, redaction, the reading of outcomes out of messages, comparison and
explanation. Knows no service: a recording is made of the messages of `schemas` alone.
"""
