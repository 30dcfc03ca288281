"""Prices of ops and collectives on a described cluster, as integer nanoseconds.

Only + - * / and sqrt are used, all of them correctly rounded, so a price is the same number on every machine.
"""
