"""Weightsync: the relay between one trainer and any number of replicas.

__main__ -> server -> relay -> backends, memory -> versions
"""
